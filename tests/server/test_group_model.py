"""Random lives of groups: memory is never taken from under a process, and none leaks."""

from __future__ import annotations

import asyncio
import mmap
import random

from harness import FakeClock
from raw_client import make_spec

from ep_runtime import errors
from ep_runtime.board import PoisonReason
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.callers.sessions import SessionRecord, SessionState
from ep_runtime_server.groups import attachment
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.groups.fsm import State
from ep_runtime_server.groups.tickets import TicketBook
from ep_runtime_server.memory.windows import WindowPool, WindowState

OPERATIONS = 2500
SPECS = [
    make_spec(name, ranks=ranks, num_experts=experts, retain_s=retain_s)
    for name, ranks, experts, retain_s in (
        ("a", 1, 4, 60.0),
        ("a", 1, 8, 60.0),
        ("b", 3, 6, 60.0),
        ("b", 3, 6, 60.0),
        ("c", 2, 8, 0.0),
    )
]


class FakeAllocation:
    """Memory that knows which sessions of the model may still write to it."""

    def __init__(self, device: FakeDevice, size_bytes: int) -> None:
        self._device = device
        self.size_bytes = size_bytes
        self.identity = (0, id(self))
        self.writers: set[str] = set()
        self.freed = False

    def export_fd(self) -> int:
        assert not self.freed
        return -1

    def map(self) -> mmap.mmap:
        return mmap.mmap(-1, self.size_bytes)

    def free(self) -> None:
        # On a thread of the pool, where an assertion would reach nobody.
        if self.freed or self.writers:
            self._device.faults.append(f"freed: {self.freed}, mapped by {self.writers}")
        self.freed = True
        self._device.live_bytes -= self.size_bytes


class FakeDevice:
    name = "host"

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.faults: list[str] = []

    def allocate(self, label: str, size_bytes: int) -> FakeAllocation:
        self.live_bytes += size_bytes
        return FakeAllocation(self, size_bytes)


class WatchedPool(WindowPool):
    """Knows when nothing is under way, though the group that asked may be gone."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._under_way = 0

    async def allocate(self, *arguments):
        self._under_way += 1
        try:
            return await super().allocate(*arguments)
        finally:
            self._under_way -= 1

    async def format_again(self, *arguments) -> None:
        self._under_way += 1
        try:
            await super().format_again(*arguments)
        finally:
            self._under_way -= 1

    async def settle_all(self) -> None:
        while self._under_way:
            await asyncio.sleep(0.001)
        for _ in range(3):  # who asked goes on, and may give back what it got
            await asyncio.sleep(0)
        await self.settle()


class Model:
    """A daemon's groups without sockets, and processes that do anything in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock()
        events = EventLog(self.clock)
        self.device = FakeDevice(12 << 20)
        self.pool = WatchedPool(self.device, self.clock, events)
        self.groups = Groups(self.pool, self.clock, events)
        self.tickets = TicketBook(self.clock)
        self.sessions: list[SessionRecord] = []
        self.attempts: set[asyncio.Task] = set()
        self.made: dict[tuple[str, str], int] = {}  # (session, group name) -> generation
        self.mapped: dict[tuple[str, str, int], list[FakeAllocation]] = {}
        self.outcomes: dict[str, int] = {}

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def some_session(self) -> SessionRecord:
        if not self.sessions or (len(self.sessions) < 6 and self.random.random() < 0.2):
            number = len(self.outcomes) + self.random.getrandbits(60)
            session = SessionRecord(
                f"s-{number}", "", 0, number, number, -1, "", 0.0, 0.0, SessionState.ACTIVE, "job"
            )
            self.sessions.append(session)
        return self.random.choice(self.sessions)

    def unmap(self, session: SessionRecord, name: str | None = None, generation: int | None = None):
        for key in [k for k in self.mapped if k[0] == session.session_id]:
            if name in (None, key[1]) and generation in (None, key[2]):
                for allocation in self.mapped.pop(key):
                    allocation.writers.discard(session.session_id)

    def create(self) -> None:
        session, spec = self.some_session(), self.random.choice(SPECS)
        ranks = range(spec.world_size)
        if spec.world_size > 1 and self.random.random() < 0.7:
            ranks = self.random.sample(ranks, self.random.randint(1, spec.world_size))
        self.attempts.add(
            asyncio.create_task(
                self._create(session, spec, tuple(sorted(ranks)), self.random.random() < 0.3)
            )
        )

    async def _create(self, session, spec, ranks, replace) -> None:
        existing = [g for g in self.groups.all() if g.owner.name == spec.name]
        member = any(session.session_id in g.members and not g.can_form_again for g in existing)
        if not session.live:
            return
        if not member:  # the contract: unmap the older generation before claiming again
            self.groups_unmapped_by(session, spec.name)
        try:
            group = await self.groups.create(session, spec, ranks, replace=replace, wait_s=0.02)
        except errors.EpRuntimeError as error:
            self.count(type(error).__name__)
            return
        self.count("reattached" if group.reattached else "created")
        self.made[session.session_id, spec.name] = group.generation

    def groups_unmapped_by(self, session: SessionRecord, name: str) -> None:
        generation = self.made.get((session.session_id, name))
        if generation is not None:
            self.unmap(session, name)
            self.groups.close(session, name, generation)

    def fetch(self) -> None:
        group = self.some_made()
        if group is None:
            return
        session, name, generation = group
        try:
            found = self.groups.get(session, name)
            secret, _ = attachment.acquire(self.tickets, session, found, generation, ())
            attachment.redeem(self.tickets, session, secret)
        except errors.EpRuntimeError as error:
            self.count(type(error).__name__)
            return
        buffers = [buffer.allocation for buffer in found.windows.buffers]
        for allocation in buffers:
            allocation.writers.add(session.session_id)
        self.mapped.setdefault((session.session_id, name, generation), []).extend(buffers)
        self.count("fetched")

    def some_made(self):
        live = {session.session_id: session for session in self.sessions}
        found = [(live[sid], name, g) for (sid, name), g in self.made.items() if sid in live]
        return self.random.choice(found) if found else None

    def attach(self) -> None:
        group = self.some_made()
        if group is not None:
            self.attempts.add(asyncio.create_task(self._attach(*group)))

    async def _attach(self, session, name, generation) -> None:
        try:
            found = self.groups.get(session, name)
            await attachment.report_attached(session, found, generation, 0.02)
            self.count("attached")
        except errors.EpRuntimeError as error:
            self.count(type(error).__name__)

    def close(self) -> None:
        group = self.some_made()
        if group is not None:
            session, name, generation = group
            self.unmap(session, name, generation)
            self.groups.close(session, name, generation)

    def end(self, state: SessionState | None = None) -> None:
        session = self.some_session()
        state = state or self.random.choice([SessionState.DEAD, SessionState.CLOSED])
        if state is not SessionState.FENCED:
            self.sessions.remove(session)
            self.unmap(session)
        elif not session.live:
            return
        session.state = state
        self.groups.session_ended(session)
        self.count(state.value)

    def fence(self) -> None:
        self.end(SessionState.FENCED)

    def reclaim(self) -> None:
        if self.groups.all() and self.random.random() < 0.3:
            group = self.random.choice(self.groups.all())
            self.groups.take_away(group, PoisonReason.RECLAIMED, "drill")

    def advance(self) -> None:
        self.clock.advance(self.random.choice([1.0, 5.0, 61.0]))
        self.groups.expire()
        self.tickets.expire()

    def check(self) -> None:
        assert self.device.faults == []
        generations = [group.generation for group in self.groups.all()]
        assert len(set(generations)) == len(generations)
        for group in self.groups.all():
            assert group.state is not State.CLOSED
            owners = [*group.members.values(), *group.previous.values()]
            assert len({m.session.session_id for m in owners}) == len(owners)
            ranks = [rank for m in owners for rank in m.ranks]
            assert len(set(ranks)) == len(ranks), "two processes own one rank"
            assert all(member.session.live for member in owners)
            if group.state is State.READY and not group.left:
                assert not group.unattached_ranks
            if group.state is State.RETAINED:
                assert not owners
                assert group.retained_until_s is not None
            if group.windows is not None and (group.formation is None or group.formation.done()):
                retained = group.state is State.RETAINED
                assert group.windows.state is (
                    WindowState.RETAINED if retained else WindowState.LEASED
                )
            if group.formed and group.has_windows:
                assert group.windows.generation == group.generation
        assert self.pool.used_bytes("host") <= self.device.limit_bytes

    async def settle(self) -> None:
        while self.attempts:
            done, self.attempts = await asyncio.wait(self.attempts, timeout=10.0)
            for task in done:
                task.result()
        await self.pool.settle_all()


async def live(seed: int) -> dict[str, int]:
    model = Model(seed)
    moves = {
        model.create: 6,
        model.fetch: 6,
        model.attach: 5,
        model.close: 2,
        model.end: 2,
        model.fence: 0.3,
        model.reclaim: 1,
        model.advance: 1,
    }
    for _ in range(OPERATIONS):
        move = model.random.choices(list(moves), list(moves.values()))[0]
        move()
        if model.random.random() < 0.7:
            await asyncio.sleep(0)
        if model.random.random() < 0.02:
            await model.settle()
            assert model.device.live_bytes == model.pool.used_bytes("host")
        model.check()
    await model.settle()
    while model.sessions:
        model.end(SessionState.DEAD)
    model.clock.advance(100.0)
    model.groups.expire()
    await model.settle()
    assert model.device.faults == []
    assert model.groups.all() == []
    assert (model.pool.used_bytes("host"), model.device.live_bytes) == (0, 0)
    model.pool.close()
    return model.outcomes


def test_random_lives_of_groups_keep_the_rules(server_loop):
    total: dict[str, int] = {}
    for seed in range(4):
        print(f"seed {seed}")  # noqa: T201 - shown when it fails
        outcomes = asyncio.run_coroutine_threadsafe(live(seed), server_loop).result(120)
        for name, count in outcomes.items():
            total[name] = total.get(name, 0) + count
    # The walks reached what they are about.
    for outcome in ("created", "reattached", "fetched", "attached", "FENCED", "DEAD"):
        assert total.get(outcome, 0) > 3, total
    assert {"GroupBusyError", "PoolExhaustedError", "StaleHandleError"} <= total.keys()
