"""A warm daemon of our own for the benches that measure from outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ep_runtime_client.daemons import addresses, runtime

READY_TIMEOUT_S = 30.0


@contextlib.contextmanager
def warm_daemon() -> Iterator[str]:
    """Starts a private daemon, gives its address, ends it."""
    daemon = runtime.open_runtime(addresses.Address(addresses.EMBEDDED), READY_TIMEOUT_S)
    try:
        yield f"unix://{daemon.directory}"
    finally:
        daemon.stop()
