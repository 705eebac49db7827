"""Nodes, processes and links together, on a clock of their own; takes note of what goes wrong."""

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

# What a call takes beside what it waits.
SLACK_S = 0.5
# Who claims with another spec than others is known to be another for that long.
MISMATCH_S = 1.0
ON_THE_WAY_S = 0.05
# A process's end is known to every node after that time.
TOLD_S = 2.0
# A daemon, a link or a call that failed may cost that long: a poll, its deadline, a new lease.
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
        self._files: dict[str, Path] = {}  # of the next life, by node
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
                    task.exception()  # whatever came of it, nobody is there to care

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
        """A daemon is away, or a link is not what it should be."""
        links = self.links
        until_s = (links.very_late_until_s, *links.stopped_until_s.values())
        stopped = max(until_s) > self.loop.time()
        return stopped or bool(links.cut) or links.loss > 0 or len(self.lives()) < len(self.nodes)

    def refused(self, process: Process, spec: GroupSpec) -> None:
        """Its spec differs from the others', who have not got its ranks: they hear of it too."""
        now = self.loop.time()
        process.refused_s = now
        others = [
            claim
            for claim in self.claims
            if claim.spec.difference(spec) is not None
            and claim.since_s + ON_THE_WAY_S < now
            and claim.process.refused_s + MISMATCH_S < now  # else it knows, and tries again
        ]
        taken = {rank for claim in self.claims for rank in claim.process.ranks}
        if taken.isdisjoint(process.ranks):
            self.doomed.extend((claim, process) for claim in others)

    def busy(self, process: Process, pid: int) -> None:
        """Its rank is another's, who must live, or have lived a moment ago."""
        now, holder = self.loop.time(), self.by_pid(pid)
        told = holder is not None and (holder.alive or now - holder.ended_s < TOLD_S)
        if not told and now - self.disturbed_s > CALM_AFTER_S:
            self.fault(f"{process}: its rank is said to be that of {holder}, which is gone")

    def disturb(self) -> None:
        self.disturbed_s = self.loop.time()

    def start(self, node: str) -> None:
        """A daemon on the files of the one before; nothing where one runs."""
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
        """The daemon does what comes before its end in good order."""
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
        """In the place of the kernel: a descriptor by which the process's end is heard."""
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
        """Ends what is left."""
        self.loop.set_exception_handler(lambda loop, context: None)
        self.loop.run_until_complete(self._end_all())
        for process in self.processes:
            process.forget()
        self.loop.close()


class _NoChild:
    """In the place of the process that makes NCCL unique ids."""

    made = itertools.count(1)
    over = True

    async def make(self, count: int, life_s: float) -> unique_ids.UniqueIds:
        await asyncio.sleep(0.05)
        return unique_ids.UniqueIds(tuple(b"%d" % next(self.made) for _ in range(count)), "2.28")

    def kill(self) -> None:
        """There is none."""

    async def close(self) -> None:
        """There is none."""


@contextlib.contextmanager
def simulated(seed: int, nodes: tuple[str, ...]) -> Iterator[SimulatedCluster]:
    """A cluster whose every chance comes from the seed."""
    chance = random.Random(seed)
    random.seed(seed)  # of pauses in the daemons
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
        # So that a seed shows the same on every machine.
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
