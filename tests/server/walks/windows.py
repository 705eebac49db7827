"""Sets of windows, and the memory behind them."""

from __future__ import annotations

import dataclasses
import mmap

from raw_client import make_spec

from ep_runtime import board, errors
from ep_runtime_server.memory.windows import Owner, WindowPool, WindowSet
from walks.walk import Walk


class FakeAllocation:
    def __init__(self, device: FakeDevice, size_bytes: int) -> None:
        self._device = device
        self.size_bytes = size_bytes
        self.identity = (0, id(self))

    def export_fd(self) -> int:
        return -1

    def map(self) -> mmap.mmap:
        return mmap.mmap(-1, self.size_bytes)

    def free(self) -> None:
        self._device.live_bytes -= self.size_bytes


class FakeDevice:
    name = "host"

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.live_bytes = 0

    def allocate(self, label: str, size_bytes: int) -> FakeAllocation:
        self.live_bytes += size_bytes
        return FakeAllocation(self, size_bytes)


@dataclasses.dataclass
class _Set:
    windows: WindowSet
    state: str = "leased"
    holders: set[str] = dataclasses.field(default_factory=set)


class WindowsWalk(Walk):
    """Sets are allocated, held, retained, released; memory goes with the last holder."""

    SPEC = make_spec(ranks=1)
    SET_BYTES = board.board_bytes(SPEC) + board.window_bytes(SPEC)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.device = FakeDevice(4 * self.SET_BYTES)
        self.pool = WindowPool(self.device, self.clock, self.events)
        self.known: list[_Set] = []
        self._generation = 0

    async def step(self) -> None:
        moves = {self.allocate: 2, self.hold: 4, self.drop: 4, self.drop_all: 0.5}
        moves |= {self.retain: 1, self.lease: 1, self.release: 2}
        move = self.random.choices(list(moves), list(moves.values()))[0]
        if move == self.allocate or not self.known:
            await self.allocate()
        else:
            move(self.random.choice(self.known), f"s{self.random.randrange(3)}")
        await self.pool.settle()
        self.check()

    async def allocate(self) -> None:
        self._generation += 1
        owner = Owner(7, "job", f"g{self._generation % 5}")
        try:
            windows = await self.pool.allocate(owner, self.SPEC, self._generation)
        except errors.PoolExhaustedError:
            self.agree(len(self.known), 4)
            self.seen["full"] += 1
        else:
            self.known.append(_Set(windows))

    def hold(self, one: _Set, who: str) -> None:
        if one.state == "leased":
            one.windows.hold(who)
            one.holders.add(who)

    def drop(self, one: _Set, who: str) -> None:
        freed = self.pool.drop_holder(who, one.windows)
        self._dropped(one, who, freed)

    def drop_all(self, _: _Set, who: str) -> None:
        self.pool.drop_all_of(who)
        for one in list(self.known):
            self._dropped(one, who, None)

    def _dropped(self, one: _Set, who: str, freed: int | None) -> None:
        held = who in one.holders
        one.holders.discard(who)
        goes = held and one.state == "quarantined" and not one.holders
        if freed is not None:
            self.agree(freed, self.SET_BYTES if goes else 0)
        if goes:
            self.known.remove(one)
            self.seen["freed by its last holder"] += 1

    def retain(self, one: _Set, _: str) -> None:
        if one.state == "leased":
            self.pool.retain(one.windows)
            one.state = "retained"

    def lease(self, one: _Set, _: str) -> None:
        if one.state == "retained":
            self.pool.lease(one.windows)
            one.state = "leased"

    def release(self, one: _Set, _: str) -> None:
        freed = self.pool.release(one.windows)
        self.agree(freed, 0 if one.holders else self.SET_BYTES)
        if one.holders:
            one.state = "quarantined"
        else:
            self.known.remove(one)

    def check(self) -> None:
        found = [(s.state.value, s.holders) for s in self.pool.sets]
        self.agree(found, [(one.state, one.holders) for one in self.known])
        self.agree(self.device.live_bytes, len(self.known) * self.SET_BYTES)
        self.agree(self.pool.used_bytes("host"), self.device.live_bytes)
        self.seen.update(state for state, _ in found)

    async def end(self) -> None:
        self.pool.close()
        self.agree(self.device.live_bytes, 0)
