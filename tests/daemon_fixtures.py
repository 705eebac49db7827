"""Fixtures around a real daemon, for tests of client and command line. Every wait is bounded."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import guardian
import pytest

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import children

READY_TIMEOUT_S = 60.0
WAIT_S = 60.0
TALK_S = 120.0  # of processes, most of which start JAX, several at once


def package_path() -> str:
    """A PYTHONPATH under which a child imports the packages that this process imports.

    What is on ours stays on it, behind: the packages that ours need may be installed there.
    """
    found = []
    for name in ("ep_runtime", "ep_runtime_server", "ep_runtime_client", "ep_runtime_bench"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found.append(str(Path(spec.origin).parent.parent))
    ours = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(dict.fromkeys(found + ours))


@pytest.fixture(autouse=True)
def _children_import_what_we_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", package_path())
    for name in ("EP_RUNTIME_ADDRESS", "EP_RUNTIME_JOB", "EP_RUNTIME_DEBUG", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A socket directory: pytest's own are too long for a socket's name."""
    path = Path(tempfile.mkdtemp(prefix="ept-"))
    yield path
    shutil.rmtree(path)


def start_daemon(directory: Path, *options: str) -> children.Child:
    """A daemon that answers."""
    child = children.Child.start(directory, ["--max-host-bytes", "1G", *options])
    guardian.protect(child.pid)
    child.wait_ready(READY_TIMEOUT_S)
    return child


@pytest.fixture
def daemon(directory: Path) -> Iterator[children.Child]:
    """A running daemon; it must still end well after the test."""
    child = start_daemon(directory)
    yield child
    code = child.stop()
    assert code == 0, child.log_tail(50)


@pytest.fixture
def address(daemon: children.Child) -> str:
    return f"unix://{daemon.directory}"


@pytest.fixture
def admin(address: str) -> Iterator[source.Source]:
    """The daemon's admin service."""
    with source.open_source(address, timeout_s=WAIT_S) as found:
        yield found


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`; fails after WAIT_S."""
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


# JAX takes seconds of a core to import.
WITHOUT_JAX = """
import json, os, signal, sys
import ep_runtime as ep

def say(**values):
    print(json.dumps(values), flush=True)

def hear():
    return json.loads(sys.stdin.readline())
"""
PROLOGUE = (
    WITHOUT_JAX
    + """
import jax
jax.config.update("jax_num_cpu_devices", 4)

def mesh_of(size=4):
    import numpy as np
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:size]), ("ep",))

ARGUMENTS = dict(ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8,
                 max_top_k=2, alignment=8, max_token_dtype="float32")
"""
)


class Talker:
    """A process that says JSON lines to a test and hears some from it.

    Args:
        name: the process in messages.
        process: a Popen, or the like; its standard input hears.
        said: descriptor of what it says, closed with this.
    """

    def __init__(self, name: str, process: Any, said: int) -> None:
        self._name, self._process, self._heard = name, process, b""
        self._said = open(said, "rb", buffering=0)  # noqa: SIM115 - `close` closes it
        self.pid = process.pid
        guardian.protect(self.pid)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def heard(self, within_s: float = TALK_S) -> Any:
        """The next line that the process says."""
        # Read from the descriptor: lines in a reader's buffer are none that poll() tells of.
        poll = select.poll()
        poll.register(self._said, select.POLLIN)
        deadline = time.monotonic() + within_s
        while b"\n" not in self._heard:
            left_s = max(deadline - time.monotonic(), 0.0)
            assert poll.poll(left_s * 1000), f"{self._name} said nothing within {within_s:g} s"
            part = self._said.read(1 << 16)
            assert part, f"{self._name} ended with {self._process.wait(TALK_S)}"
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def silent(self) -> bool:
        """True if the process has said nothing since."""
        poll = select.poll()
        poll.register(self._said, select.POLLIN)
        return not self._heard and not poll.poll(0)

    def tell(self, value: Any = None) -> None:
        """Sends a line to the process."""
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        self._process.kill()
        assert self._process.wait(TALK_S) == -signal.SIGKILL

    def finish(self, within_s: float = TALK_S) -> int:
        """Waits for the process's own end; its exit code."""
        self._hang_up()
        return self._process.wait(within_s)

    def close(self) -> None:
        """Ends the process whatever it does, for teardown."""
        if not self.ended:
            self._process.kill()
            self._process.wait(TALK_S)
        self._hang_up()
        self._said.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class Program(Talker):
    """A Python program in a process of its own."""

    def __init__(self, text: str, *, prologue: str = PROLOGUE, **environment: str) -> None:
        said, theirs = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", prologue + text],
            stdin=subprocess.PIPE,
            stdout=theirs,
            env={**os.environ, **environment},
        )
        os.close(theirs)
        super().__init__("the program", process, said)

    def ended_within(self, seconds: float) -> bool:
        """Waits for the program's end, at most that long."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


@pytest.fixture
def run_program() -> Iterator[Callable[..., Program]]:
    """Starts programs; none outlives the test."""
    started: list[Program] = []

    def start(text: str, *, prologue: str = PROLOGUE, **environment: str) -> Program:
        started.append(Program(text, prologue=prologue, **environment))
        return started[-1]

    yield start
    for program in started:
        program.close()
