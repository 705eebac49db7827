"""Starts, watches and ends jobs of several processes on this machine, for our own commands.

A job is one of our modules, running in P processes under jax.distributed. The first process writes
to our terminal, the others to logs; the end of a log is shown if its process fails. Imports no JAX.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ep_runtime.errors import EpRuntimeError
from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.daemons import command_line

INTERRUPTED = 130  # a shell's convention for a program that SIGINT ended
# Processes learn within 2 s that another one failed, but a device that waits inside one of XLA's
# own collectives never learns it.
_GRACE_S = 5.0
_TAIL_LINES = 15


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of a job.

    Attributes:
        index: 0 to processes - 1; 0 writes to the terminal.
        processes: number of processes.
        coordinator: address of jax.distributed's coordinator.
        directory: the parent's directory, in which processes leave files.
        name: name of the job.
    """

    index: int = 0
    processes: int = 1
    coordinator: str = ""
    directory: str = ""

    @property
    def name(self) -> str:
        return Path(self.directory).name


@contextlib.contextmanager
def reserved_coordinator() -> Iterator[str]:
    """Reserves an address for the coordinator, which binds it as well (REUSEPORT).

    Bound on all addresses, like the coordinator: a port that is free on one address may be in use
    by a connection on another address.
    """
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as held:
        if dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


class Members:
    """Runs the processes of one job, as a context manager; none outlives the block.

    Args:
        module: the module that each process runs; it ends in `run_member`.
        order: arguments for each process, sent as JSON.
        processes: P.
        directory: a directory that exists as long as the block.
        coordinator: address of jax.distributed's coordinator.
        may_die: index of a process whose SIGKILL does not end the job.
    """

    def __init__(
        self,
        module: str,
        order: Mapping[str, Any],
        *,
        processes: int,
        directory: Path,
        coordinator: str,
        may_die: int | None = None,
    ) -> None:
        self._module = module
        self._order = order
        self._processes = processes
        self._directory = directory
        self._coordinator = coordinator
        self._may_die = may_die
        self._started: list[subprocess.Popen[bytes]] = []
        self._interrupted = threading.Event()

    def __enter__(self) -> Members:
        self._previous = signal.signal(signal.SIGINT, lambda *_: self._interrupted.set())
        try:
            for index in range(self._processes):
                self._started.append(self._start(index))
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end_all()
        signal.signal(signal.SIGINT, self._previous)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        member = Member(index, self._processes, self._coordinator, str(self._directory))
        order = {"order": self._order, "member": dataclasses.asdict(member)}
        command = command_line.python_command(self._module, [json.dumps(order)])
        with open(self._log(index), "wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # EOF tells the process that this one has ended
                stdout=None if index == 0 else log,
                stderr=None if index == 0 else log,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends them all
            )

    def _log(self, index: int) -> Path:
        return self._directory / f"{index}.log"

    def wait(self) -> int:
        """Waits for all processes; if one fails the others get a few seconds, on Ctrl-C none.

        Returns:
            The exit code of the process whose failure is the cause, else 0.
        """
        deadline: float | None = None
        while True:
            codes = [process.poll() for process in self._started]
            if self._may_die is not None and codes[self._may_die] == -signal.SIGKILL:
                codes[self._may_die] = 0
            if None not in codes or self._interrupted.is_set():
                return self._verdict(codes)
            if deadline is None and any(codes):
                deadline = time.monotonic() + _GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                return self._verdict(codes)
            self._interrupted.wait(0.1)

    def _verdict(self, codes: list[int | None]) -> int:
        if self._interrupted.is_set():
            return INTERRUPTED
        failed = [(index, code) for index, code in enumerate(codes) if code]
        # If several failed, the killed one is the cause of the others' errors.
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


def _end_with_parent() -> None:
    """Waits for the end of standard input, which is the parent's end, then ends this process."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _keep_output_ours(member: Member) -> None:
    """Sends output of Gloo's C++ code on file descriptor 1 to a log, but not Python's output."""
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    with open(Path(member.directory) / f"{member.index}.native.log", "wb") as log:
        os.dup2(log.fileno(), 1)
    sys.stdout = ours


def run_member(work: Callable[[dict[str, Any], Member], int], name: str) -> NoReturn:
    """Runs one process of a job, with the arguments that `Members` wrote.

    Args:
        work: (order, member) -> exit code. It imports JAX itself.
        name: name of the command, for error lines.
    """
    said = json.loads(sys.argv[1])
    member = Member(**said["member"])
    threading.Thread(target=_end_with_parent, name="job-parent", daemon=True).start()
    _keep_output_ours(member)
    try:
        code = work(said["order"], member)
        atexit._run_exitfuncs()  # not after an error: JAX's would wait for dead processes
    except KeyboardInterrupt:
        code = INTERRUPTED
    except EpRuntimeError as error:
        render.err(f"{name}: {error}")
        code = cli.exit_code(error)
    except Exception:  # noqa: BLE001 - an XLA error
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # in Python's own end, threads of JAX and gRPC may abort us


def start_jax(
    devices: int, member: Member, platform: str = "cpu", *, survive: bool = False
) -> None:
    """Starts JAX with this process's devices, and jax.distributed if there are several processes.

    Args:
        devices: number of the whole job's devices; CPU devices are created, GPUs must exist.
        member: this process of the job; it drives its share of the GPUs in order.
        platform: "cpu", with gloo between processes, or "gpu".
        survive: whether to use `ep.distributed`, so that the others continue if a process dies.
    """
    import jax

    from ep_runtime_client import distributed

    here = devices // member.processes
    ours = None
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", here)
    else:
        jax.config.update("jax_platforms", "cuda,cpu")
        ours = list(range(member.index * here, (member.index + 1) * here))
    if member.processes > 1:
        if platform == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        numbers: dict[str, Any] = {"num_processes": member.processes, "process_id": member.index}
        if survive:
            distributed.initialize("node", **numbers, local_device_ids=ours, job=member.name)
        else:
            jax.distributed.initialize(member.coordinator, **numbers, local_device_ids=ours)
