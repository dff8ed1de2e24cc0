"""The study `prior`: models over the tokens of several codebooks."""
