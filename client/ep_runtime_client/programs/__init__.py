"""Answers questions about compiled programs: their collectives, remat, and failures."""
