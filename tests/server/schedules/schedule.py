"""Random schedules, their runs, and smaller schedules that show the same fault."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import pprint
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from raw_client import make_spec

from ep_runtime.board_abi import PoisonReason
from ep_runtime.specs import GroupSpec
from ep_runtime_server.base import limits
from schedules.checks import LOOKS_EACH_S, Checks
from schedules.cluster import CALM_AFTER_S, SimulatedCluster, simulated
from schedules.cluster import TOLD_S as TOLD_BY_ALL_S
from schedules.processes import Process

# Time in which all messages arrive, every claim ends, and retained memory is freed.
QUIET_S = 14.0
# Time in which every member of a group must learn of the other members' ends.
TELLING_S = CALM_AFTER_S + 3 * TOLD_BY_ALL_S
RETAIN_S = 4.0
FENCED_FOR_S = 1.0
# Limits for learning of a death, and for forming a group, without further faults.
TOLD_S, FORMED_S = 1.0, 2.0

Step = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Slot:
    """Processes one after another; each begins when its predecessor ends."""

    node: str
    ranks: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Attributes:
    seed: of the times that messages and disks take.
    transport: of the group; windows are this host's memory with memfd, none with xla.
    slots: what processes do.
    faults: (when, what, ...) befalls daemons, links and processes.
    """

    seed: int
    nodes: tuple[str, ...]
    world_size: int
    transport: str
    retain_s: float
    slots: tuple[Slot, ...]
    faults: tuple[Step, ...]

    def spec(self, number: int) -> GroupSpec:
        return make_spec(
            ranks=self.world_size,
            transport=self.transport,
            hidden_size=16 * (1 + number),
            retain_s=self.retain_s,
        )

    def __str__(self) -> str:
        return pprint.pformat(self, width=110)


_GAPS_S = (0.0, 0.0, 0.0, 0.001, 0.002, 0.01, 0.1, 0.5, 1.0, 4.0, 5.0, 5.003)
_WAITS_S = (0.5, 5.0, 6.0, 12.0, 12.0, 12.0)


def make_schedule(seed: int) -> Schedule:
    chance = random.Random(f"schedule {seed}")
    nodes = ("a", "b", "c")[: chance.choice([2, 3, 3])]
    world = chance.choice([2, 2, 3, 4])
    cuts = sorted(chance.sample(range(1, world), chance.randint(1, world - 1)))
    parts = [tuple(range(low, high)) for low, high in zip([0, *cuts], [*cuts, world], strict=True)]
    if chance.random() < 0.25:
        parts.append(chance.choice(parts))  # another process holds its ranks
    rounds = chance.randint(1, 4)
    slots = tuple(
        Slot(chance.choice(nodes), part, tuple(_steps(chance, nodes, rounds))) for part in parts
    )
    faults = sorted(_faults(chance, nodes, len(slots)), key=lambda fault: fault[0])
    transport = chance.choice(["xla", "xla", "memfd"])
    retain_s = chance.choice([0.0, RETAIN_S])
    return Schedule(seed, nodes, world, transport, retain_s, slots, tuple(faults))


def _steps(chance: random.Random, nodes: tuple[str, ...], rounds: int) -> Iterator[Step]:
    for _ in range(rounds):
        yield "sleep", round(chance.choice(_GAPS_S) * chance.uniform(0.9, 1.1), 4)
        number = int(chance.random() < 0.15)
        replace = chance.random() < 0.05
        yield "form", number, chance.choice(_WAITS_S), replace
        if chance.random() < 0.2:
            yield ("ids",)
        if chance.random() < 0.1:
            yield ("disconnected",)
        yield "work", chance.choice([0.0, 0.01, 0.3, 2.0, 6.0])
        end = chance.choice(["close", "die", "goodbye", "", "", ""])
        if end:
            yield (end,)
        if chance.random() < 0.25:
            yield "moves", chance.choice(nodes)


def _faults(chance: random.Random, nodes: tuple[str, ...], slots: int) -> Iterator[Step]:
    kinds = chance.choice([(), ("die",), ("die", "kill", "replace", "cut", "stop", "loss")])
    for _ in range(chance.randint(0, 4) if kinds else 0):
        near_poll_s = limits.NODE_POLL_S + chance.uniform(-0.005, 0.02)
        when = chance.choice([chance.uniform(0.0, 0.2), chance.uniform(0.0, 12.0), near_poll_s])
        when = round(when, 4)
        kind = chance.choice(kinds)
        node, other = chance.choice(nodes), chance.choice(nodes)
        lasts = chance.choice([0.05, 0.5, 2.0, 6.0, 15.0])
        if kind == "die":
            yield when, kind, chance.randrange(slots)
        elif kind in ("kill", "replace", "stop"):
            yield when, kind, node, lasts
            if chance.random() < 0.4:  # a process ends while the daemon is away
                yield round(when + 0.5 * lasts, 4), "die", chance.randrange(slots)
        elif kind == "cut" and node != other:
            yield when, kind, node, other, chance.random() < 0.5, lasts
        elif kind == "loss":
            yield when, kind, chance.choice([0.05, 0.3]), lasts


def make_lives(seed: int) -> Schedule:
    """Processes of one node that claim each other's ranks, and orders that end them."""
    chance = random.Random(f"lives {seed}")
    world = chance.choice([1, 2, 3])
    slots = []
    for _ in range(chance.randint(world, 2 * world + 1)):
        ranks = tuple(sorted(chance.sample(range(world), chance.randint(1, world))))
        slots.append(Slot("a", ranks, tuple(_steps(chance, ("a",), chance.randint(1, 5)))))
    faults = []
    for _ in range(chance.randint(0, 6)):
        kind = chance.choice(["die", "fence", "fence", "reclaim"])
        what = () if kind == "reclaim" else (chance.randrange(len(slots)),)
        faults.append((round(chance.uniform(0.0, 12.0), 4), kind, *what))
    retain_s = chance.choice([0.0, RETAIN_S])
    return Schedule(seed, ("a",), world, "memfd", retain_s, tuple(slots), tuple(faults))


class Run:
    """One run of a schedule."""

    def __init__(self, schedule: Schedule, cluster: SimulatedCluster) -> None:
        self._schedule = schedule
        self._cluster = cluster
        self._checks = Checks(cluster)
        self._at: list[Process | None] = [None] * len(schedule.slots)
        self._doing: dict[int, asyncio.Task[Any]] = {}

    async def whole(self) -> None:
        looking = asyncio.ensure_future(self._look())
        try:
            for node in self._schedule.nodes:
                self._cluster.start(node)
            await asyncio.sleep(0.2)  # the others join
            self._cluster.disturbed_s = -1e9
            work = [self._slot(number) for number in range(len(self._schedule.slots))]
            befalls = [self._befalls(fault) for fault in self._schedule.faults]
            await asyncio.gather(*work, *befalls)
            self._cluster.say("all over")
            await asyncio.sleep(TELLING_S)
            await self._nothing_left()
            await self._forms_and_tells()
            await self._nothing_left()
        finally:
            looking.cancel()

    async def _look(self) -> None:
        while True:
            self._checks.look()
            await asyncio.sleep(LOOKS_EACH_S)

    # Steps of processes

    async def _slot(self, number: int) -> None:
        slot = self._schedule.slots[number]
        node = slot.node
        for step in slot.steps:
            if step[0] == "moves":  # the next process of these ranks
                node = step[1]
                continue
            process = self._at[number]
            if process is None or not process.alive:
                process = self._at[number] = self._cluster.process(node, slot.ranks)
            doing = self._doing[number] = asyncio.ensure_future(self._step(process, step))
            await asyncio.wait({doing})
            if not doing.cancelled():
                doing.result()

    async def _step(self, process: Process, step: Step) -> None:
        what, *more = step
        if what == "sleep":
            await asyncio.sleep(more[0])
        elif what == "form":
            number, wait_s, replace = more
            self._cluster.say(f"{process} forms with spec {number} for {wait_s:g} s")
            await process.form(self._schedule.spec(number), wait_s, replace=replace)
        elif what in ("goodbye", "die"):
            getattr(process, what)()
        else:  # work, close, ids or disconnected
            await getattr(process, what)(*more)

    # Faults

    async def _befalls(self, fault: Step) -> None:
        when, what, *more = fault
        await asyncio.sleep(when)
        self._cluster.say(f"{what} {more}")
        await getattr(self, f"_{what}")(*more)

    async def _die(self, number: int) -> None:
        process = self._at[number]
        if process is not None and process.alive:
            process.die()
            self._doing[number].cancel()

    async def _fence(self, number: int) -> None:
        """The process keeps its memory until it ends; its successor starts before that."""
        process, self._at[number] = self._at[number], None
        if process is not None and process.alive:
            self._doing[number].cancel()
            if not process.fenced():
                self._cluster.fault(f"{process} is fenced, and may go on")
            await asyncio.sleep(FENCED_FOR_S)
            process.die()

    async def _reclaim(self) -> None:
        for life in self._cluster.lives():
            for group in life.runtime.groups.all():
                life.do(life.runtime.groups.take_away, group, PoisonReason.RECLAIMED, "drill")

    async def _kill(self, node: str, lasts_s: float, in_good_order: bool = False) -> None:
        if self._cluster.life(node) is not None:
            if in_good_order:
                await self._cluster.leave(node)
            self._cluster.kill(node)
            await asyncio.sleep(lasts_s)
            self._cluster.start(node)

    async def _replace(self, node: str, lasts_s: float) -> None:
        await self._kill(node, lasts_s, in_good_order=True)

    async def _stop(self, node: str, lasts_s: float) -> None:
        links, now = self._cluster.links, self._cluster.loop.time()
        links.stopped_until_s[node] = max(now + lasts_s, links.stopped_until_s.get(node, 0.0))
        self._cluster.disturb()
        await asyncio.sleep(lasts_s)
        self._cluster.disturb()

    async def _cut(self, node: str, other: str, both: bool, lasts_s: float) -> None:
        cut = {(node, other), (other, node)} if both else {(node, other)}
        self._cluster.disturb()
        self._cluster.links.cut |= cut
        await asyncio.sleep(lasts_s)
        self._cluster.links.cut -= cut
        self._cluster.disturb()

    async def _loss(self, rate: float, lasts_s: float) -> None:
        self._cluster.links.loss = rate
        for _ in range(int(lasts_s) + 1):
            self._cluster.disturb()
            await asyncio.sleep(min(lasts_s, 1.0))
        self._cluster.links.loss = 0.0
        self._cluster.disturb()

    # At the end

    async def _nothing_left(self) -> None:
        for number, process in enumerate(self._cluster.living()):
            (process.goodbye if number % 2 else process.die)()
        await asyncio.sleep(QUIET_S)
        self._checks.at_end()

    async def _forms_and_tells(self) -> None:
        """After all faults, the cluster must form a group and report its end."""
        cluster, nodes = self._cluster, self._schedule.nodes
        cluster.links.late = 0.0
        made = [
            cluster.process(nodes[rank % len(nodes)], (rank,))
            for rank in range(self._schedule.world_size)
        ]
        began_s = cluster.loop.time()
        got = await asyncio.gather(*(p.form(self._schedule.spec(0), 30.0) for p in made))
        took_s = cluster.loop.time() - began_s
        epochs = {process.held.epoch for process in made if process.held is not None}
        if set(got) != {"READY"} or len(epochs) != 1 or took_s > FORMED_S:
            cluster.fault(f"formed as {got}, epochs {epochs}, after {took_s:.2f} s")
            return
        made[-1].die()
        began_s = cluster.loop.time()
        await asyncio.gather(*(process.work(30.0) for process in made[:-1]))
        took_s = cluster.loop.time() - began_s
        if took_s > TOLD_S:
            cluster.fault(f"a death was told after {took_s:.2f} s")


@dataclasses.dataclass(frozen=True)
class Result:
    """Forbidden states that occurred, and the events on the way."""

    faults: list[str]
    said: list[str]
    num_calls: int


def run(schedule: Schedule) -> Result:
    with simulated(schedule.seed, schedule.nodes) as cluster:
        try:
            cluster.loop.run_until_complete(Run(schedule, cluster).whole())
        except Exception as error:  # noqa: BLE001 - also a fault, with the schedule to it
            cluster.fault(f"{type(error).__name__}: {error}")
        gc.collect()  # tasks with unread errors report them
        return Result(cluster.faults, cluster.said, cluster.links.num_calls)


def shrunk(schedule: Schedule) -> Schedule:
    """Returns a smaller schedule with the same first fault, without steps that it does not need."""

    def kind(candidate: Schedule) -> list[str]:
        return [re.sub("[0-9]+", "", fault)[:40] for fault in run(candidate).faults[:1]]

    wanted, smaller = kind(schedule), True
    while smaller:
        smaller = False
        for candidate in _smaller(schedule):
            if kind(candidate) == wanted:
                schedule, smaller = candidate, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Yields schedules with one fault or step less; deaths are removed last."""
    change = dataclasses.replace
    for place in sorted(range(len(schedule.faults)), key=lambda x: schedule.faults[x][1] == "die"):
        yield change(schedule, faults=_without(schedule.faults, place))
    for number, slot in enumerate(schedule.slots):
        for place in range(len(slot.steps)):
            less = change(slot, steps=_without(slot.steps, place))
            slots = (*schedule.slots[:number], less, *schedule.slots[number + 1 :])
            yield change(schedule, slots=slots)


def _without(items: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return (*items[:place], *items[place + 1 :])


def first_fault(schedules: Iterable[Schedule]) -> tuple[int, str]:
    """Runs schedules up to the first with a fault.

    Returns:
        Calls between daemons, and that schedule as small as it gets with what happened; "" if none
        has a fault.
    """
    calls = 0
    for schedule in schedules:
        result = run(schedule)
        calls += result.num_calls
        if result.faults:
            small = shrunk(schedule)
            lines = [str(small), *run(small).said, "all faults of the one before:", *result.faults]
            return calls, "\n".join(lines)
    return calls, ""
