"""`ep-runtime demo --processes P`: starts P processes, passes Ctrl-C on, checks how they end.

Each process is `demo/worker.py` with D/P devices; the first one writes to our terminal, the others
to logs whose end is shown where one fails. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ep_runtime_client import children, runtime
from ep_runtime_client.cli import render
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.interrupt import INTERRUPTED
from ep_runtime_client.demo.together import Member

# The others of a process that failed hear of it within 2 s; a device that waits inside one of
# XLA's own collectives hears nothing.
_GRACE_S = 5.0
_TAIL_LINES = 15


def run(config: DemoConfig) -> int:
    """Runs the demo's processes; the exit code of the first one that failed, else 0."""
    if config.address is None and runtime.choose(None).kind == runtime.EMBEDDED:
        config = dataclasses.replace(config, address=runtime.NODE)
    with (
        tempfile.TemporaryDirectory(prefix="ep-runtime-demo-") as directory,
        _reserved_port() as port,
        _Processes(config, Path(directory), f"127.0.0.1:{port}") as started,
    ):
        return started.wait()


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port for the coordinator: held here without listening, bound beside us with REUSEPORT."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


class _Processes:
    """The processes of one demo; none outlives the block."""

    def __init__(self, config: DemoConfig, directory: Path, coordinator: str) -> None:
        self._config = config
        self._directory = directory
        self._coordinator = coordinator
        self._started: list[subprocess.Popen[bytes]] = []
        self._interrupts = 0
        self._changed = threading.Event()

    def __enter__(self) -> _Processes:
        self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            for index in range(self._config.processes):
                self._started.append(self._start(index))
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end_all()
        signal.signal(signal.SIGINT, self._previous)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        member = Member(index, self._config.processes, self._coordinator, str(self._directory))
        order = {"config": dataclasses.asdict(self._config), "member": dataclasses.asdict(member)}
        command = children.python_command("ep_runtime_client.demo.worker", [json.dumps(order)])
        with open(self._log(index), "wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end tells the process that we are gone
                stdout=None if index == 0 else log,
                stderr=None if index == 0 else log,
                start_new_session=True,  # Ctrl-C reaches us alone; they stop together
            )

    def _log(self, index: int) -> Path:
        return self._directory / f"{index}.log"

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts == 1 and self._started:
            self._started[0].send_signal(signal.SIGINT)
        self._changed.set()

    def wait(self) -> int:
        """Waits for all; gives those that are left some seconds where one has failed."""
        deadline: float | None = None
        while True:
            codes = [process.poll() for process in self._started]
            if None not in codes or self._interrupts > 1:
                return self._verdict(codes)
            if deadline is None and any(codes):
                deadline = time.monotonic() + _GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                return self._verdict(codes)
            self._changed.wait(0.1)
            self._changed.clear()

    def _verdict(self, codes: list[int | None]) -> int:
        if self._interrupts > 1:
            return INTERRUPTED
        failed = [(index, code) for index, code in enumerate(codes) if code]
        # Where several failed, the one that died is the cause and the others' errors follow.
        failed.sort(key=lambda item: (item[1] > 0, item[0]))
        for index, code in failed:
            if index > 0 and code != INTERRUPTED:
                lines = self._log(index).read_text(errors="replace").splitlines()
                render.err(f"process {index} ended with {code}")
                render.err("\n".join(lines[-_TAIL_LINES:]))
        if not failed:
            return 0
        code = failed[0][1]
        return code if code > 0 else 128 - code

    def _end_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
        for process in self._started:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
