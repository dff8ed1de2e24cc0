"""Attacks on topovq, counted: damaged files, killed processes, hostile requests, lost ranks (`make campaign`)."""
