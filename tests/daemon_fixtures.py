"""Fixtures that start a real daemon for tests of client and command line; waits are bounded."""

from __future__ import annotations

import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import guardian
import pytest

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime

READY_TIMEOUT_S = 60.0
WAIT_S = 60.0


@pytest.fixture
def directory() -> Iterator[Path]:
    """Makes a socket directory, because pytest's own are too long for a socket's name."""
    path = Path(tempfile.mkdtemp(prefix="ept-"))
    yield path
    shutil.rmtree(path)


def start_daemon(directory: Path, *options: str) -> runtime.Child:
    """Returns a daemon that already answers."""
    child = runtime.Child.start(directory, ["--max-host-bytes", "1G", *options])
    guardian.protect(child.pid)
    child.wait_ready(READY_TIMEOUT_S)
    return child


@pytest.fixture
def daemon(directory: Path) -> Iterator[runtime.Child]:
    """A running daemon; after the test it must still exit cleanly."""
    child = start_daemon(directory)
    yield child
    code = child.stop()
    assert code == 0, child.log_tail(50)


@pytest.fixture
def address(daemon: runtime.Child) -> str:
    return f"unix://{daemon.directory}"


@pytest.fixture
def admin(address: str) -> Iterator[source.Source]:
    """The daemon's admin service."""
    with source.open_source(address, timeout_s=WAIT_S) as found:
        yield found


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Returns the first true value of `condition`; fails after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        pause.wait(0.02)


def wait_gone(pid: int) -> None:
    """Waits until a process that is not our child has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(WAIT_S * 1000), f"process {pid} is still there after {WAIT_S} s"
    finally:
        os.close(fd)
