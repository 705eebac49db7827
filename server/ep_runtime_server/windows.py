"""Window memory: who holds how much, who may still touch it, and when it may be freed.

A `WindowSet` is the memory of one group: a board and one window per world rank. Its holders are
the sessions that fetched descriptors. Memory is freed only when no holder is left, and a holder
leaves only by saying that it unmapped or by its pidfd proving that its process is gone: LEASED ->
RETAINED -> LEASED ..., LEASED -> QUARANTINED -> freed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ep_runtime import board
from ep_runtime.errors import EpRuntimeError, PoolExhaustedError
from ep_runtime.specs import GroupSpec
from ep_runtime_server.clock import Clock
from ep_runtime_server.devices import Allocation, Device
from ep_runtime_server.events import EventLog

MAX_NAMED_HOLDERS = 16


class WindowState(enum.Enum):
    LEASED = "leased"
    RETAINED = "retained"
    QUARANTINED = "quarantined"
    RELEASING = "releasing"


@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose memory it is: a group name inside (uid, job)."""

    uid: int
    job: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} (uid {self.uid}, job {self.job})"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One allocation; world_rank -1 is the board."""

    buffer_id: str
    device: str
    world_rank: int
    allocation: Allocation

    @property
    def size_bytes(self) -> int:
        return self.allocation.size_bytes


class WindowSet:
    """The memory of one group under one generation at a time."""

    def __init__(self, owner: Owner, spec: GroupSpec, generation: int, created_s: float) -> None:
        self.owner = owner
        self.spec = spec
        self.generation = generation
        self.created_s = created_s
        self.state = WindowState.LEASED
        self.buffers: list[Buffer] = []
        self.board: mmap.mmap | None = None
        self.holders: set[str] = set()

    @property
    def size_bytes(self) -> int:
        return sum(buffer.size_bytes for buffer in self.buffers)

    def bytes_on(self, device: str) -> int:
        return sum(buffer.size_bytes for buffer in self.buffers if buffer.device == device)

    def poison(self, reason: board.PoisonReason, rank: int = -1) -> None:
        """Ends the waits and calls of this generation. A board that a client wrecked stays so."""
        if self.board is not None:
            try:
                board.poison(self.board, self.generation, reason, rank)
            except (EpRuntimeError, ValueError):
                logging.getLogger(__name__).warning("board of %s is not readable", self.owner)

    def allocate(self, device_of: Callable[[int], Device], host: Device) -> None:
        """Blocking. Raises PoolExhaustedError, and then holds nothing."""
        spec, name = self.spec, self.owner.name
        wanted = [(-1, host, board.board_bytes(spec))] + [
            (rank, device_of(rank), board.window_bytes(spec)) for rank in range(spec.world_size)
        ]
        try:
            for rank, device, size_bytes in wanted:
                allocation = device.allocate(f"{name}/{rank}", size_bytes)
                label = f"{name}@{self.generation}/{'board' if rank < 0 else rank}"
                self.buffers.append(Buffer(label, device.name, rank, allocation))
            self.board = self.buffers[0].allocation.map()
            board.format_board(self.board, spec, self.generation)
        except BaseException:
            self.free()
            raise

    def format_again(self, generation: int) -> None:
        """Blocking. The set under a new generation; only while it has no holders."""
        assert not self.holders
        assert self.board is not None
        board.format_board(self.board, self.spec, generation)
        self.generation = generation

    def free(self) -> None:
        """Blocking: unmapping and closing returns the pages, about 0.1 s per GiB."""
        if self.board is not None:
            self.board.close()
            self.board = None
        for buffer in self.buffers:
            buffer.allocation.free()
        self.buffers = []


class WindowPool:
    """Every window set, and the limit per device. Lives on the event loop's thread."""

    def __init__(
        self,
        host: Device,
        clock: Clock,
        events: EventLog,
        device_of: Callable[[GroupSpec, int], Device] | None = None,
    ) -> None:
        """`device_of(spec, world_rank)` says where a window lives; None puts all on the host."""
        self._host = host
        self._device_of = device_of or (lambda spec, rank: host)
        self._clock = clock
        self._events = events
        self._sets: list[WindowSet] = []
        self._reserved: dict[str, int] = {}
        self._freed = asyncio.Event()
        self._admit = ThreadPoolExecutor(1, thread_name_prefix="allocate")
        # Freeing runs beside allocation: a big group's end must not delay the next one's start.
        self._reclaim = ThreadPoolExecutor(1, thread_name_prefix="free")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def sets(self) -> list[WindowSet]:
        return list(self._sets)

    def close(self) -> None:
        """Closes the daemon's descriptors; clients keep what they mapped."""
        self._admit.shutdown(wait=True)
        self._reclaim.shutdown(wait=True)
        for windows in self._sets:
            windows.free()
        self._sets = []

    def devices(self) -> list[Device]:
        return [self._host]

    def used_bytes(self, device: str, *states: WindowState) -> int:
        """Bytes of the sets in those states, of all with none given, reservations included."""
        used = sum(s.bytes_on(device) for s in self._sets if not states or s.state in states)
        return used if states else used + self._reserved.get(device, 0)

    def _demand(self, spec: GroupSpec) -> dict[Device, int]:
        demand = {self._host: board.board_bytes(spec)}
        for rank in range(spec.world_size):
            device = self._device_of(spec, rank)
            demand[device] = demand.get(device, 0) + board.window_bytes(spec)
        return demand

    async def allocate(self, owner: Owner, spec: GroupSpec, generation: int) -> WindowSet:
        """A new set, zeroed, its board formatted.

        Raises:
            PoolExhaustedError: over a limit, also after memory being freed came back.
        """
        demand = self._demand(spec)
        while (full := self._first_full(demand)) is not None:
            if not self.used_bytes(full.name, WindowState.RELEASING):
                raise self._exhausted(full, demand[full])
            self._freed.clear()
            await self._freed.wait()
        for device, asked in demand.items():
            self._reserved[device.name] = self._reserved.get(device.name, 0) + asked
        windows = WindowSet(owner, spec, generation, self._clock.monotonic_s())
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(
                self._admit,
                windows.allocate,
                lambda rank: self._device_of(spec, rank),
                self._host,
            )
        finally:
            for device, asked in demand.items():
                self._reserved[device.name] -= asked
        self._sets.append(windows)
        return windows

    def _first_full(self, demand: dict[Device, int]) -> Device | None:
        for device, asked in demand.items():
            if asked > device.limit_bytes - self.used_bytes(device.name):
                return device
        return None

    def _exhausted(self, device: Device, asked: int) -> PoolExhaustedError:
        free = max(0, device.limit_bytes - self.used_bytes(device.name))
        held = sorted(self._sets, key=lambda s: s.bytes_on(device.name), reverse=True)
        holders = [
            f"{s.owner}: {s.bytes_on(device.name)} bytes, {s.state.value}"
            for s in held[:MAX_NAMED_HOLDERS]
        ]
        return PoolExhaustedError(
            f"asked for {asked} bytes on {device.name}, {free} of {device.limit_bytes} are free; "
            f"held by: {'; '.join(holders) or 'nobody'}",
            asked_bytes=asked,
            free_bytes=free,
            limit_bytes=device.limit_bytes,
            holders=holders,
        )

    async def format_again(self, windows: WindowSet, generation: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._admit, windows.format_again, generation)

    def retain(self, windows: WindowSet) -> None:
        windows.state = WindowState.RETAINED

    def lease(self, windows: WindowSet) -> None:
        windows.state = WindowState.LEASED

    def release(self, windows: WindowSet) -> int:
        """Frees the set, or quarantines it while it has holders; bytes on their way back now."""
        if windows.state is WindowState.RELEASING:
            return 0
        if windows.holders:
            if windows.state is not WindowState.QUARANTINED:
                windows.state = WindowState.QUARANTINED
                self._events.add(
                    "windows.quarantined",
                    f"{windows.size_bytes} bytes of {windows.owner} wait for their holders",
                    group=windows.owner.name,
                    generation=windows.generation,
                    holders=sorted(windows.holders),
                )
            return 0
        windows.state = WindowState.RELEASING
        size_bytes = windows.size_bytes
        task = asyncio.get_running_loop().create_task(self._free(windows, size_bytes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return size_bytes

    async def _free(self, windows: WindowSet, size_bytes: int) -> None:
        started = self._clock.monotonic_s()
        try:
            await asyncio.get_running_loop().run_in_executor(self._reclaim, windows.free)
        finally:
            self._sets.remove(windows)
            self._freed.set()
        self._events.add(
            "windows.freed",
            f"{size_bytes} bytes of {windows.owner} freed",
            group=windows.owner.name,
            generation=windows.generation,
            duration_s=round(self._clock.monotonic_s() - started, 6),
        )

    def drop_holder(self, session_id: str, only: WindowSet | None = None) -> int:
        """`session_id` maps the sets (or `only` that one) no more; bytes on their way back now."""
        freed = 0
        for windows in [only] if only is not None else self.sets:
            if session_id in windows.holders:
                windows.holders.discard(session_id)
                if windows.state is WindowState.QUARANTINED:
                    freed += self.release(windows)
        return freed

    def holds(self, session_id: str) -> bool:
        return any(session_id in windows.holders for windows in self._sets)

    async def settle(self) -> None:
        """Returns when no free is under way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
