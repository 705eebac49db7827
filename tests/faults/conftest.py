"""Starts daemons that receive random calls and bytes."""

from fuzzing import fuzzed_daemon  # noqa: F401 - fixtures are found by name
