"""Daemons of several nodes on this machine, for `ep-runtime demo --nodes N`. Imports no JAX."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from ep_runtime import env
from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import children

START_TIMEOUT_S = 30.0


@contextlib.contextmanager
def started(count: int) -> Iterator[list[str]]:
    """Addresses of daemons node0, which coordinates, to node{count - 1}, on loopback.

    They end with the block, and with this process however that ends.

    Raises:
        RuntimeUnavailableError: one does not start, or does not join.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile())  # mode 0600
        file.write(secrets.token_hex(32).encode())
        file.flush()
        plain = ["--insecure", "--secret", file.name]
        found = [stack.enter_context(_daemon("node0", "--coordinator", "127.0.0.1:0", plain))]
        coordinator = _cluster(found[0])["coordinator"]
        for number in range(1, count):
            joining = _daemon(f"node{number}", "--join", coordinator, plain)
            found.append(stack.enter_context(joining))
        for address in found[1:]:
            _wait_joined(address)
        yield found


@contextlib.contextmanager
def _daemon(name: str, role: str, address: str, plain: Sequence[str]) -> Iterator[str]:
    directory = env.private_directory()
    ourselves = os.pidfd_open(os.getpid())
    try:
        options = ["--parent-pidfd", str(ourselves), "--drain-s", "0", "--node", name, *plain]
        child = children.Child.start(directory, [*options, role, address], pass_fds=[ourselves])
        child.wait_ready(START_TIMEOUT_S)
        yield f"unix://{directory}"
        child.stop()
    finally:
        os.close(ourselves)
        children.remove_directory(directory)


def _cluster(address: str) -> dict[str, str]:
    with source.open_source(address, timeout_s=START_TIMEOUT_S) as daemon:
        found: dict[str, str] = daemon.status()["cluster"]
        return found


def _wait_joined(address: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    pause = threading.Event()
    while (found := _cluster(address))["link"] != "JOINED":
        if time.monotonic() > deadline:
            raise RuntimeUnavailableError(
                f"node {found['node']} did not join within {START_TIMEOUT_S:g} s: {found['error']}",
                address=address,
            )
        pause.wait(0.02)
