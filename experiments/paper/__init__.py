"""The runs behind the paper's claims, what is measured of their models, and what they say of each claim."""
