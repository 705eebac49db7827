"""Jobs of several processes under jax.distributed, for tests.

A `Job` starts P processes of one script, each with its own CPU devices and gloo between them. It
owns the coordinator's port, bounds every wait, checks every exit code, kills what is left at its
end, and shows the end of each process's log where a test fails.

The script talks with the test in JSON lines: `say(...)`, `hear()`. It finds `index`, `jax`, `np`,
`ep` and `mesh_of` in its scope and jax.distributed initialised.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from child_programs import TALK_S, Talker
from raw_process import FORKS, run_script

from ep_runtime_client.jobs.members import reserved_coordinator

# The processes' own limit: they end even if nobody is left to kill them.
LIFE_S = 280.0
TAIL_LINES = 30
TESTS = str(Path(__file__).resolve().parent.parent)

_START = """
import faulthandler, json, os, signal, sys, time
faulthandler.enable()
faulthandler.dump_traceback_later(float(os.environ["TEST_LIFE_S"]), exit=True)
import jax
import numpy as np
distributed = {}
"""
CPU = """
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", int(os.environ["TEST_DEVICES"]))
jax.config.update("jax_cpu_collectives_implementation", "gloo")
"""
_REST = """
import ep_runtime as ep

index = int(os.environ["TEST_INDEX"])
_talk = os.fdopen(int(os.environ["TEST_TALK_FD"]), "w", buffering=1)

def say(**values):
    print(json.dumps(values), file=_talk, flush=True)

def hear():
    return json.loads(sys.stdin.readline())

def mesh_of(*sizes, names=("ep",)):
    sizes = sizes or (len(jax.devices()),)
    count = int(np.prod(sizes))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), names)

initialize = distributed.pop("by", jax.distributed.initialize)
initialize(
    os.environ["TEST_COORDINATOR"],
    num_processes=int(os.environ["TEST_PROCESSES"]),
    process_id=index,
    initialization_timeout=100,
    **distributed,
)
"""


def prologue_of(devices: str) -> str:
    """Returns the code that runs before a script; `devices` is code that chooses JAX's devices.

    It runs before a backend starts, with `json`, `os` and `jax` in its scope, and may add arguments
    of jax.distributed.initialize to `distributed`, and "by", what initializes in its place.
    """
    return _START + devices + _REST


PROLOGUE = prologue_of(CPU)


# Python or JAX reads these variables when it starts: after a fork it is too late.
_READ_AT_START = ("JAX_", "LD_", "XLA_")


class _Forked:
    """A process that need not import JAX, with what a `Worker` asks of a Popen."""

    def __init__(self, script: str, environment: dict[str, str], log: Path, talk: int) -> None:
        theirs, ours = os.pipe()
        ends = Connection(theirs, writable=False), Connection(os.dup(talk), readable=False)
        with ends[0], ends[1]:
            run = (script, environment, log, *ends)
            self._process = FORKS.Process(target=run_script, args=run, daemon=True)
            self._process.start()
        self.stdin = os.fdopen(ours, "wb")
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _new(
    launcher: Sequence[str], script: str, environment: dict[str, str], log: Path, talk: int
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [*launcher, sys.executable, "-P", "-c", script],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "TEST_TALK_FD": str(talk)},
            pass_fds=[talk],
        )


class Worker(Talker):
    """One process of a job."""

    def __init__(
        self,
        index: int,
        script: str,
        log: Path,
        environment: dict[str, str],
        start: Callable[[str, dict[str, str], Path, int], Any],
    ) -> None:
        """`start` is `_Forked` or has its arguments: (script, environment, log, descriptor for
        `say`).
        """
        self.index = index
        self.log = log
        said, theirs = os.pipe()
        log.write_bytes(b"")
        process = start(script, {**environment, "TEST_INDEX": str(index)}, log, theirs)
        os.close(theirs)
        super().__init__(f"process {index}", process, said)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Job:
    """Context manager: P processes of one script; none outlives it.

    Args:
        script: what runs after `PROLOGUE`.
        processes: P.
        devices: CPU devices of each process.
        environment: more variables for every process, for example EP_RUNTIME_ADDRESS.
        prologue: what runs before the script.
        own: more variables of each process alone, in order.
        places: of each process, a command that ends in running its arguments where it is to run.
        host: address of process 0 to the others.
    """

    def __init__(
        self,
        script: str,
        *,
        processes: int,
        devices: int,
        prologue: str = PROLOGUE,
        life_s: float = LIFE_S,
        own: Sequence[Mapping[str, str]] = (),
        places: Sequence[Sequence[str]] = (),
        host: str = "127.0.0.1",
        **environment: str,
    ) -> None:
        self.processes, self.devices = processes, devices
        self._own = own or [{}] * processes
        self._places = places or [()] * processes
        self._host = host
        self._script = prologue + script
        given = [name for more in (environment, *own) for name in more]
        self._new = (
            places or CPU not in prologue or any(n.startswith(_READ_AT_START) for n in given)
        )
        self._environment = {
            **os.environ,
            "TEST_PROCESSES": str(processes),
            "TEST_DEVICES": str(devices),
            "TEST_LIFE_S": str(life_s),
            **environment,
        }
        self._stack = contextlib.ExitStack()
        self.workers: list[Worker] = []

    def __enter__(self) -> Job:
        with contextlib.ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ept-job-")))
            port = stack.enter_context(reserved_coordinator()).rpartition(":")[2]
            self._environment["TEST_COORDINATOR"] = f"{self._host}:{port}"
            self._logs = logs
            self._stack = stack
            for index in range(self.processes):
                self.workers.append(self.start(index))
            self._stack = stack.pop_all()
        return self

    def start(self, index: int) -> Worker:
        """Starts the process of that number, also another one after it has died."""
        log = self._logs / f"{index}.log"
        mine = {**self._environment, **self._own[index]}
        begin = functools.partial(_new, self._places[index]) if self._new else _Forked
        worker = Worker(index, self._script, log, mine, begin)
        self._stack.callback(worker.close)
        return worker

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            sys.stderr.write(self.tails())
        self._stack.close()

    def heard(self, within_s: float = TALK_S) -> list[Any]:
        """The next line of every process, in order."""
        deadline = time.monotonic() + within_s
        return [worker.heard(max(deadline - time.monotonic(), 0.1)) for worker in self.workers]

    def tell(self, value: Any = None) -> None:
        """Sends a line to every process."""
        for worker in self.workers:
            worker.tell(value)

    def finish(self, within_s: float = TALK_S) -> None:
        """Waits for every process's own end; each must end with 0."""
        deadline = time.monotonic() + within_s
        codes = [worker.finish(max(deadline - time.monotonic(), 0.1)) for worker in self.workers]
        assert codes == [0] * self.processes, f"exit codes {codes}"

    def end(self) -> None:
        """Lets every process continue from where it waits for a line, to its end."""
        self.tell()
        self.finish()

    def tails(self) -> str:
        """The end of every process's log."""
        return "\n".join(
            f"--- process {worker.index} (pid {worker.pid})\n{worker.tail()}"
            for worker in self.workers
        )


def run(script: str, *, processes: int, devices: int, **environment: str) -> list[Any]:
    """Runs a job to its end; returns each process's last line."""
    with Job(script, processes=processes, devices=devices, **environment) as job:
        said = job.heard()
        job.finish()
        return said
