"""Moves tokens to their experts and back: prepare, dispatch, combine, and where they run."""
