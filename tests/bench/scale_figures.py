"""Figures of one daemon with as many callers as it may ever have; they are simulated.

    python tests/bench/scale_figures.py [cluster [NODES [SECONDS]] | sessions [COUNT [SECONDS]] |
                                         layers [COUNT]]

With server, client and tests on PYTHONPATH. Prints one JSON line per figure: what, samples, p50,
worst, unit. Simulated nodes are NodeService's callers without daemons, simulated sessions callers
without processes: what they cost, they take from the same machine as the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cluster_places import place, plain_tcp
from daemon_figures import MIB, running, say
from harness import DaemonProcess
from raw_client import make_spec
from simulated import SimulatedNode, SimulatedSession

from ep_runtime import layer_specs, wire
from ep_runtime_server.nodes.seal import Seal

RANKS_PER_NODE = 8
MOST_RANKS = 1024  # of one group: `board_abi.MAX_MEETING_RANKS`
ROUNDS = 3
WATCHED_S = 12.0


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def at_work(works: Iterable[Awaitable[None]]) -> AsyncIterator[None]:
    """Beside what is measured; a failure of one of them is raised at the end."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        failed = [task for task in tasks if task.done() and not task.cancelled()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in failed:
            task.result()


class _Groups:
    """Every rank of every node in groups as large as may be."""

    def __init__(self, nodes: list[SimulatedNode]) -> None:
        share = MOST_RANKS // RANKS_PER_NODE
        self._all = [nodes[first : first + share] for first in range(0, len(nodes), share)]
        self.ranks = RANKS_PER_NODE * len(nodes)
        self._epochs: list[int] = []
        self._life = 0

    async def form(self) -> None:
        self._life += 1
        forming = []
        for number, nodes in enumerate(self._all):
            spec = wire.group_spec_to_proto(
                make_spec(f"g{number}", ranks=RANKS_PER_NODE * len(nodes), transport="xla")
            )
            forming += [
                node.form(f"g{number}", spec, self._ranks_of(position), self._life)
                for position, node in enumerate(nodes)
            ]
        epochs = await asyncio.gather(*forming)
        self._epochs = [epochs[MOST_RANKS // RANKS_PER_NODE * i] for i in range(len(self._all))]

    @staticmethod
    def _ranks_of(position: int) -> range:
        return range(RANKS_PER_NODE * position, RANKS_PER_NODE * (position + 1))

    async def lose(self) -> None:
        """A process of every eighth node ends."""
        await asyncio.gather(
            *(
                node.lose(f"g{number}", self._epochs[number], RANKS_PER_NODE * i, len(nodes))
                for number, nodes in enumerate(self._all)
                for i, node in enumerate(nodes)
                if i % 8 == 0
            )
        )


async def _cluster(daemon: DaemonProcess, address: str, count: int, watched_s: float) -> None:
    seal = Seal(Path(plain_tcp()[2]).read_bytes().strip())
    nodes = [SimulatedNode(number, address, seal) for number in range(count)]
    groups, pid = _Groups(nodes), daemon.status().pid
    taken: dict[str, list[float]] = {"join": [], "form": [], "lose": [], "form again": []}
    calls: dict[str, list[float]] = {"form": [], "form again": []}
    cpu: dict[str, list[float]] = {"form": [], "form again": []}

    async def timed(what: str, work: Awaitable[Any]) -> None:
        before = sum(sum(node.calls.values()) for node in nodes), cpu_s(pid)
        started = time.perf_counter()
        await work
        taken[what].append(time.perf_counter() - started)
        if what in calls:
            made = sum(sum(node.calls.values()) for node in nodes) - before[0]
            calls[what].append(made / groups.ranks)
            cpu[what].append(cpu_s(pid) - before[1])

    await timed("join", asyncio.gather(*(node.join() for node in nodes)))
    async with at_work(node.report() for node in nodes):
        await timed("form", groups.form())
        for _ in range(ROUNDS):
            await timed("lose", groups.lose())
            await timed("form again", groups.form())
        before = cpu_s(pid), time.perf_counter()
        await asyncio.sleep(watched_s)
        idle = (cpu_s(pid) - before[0]) / (time.perf_counter() - before[1])
    what = f"{groups.ranks} ranks on {count} nodes"
    for name, samples in taken.items():
        say(f"{name}, {what}", samples, "s")
    for name in calls:
        say(f"calls to the coordinator per rank: {name}, {what}", calls[name], "calls")
        say(f"coordinator's processor time: {name}, {what}", cpu[name], "s")
    say(f"coordinator's processor while nothing happens, {what}", [100 * idle], "%")
    say(f"RSS of the coordinator, {what}", [daemon.status().rss_bytes / MIB], "MiB")
    await asyncio.gather(*(node.close() for node in nodes))


def cluster(directory: Path, count: int, watched_s: float = WATCHED_S) -> None:
    """Ranks of `count` nodes form, lose members and form again, in groups of 1,024 ranks."""
    address = place()
    with running(
        directory, "--coordinator", address, *plain_tcp(), "--node", "coordinator"
    ) as daemon:
        asyncio.run(_cluster(daemon, address, count, watched_s))


async def _sessions(daemon: DaemonProcess, directory: Path, count: int, watched_s: float) -> None:
    pid = daemon.status().pid
    found = [SimulatedSession(directory) for _ in range(count)]
    for first in range(0, count, 50):  # as many as come at a time
        await asyncio.gather(*(one.open("job") for one in found[first : first + 50]))
    for one in found:
        one.taken_s.clear()
    before = cpu_s(pid), time.perf_counter()
    async with at_work(one.beat(2.0 * i / count) for i, one in enumerate(found)):
        await asyncio.sleep(watched_s)
        busy = (cpu_s(pid) - before[0]) / (time.perf_counter() - before[1])
    taken = sorted(1e3 * taken for one in found for taken in one.taken_s)
    say(f"heartbeats of {count} sessions", taken, "ms")
    say(f"p99 of heartbeats of {count} sessions", [taken[int(0.99 * len(taken))]], "ms")
    say(f"daemon's processor with {count} sessions", [100 * busy], "%")
    status = daemon.status()
    say(f"RSS of the daemon with {count} sessions", [status.rss_bytes / MIB], "MiB")
    say("the loop's worst lag of the last minute", [1e3 * _lag(status)], "ms")
    await asyncio.gather(*(one.close() for one in found))


def _lag(status: Any) -> float:
    return wire.seconds(status.loop_lag_worst)


def sessions(directory: Path, count: int, watched_s: float = WATCHED_S) -> None:
    """Live sessions, each with its stream, and a heartbeat of each every 2 s."""
    with running(directory, "--max-sessions-per-uid", str(count + 10)) as daemon:
        asyncio.run(_sessions(daemon, directory, count, watched_s))


def layers(directory: Path, count: int) -> None:
    """Registered in calls of as many as one may have, and all of them once more."""
    with running(directory) as daemon:
        client = daemon.client()
        group = client.create(make_spec(ranks=1)).group
        specs = [layer_specs.LayerSpec(f"l/{i}", top_k=1) for i in range(count)]
        most = wire.MAX_LAYERS_PER_CALL
        for what in ("layers registered", "the same layers again"):
            started = time.perf_counter()
            for first in range(0, count, most):
                client.register(group, specs[first : first + most])
            say(f"{count} {what}", [time.perf_counter() - started], "s")
        say(f"RSS of the daemon, {count} layers", [daemon.status().rss_bytes / MIB], "MiB")


_DEFAULTS = {"cluster": 512, "sessions": 1000, "layers": 10_000}


def main(argv: Sequence[str]) -> None:
    """All three take about a minute on a machine that does nothing else."""
    for name, most in _DEFAULTS.items():
        if argv and argv[0] != name:
            continue
        with tempfile.TemporaryDirectory(prefix=f"eps-{name}-") as directory:
            sizes = [int(word) for word in argv[1:]] or [most]
            globals()[name](Path(directory), *sizes)


if __name__ == "__main__":
    main(sys.argv[1:])
