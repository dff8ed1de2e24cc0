"""Commands that are more than a few lines; `cli.py` lists them all."""
