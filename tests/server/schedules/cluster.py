"""Nodes, processes and links on simulated time; records everything that goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
import secrets
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from ep_runtime.specs import GroupSpec
from ep_runtime_server.callers import sessions
from ep_runtime_server.cluster import coordination
from ep_runtime_server.memory import devices
from ep_runtime_server.nccl import unique_ids
from schedules.clock import VirtualLoop
from schedules.daemons import Life, life_of_task
from schedules.links import Links
from schedules.processes import Claim, Process

# Time of a call besides its waits.
SLACK_S = 0.5
# A claim with another spec than the others' must be refused within this time.
MISMATCH_S = 1.0
ON_THE_WAY_S = 0.05
# Every node knows of a process's end after this time.
TOLD_S = 2.0
# Delay after a failed daemon, link or call: a poll, its deadline, a new lease.
CALM_AFTER_S = 12.0
_FREE_BYTES = 1 << 34


class SimulatedCluster:
    """Attributes:
    loop, links: time, and the wire.
    processes: all that there ever were; some live.
    claims: creates that wait at a daemon.
    doomed: those that waited while somebody came with another spec, and who it was.
    disturbed_s: when a daemon, a link or a call last failed, or came back.
    faults: what may not be.
    said: what happened, for who reads the schedule of a fault.
    """

    def __init__(self, seed: int, nodes: tuple[str, ...], directory: Path) -> None:
        self.loop = VirtualLoop(seed)
        self.nodes = nodes
        self.pids = itertools.count(101)
        self.processes: list[Process] = []
        self.claims: list[Claim] = []
        self.doomed: list[tuple[Claim, Process]] = []
        self.disturbed_s = 0.0
        self.faults: list[str] = []
        self.said: list[str] = []
        self._directory = directory
        self._lives: dict[str, Life] = {}
        self._num_lives = itertools.count(1)
        self._files: dict[str, Path] = {}  # of the next life of a node's daemon
        self.links = Links(seed, self._lives.get)
        self.loop.set_task_factory(self._make_task)
        self.loop.set_exception_handler(self._unread)
        self.ever: list[Life] = []

    def say(self, text: str) -> None:
        self.said.append(f"{self.loop.time() - 1000.0:9.4f} {text}")

    def fault(self, text: str) -> None:
        self.faults.append(text)
        self.say(f"FAULT: {text}")

    def _make_task(self, loop: Any, work: Coroutine[Any, Any, Any], **more: Any) -> Any:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
        context = more.get("context")
        life = context.get(life_of_task) if context is not None else life_of_task.get()
        if life is not None:
            life.tasks.add(task)

            def over(task: asyncio.Task[Any]) -> None:
                life.tasks.discard(task)
                if not life.alive and not task.cancelled():
                    task.exception()  # its result does not matter, because the caller has ended

            task.add_done_callback(over)
        return task

    def _unread(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.fault(f"{context.get('message')}: {error!r} of {context.get('task')}")

    # Daemons

    def life(self, node: str) -> Life | None:
        found = self._lives.get(node)
        return found if found is not None and found.alive else None

    def lives(self) -> list[Life]:
        return [life for life in self._lives.values() if life.alive]

    @property
    def fails(self) -> bool:
        """Whether a daemon is away, or a link is disturbed."""
        links = self.links
        until_s = (links.very_late_until_s, *links.stopped_until_s.values())
        stopped = max(until_s) > self.loop.time()
        return stopped or bool(links.cut) or links.loss > 0 or len(self.lives()) < len(self.nodes)

    def refused(self, process: Process, spec: GroupSpec) -> None:
        """A process was refused for its spec; other claims of its ranks must end too."""
        now = self.loop.time()
        process.refused_s = now
        others = [
            claim
            for claim in self.claims
            if claim.spec.difference(spec) is not None
            and claim.since_s + ON_THE_WAY_S < now
            and claim.process.refused_s + MISMATCH_S < now  # otherwise it knows, and tries again
        ]
        taken = {rank for claim in self.claims for rank in claim.process.ranks}
        if taken.isdisjoint(process.ranks):
            self.doomed.extend((claim, process) for claim in others)

    def busy(self, process: Process, pid: int) -> None:
        """A process was refused because another holds its rank: it must live, or have just died."""
        now, holder = self.loop.time(), self.by_pid(pid)
        told = holder is not None and (holder.alive or now - holder.ended_s < TOLD_S)
        if not told and now - self.disturbed_s > CALM_AFTER_S:
            self.fault(f"{process}: its rank is said to be that of {holder}, which is gone")

    def disturb(self) -> None:
        self.disturbed_s = self.loop.time()

    def start(self, node: str) -> None:
        """Starts a daemon on its predecessor's files; does nothing if one runs."""
        if self.life(node) is not None:
            return
        directory = self._files.pop(node, None)
        if directory is None:
            directory = self._directory / f"{node}0"
            directory.mkdir()
        self.disturb()
        life = self._lives[node] = Life(node, directory, self.loop, self.links, self.fault)
        self.ever.append(life)
        self.say(f"daemon {node} starts")

    def kill(self, node: str) -> None:
        life = self.life(node)
        if life is not None:
            self.disturb()
            self._files[node] = self._directory / f"{node}{next(self._num_lives)}"
            life.end(self._files[node])
            self.say(f"daemon {node} is killed")

    async def leave(self, node: str) -> None:
        """Ends the daemon in good order."""
        life = self.life(node)
        if life is not None:
            self.disturb()
            self.say(f"daemon {node} leaves")
            with contextlib.suppress(asyncio.CancelledError):
                await life.spawn(life.leave())

    # Processes

    def process(self, node: str, ranks: tuple[int, ...]) -> Process:
        made = Process(self, node, ranks)
        self.processes.append(made)
        return made

    def living(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    def by_pid(self, pid: int) -> Process | None:
        return next((process for process in self.processes if process.pid == pid), None)

    def waited(self, what: str, process: Process, took_s: float, wait_s: float) -> None:
        if took_s > wait_s + SLACK_S:
            self.fault(f"{process}: {what} took {took_s:.2f} s, its wait is {wait_s:g} s")

    def open_process(self, pid: int, start_s: float | None) -> int | None:
        """Replaces the kernel's pidfd: a descriptor that reports the process's end."""
        process = self.by_pid(pid)
        return os.dup(process.exit_fd) if process is not None and process.alive else None

    async def _end_all(self) -> None:
        for life in self.lives():
            life.end(None)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Ends all daemons and processes that are left."""
        self.loop.set_exception_handler(lambda loop, context: None)
        self.loop.run_until_complete(self._end_all())
        for process in self.processes:
            process.forget()
        self.loop.close()


class _NoChild:
    """Replaces the process that makes NCCL unique ids."""

    made = itertools.count(1)
    over = True

    async def make(self, count: int, life_s: float) -> unique_ids.UniqueIds:
        await asyncio.sleep(0.05)
        return unique_ids.UniqueIds(tuple(b"%d" % next(self.made) for _ in range(count)), "2.28")

    def kill(self) -> None:
        """Does nothing, because no process was started."""

    async def close(self) -> None:
        """Does nothing, because no process was started."""


@contextlib.contextmanager
def simulated(seed: int, nodes: tuple[str, ...]) -> Iterator[SimulatedCluster]:
    """Yields a cluster whose random draws all come from the seed."""
    chance = random.Random(seed)
    random.seed(seed)  # of random pauses in the daemons
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # files cost little there
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ept-", dir=memory))
        made = SimulatedCluster(seed, nodes, Path(directory))
        put = mock.patch.object
        stack.enter_context(
            put(secrets, "token_hex", lambda count=32: chance.randbytes(count).hex())
        )
        stack.enter_context(put(sessions, "open_process", made.open_process))
        stack.enter_context(put(sessions, "process_start_s", lambda pid: float(pid)))
        # So that a seed gives the same run on every machine.
        stack.enter_context(put(devices, "available_bytes", lambda: _FREE_BYTES))
        for module in (coordination, unique_ids):
            stack.enter_context(put(module, "IdProcess", _NoChild))
        logging.disable(logging.CRITICAL)
        gc.disable()
        try:
            yield made
        finally:
            made.close()
            gc.enable()
            logging.disable(logging.NOTSET)
