"""Daemons that draws of calls and bytes are sent to."""

from fuzzing import fuzzed_daemon  # noqa: F401 - fixtures are found by name
