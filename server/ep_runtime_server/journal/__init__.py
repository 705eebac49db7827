"""Keeps the daemon's state over restarts: the journal's file, its records, and the recovery."""
