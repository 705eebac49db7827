"""Moves tokens to their experts and back: prepare, dispatch, combine, and how they run."""
