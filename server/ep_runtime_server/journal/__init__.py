"""Keeps state over restarts of the daemon: the file, its records, and the recovery."""
