"""Answers questions about compiled programs: their collectives, saved values, and failures."""
