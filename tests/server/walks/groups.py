"""A group of processes of one node."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from raw_client import make_spec

from ep_runtime import errors
from ep_runtime.board import PoisonReason
from ep_runtime_server.base import limits
from ep_runtime_server.callers.sessions import SessionRecord, SessionState
from ep_runtime_server.groups import attachment
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.memory.windows import Owner, WindowPool
from walks.walk import Walk
from walks.windows import FakeDevice

SETTLED = 20  # rounds of the loop in which nothing may be left to do


@dataclasses.dataclass
class _Group:
    """One group by the contract: who claims what, who attached, who left."""

    generation: int
    state: str = "FORMING"
    members: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    previous: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    attached: set[str] = dataclasses.field(default_factory=set)
    left: bool = False
    formed: bool = False
    memory: bool = False
    until_s: float = 0.0


class GroupsWalk(Walk):
    """Processes claim ranks of a group, attach, close it, end, are fenced; operators reclaim."""

    RETAIN_S = 60.0
    SPEC = make_spec("moe", ranks=3, num_experts=6, retain_s=RETAIN_S)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.pool = WindowPool(FakeDevice(1 << 40), self.clock, self.events)
        self.groups = Groups(self.pool, self.clock, self.events)
        self.sessions: dict[str, SessionRecord] = {}
        self.fenced: set[str] = set()
        self.waiting: set[asyncio.Task[Any]] = set()
        self.group: _Group | None = None
        self.generation = 0
        self._number = 0

    async def step(self) -> None:
        moves = {self.create: 6, self.attach: 8, self.close: 2, self.ends: 1.5, self.fence: 0.4}
        move = self.random.choices(
            [*moves, self.reclaim, self.pass_time], [*moves.values(), 0.2, 1]
        )[0]
        if move in (self.reclaim, self.pass_time):
            move()
        else:
            move(self._session())
        await self._settle()
        self.check()

    def _session(self) -> str:
        if len(self.sessions) < 4:
            self._number += 1
            name = f"s-{self._number}"
            self.sessions[name] = SessionRecord(
                name,
                "",
                0,
                self._number,
                self._number,
                -1,
                "",
                0.0,
                0.0,
                SessionState.ACTIVE,
                "job",
            )
        return self.random.choice(list(self.sessions))

    async def _settle(self) -> None:
        """Until the memory is there, or gone, and who may go on has gone on."""
        for _ in range(SETTLED):
            found = self.groups.all()
            if found and found[0].formation is not None:
                await asyncio.wait({found[0].formation})
            await asyncio.sleep(0)
        await self.pool.settle()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.discard(task)
            error = task.exception()
            self.seen[type(error).__name__ if error else "went on"] += 1
            if error is not None and not isinstance(error, errors.EpRuntimeError):
                raise error

    def _wait(self, call: Any) -> None:
        self.waiting.add(asyncio.get_running_loop().create_task(call))

    def create(self, name: str) -> None:
        session, group = self.sessions[name], self.group
        if name in self.fenced:
            return
        ranks = tuple(sorted(self.random.sample(range(3), self.random.randint(1, 3))))
        self._unmap(session)
        self._wait(
            self.groups.create(session, self.SPEC, ranks, replace=False, wait_s=limits.MAX_WAIT_S)
        )
        if group is None:
            group = self.group = self._new_group()
        if name in group.members and group.state != "BROKEN":
            return  # the same claim again, or refused
        others = {**group.members, **group.previous}
        others.pop(name, None)
        if any(set(ranks) & set(held) for held in others.values()):
            self.seen["busy"] += 1
            return
        if group.state in ("BROKEN", "RETAINED") or (group.state == "READY" and group.left):
            group.generation = self._next_generation()
            group.previous.update(group.members)
            group.members, group.attached = {}, set()
            group.left = group.formed = False
            group.state = "FORMING"
        group.previous.pop(name, None)
        group.members[name] = ranks
        if sum(map(len, group.members.values())) == 3:
            group.formed = group.memory = True

    def _unmap(self, session: SessionRecord) -> None:
        for windows in self.pool.sets:
            self.pool.drop_holder(session.session_id, windows)

    def _new_group(self) -> _Group:
        return _Group(self._next_generation())

    def _next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def attach(self, name: str) -> None:
        session, group = self.sessions[name], self.group
        real = self.groups.find(Owner(0, "job", "moe"))
        if group is None or real is None or not group.formed or name not in group.members:
            return
        assert real.windows is not None
        real.windows.hold(name)
        self._wait(attachment.report_attached(session, real, group.generation, limits.MAX_WAIT_S))
        group.attached.add(name)
        if group.state == "FORMING" and group.attached == set(group.members):
            group.state = "READY"

    def close(self, name: str) -> None:
        session, group = self.sessions[name], self.group
        if group is not None:
            self._unmap(session)
            known = name in group.members or name in group.previous
            self.groups.close(session, "moe", group.generation)
            if name in group.members:
                self._departs(name, lost=False)
            self.seen["closed" if known else "closed nothing"] += 1

    def ends(self, name: str) -> None:
        session = self.sessions.pop(name)
        session.state = SessionState.DEAD
        self.groups.session_ended(session)
        self.fenced.discard(name)
        self._departs(name, lost=True)

    def fence(self, name: str) -> None:
        if name in self.fenced:
            return
        self.fenced.add(name)
        self.sessions[name].state = SessionState.FENCED
        self.groups.session_ended(self.sessions[name])
        group = self.group
        if group is not None and {*group.members, *group.previous} == {name}:
            self.group = None
        else:
            self._departs(name, lost=True)
        self.seen["fenced"] += 1

    def _departs(self, name: str, *, lost: bool) -> None:
        group = self.group
        if group is None or name not in {*group.members, *group.previous}:
            return
        member = group.members.pop(name, None) is not None
        group.previous.pop(name, None)
        group.attached.discard(name)
        if not group.members and not group.previous:
            if lost and group.memory:
                group.state, group.until_s = "RETAINED", self.clock.now_s + self.RETAIN_S
            else:
                self.group = None
        elif member and group.formed:
            group.left = group.left or not lost
            if lost or group.state == "FORMING":
                group.state = "BROKEN"

    def reclaim(self) -> None:
        for real in self.groups.all():
            self.groups.take_away(real, PoisonReason.RECLAIMED, "drill")
        self.group = None

    def pass_time(self) -> None:
        self.clock.advance(self.random.choice([1.0, 20.0, 61.0]))
        self.groups.expire()
        group = self.group
        if group is not None and group.state == "RETAINED" and group.until_s <= self.clock.now_s:
            self.group = None
            self.seen["expired"] += 1

    def check(self) -> None:
        found = [
            (
                real.state.value,
                real.generation,
                real.formed,
                {name: member.ranks for name, member in real.members.items()},
                {name: member.ranks for name, member in real.previous.items()},
                {name for name, member in real.members.items() if member.attached},
            )
            for real in self.groups.all()
        ]
        group = self.group
        wanted = (
            []
            if group is None
            else [
                (
                    group.state,
                    group.generation,
                    group.formed,
                    group.members,
                    group.previous,
                    group.attached,
                )
            ]
        )
        self.agree(found, wanted)
        self.seen[group.state if group is not None else "none"] += 1

    async def end(self) -> None:
        for task in self.waiting:
            task.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)
        self.waiting.clear()
        self.reclaim()
        await self._settle()
        self.pool.close()
