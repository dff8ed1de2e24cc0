"""Codebooks of growing size, and the settings that were tried for them."""
