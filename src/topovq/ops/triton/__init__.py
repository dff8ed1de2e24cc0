"""Kernels, one file per operation, named as it."""
