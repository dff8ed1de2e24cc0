"""The paper: its tables, the runs that its claims rest on, what is measured of models, and the verdicts."""
