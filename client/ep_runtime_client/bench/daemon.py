"""A warm daemon of our own for the benches that measure from outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ep_runtime import env
from ep_runtime_client import children

READY_TIMEOUT_S = 30.0


@contextlib.contextmanager
def warm_daemon() -> Iterator[str]:
    """Starts a daemon, gives its address, ends it."""
    directory = env.private_directory()
    child = children.Child.start(directory, [])
    try:
        child.wait_ready(READY_TIMEOUT_S)
        yield f"unix://{directory}"
    finally:
        child.stop()
        children.remove_directory(directory)
