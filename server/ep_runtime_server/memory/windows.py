"""Window memory: allocates window sets, counts their bytes, and frees them.

A `WindowSet` is the memory of one group: a board and one window per world rank of this node. Its
holders are the sessions that fetched descriptors. The daemon frees a set only if no holder is left.
A session stops being a holder if it reports that it unmapped the set, or if its process has ended:
LEASED -> RETAINED -> LEASED ..., LEASED -> QUARANTINED -> freed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ep_runtime import board
from ep_runtime.errors import PoolExhaustedError, RuntimeUnavailableError
from ep_runtime.specs import GroupSpec
from ep_runtime.text import iec
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.supervision import tell_failure
from ep_runtime_server.callers.quotas import Quotas
from ep_runtime_server.memory.cuda_device import Gpus
from ep_runtime_server.memory.devices import Device
from ep_runtime_server.memory.window_sets import Buffer, Owner, WindowSet, WindowState, buffer_label

__all__ = ["Owner", "WindowPool", "WindowSet", "WindowState"]

MAX_NAMED_HOLDERS = 16
FREEING = "freeing of memory"


class WindowPool:
    """All window sets, and the limits of devices. For the event loop's thread only."""

    def __init__(
        self, host: Device, clock: Clock, events: EventLog, gpus: Gpus | None = None
    ) -> None:
        self._host = host
        self._gpus = gpus or Gpus()
        self._clock = clock
        self._events = events
        self.on_change: Callable[[WindowSet], None] = lambda windows: None
        self._sets: list[WindowSet] = []
        self.quotas: Quotas | None = None  # None: users have no limits
        # Reservations of running allocations: bytes by (uid, device), and descriptors by uid.
        self._reserved: collections.Counter[tuple[int, str]] = collections.Counter()
        self._reserved_fds: collections.Counter[int] = collections.Counter()
        self._freed = asyncio.Event()  # set after each try to free
        self._freeing: set[WindowSet] = set()
        self._not_freed: dict[WindowSet, Exception] = {}  # with the last try's error
        self._admit = ThreadPoolExecutor(1, thread_name_prefix="allocate")
        # A separate thread frees, so that freeing a big group does not delay an allocation.
        self._reclaim = ThreadPoolExecutor(1, thread_name_prefix="free")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def sets(self) -> list[WindowSet]:
        return list(self._sets)

    def close(self) -> None:
        """Frees all sets, and reports failures; clients keep their mapped memory."""
        self._admit.shutdown(wait=True)
        self._reclaim.shutdown(wait=True)
        for windows in self._sets:
            try:
                windows.free()
            except Exception as error:  # noqa: BLE001 - free the others too
                tell_failure(self._events, FREEING, error)
        self._sets = []

    def devices(self) -> list[Device]:
        return [self._host, *self._gpus.known()]

    def limit(self, host_bytes: int, gpu_bytes: int | None) -> None:
        """Changes the limits of devices; existing sets stay, even above the new limits."""
        self._host.limit_bytes = host_bytes
        self._gpus.limit(gpu_bytes)

    def gpu_index(self, device: str) -> int | None:
        """Returns `Device.index` of the device with this name."""
        return next((each.index for each in self.devices() if each.name == device), None)

    def used_bytes(self, device: str, *states: WindowState) -> int:
        """Returns the bytes of sets in these states; of all sets and reservations by default."""
        used = sum(s.bytes_on(device) for s in self._sets if not states or s.state in states)
        if states:
            return used
        return used + sum(more for (_, where), more in self._reserved.items() if where == device)

    def held_by(self, uid: int, device: str) -> int:
        """Returns the bytes of a user's sets and reservations on a device."""
        own = sum(windows.bytes_on(device) for windows in self._sets if windows.owner.uid == uid)
        return own + self._reserved[uid, device]

    def fds(self) -> collections.Counter[int]:
        """Returns the descriptors of each user's sets and reservations, by uid."""
        held = self._reserved_fds.copy()
        for windows in self._sets:
            held[windows.owner.uid] += windows.num_fds
        return held

    def _reserve(self, uid: int, demand: Mapping[Device, int], fds: int) -> None:
        """Adds to the reservations of running allocations; negative numbers reduce them."""
        for device, asked in demand.items():
            self._reserved[uid, device.name] += asked
        self._reserved_fds[uid] += fds
        self._reserved += collections.Counter()  # drops zeros
        self._reserved_fds += collections.Counter()

    def _check_quota(self, uid: int, demand: Mapping[Device, int], fds: int = 0) -> None:
        if self.quotas is None:
            return
        self.quotas.check(uid, host_bytes=demand.get(self._host, 0), fds=fds)
        for device, asked in demand.items():
            if device is not self._host:
                held = self.held_by(uid, device.name)
                self.quotas.check_gpu(uid, device.name, asked, held, device.limit_bytes)

    async def _room(self, uid: int, demand: dict[Device, int], fds: int) -> None:
        """Waits until the demand fits the limits of devices and of the user.

        Raises PoolExhaustedError if it will not fit even after running frees.
        """
        while True:
            full = self._first_full(demand)
            try:
                if full is not None:
                    raise self._exhausted(full, demand[full], uid)
                self._check_quota(uid, demand, fds)
                return
            except PoolExhaustedError:
                freed = self._freeing
                if not any(s.bytes_on(full.name) if full else s.owner.uid == uid for s in freed):
                    raise
            self._freed.clear()
            await self._freed.wait()

    async def allocate(
        self,
        owner: Owner,
        spec: GroupSpec,
        generation: int,
        uuids: Mapping[int, str] | None = None,
        ranks: Iterable[int] | None = None,
    ) -> WindowSet:
        """Allocates a new set with a formatted board; windows on the host are zeroed.

        Args:
            owner, spec, generation: owner, spec and generation of the group.
            uuids: GPU by world rank; None for windows on the host.
            ranks: world ranks that get a window; None for all.

        Raises:
            PoolExhaustedError: the set exceeds a limit, even after running frees.
            InvalidArgumentError: the host does not have a GPU of `uuids`.
            RuntimeUnavailableError: the host has no CUDA driver.
        """
        loop, layout = asyncio.get_running_loop(), board.board_layout(spec, ranks)
        parts = await loop.run_in_executor(self._admit, self._parts, layout, uuids or {})
        on = dict.fromkeys(device for _, device, _ in parts)
        demand = {device: sum(size for _, d, size in parts if d is device) for device in on}
        fds = len(parts) + 1  # mmap duplicates the board's descriptor
        await self._room(owner.uid, demand, fds)
        self._reserve(owner.uid, demand, fds)
        windows = WindowSet(owner, layout, generation, self._clock.monotonic_s())
        try:
            await loop.run_in_executor(self._admit, windows.allocate, parts)
        except Exception:
            if windows.buffers:  # buffers allocated before the error
                self._sets.append(windows)
                self._give_back(windows)
            raise
        finally:
            self._reserve(owner.uid, {device: -asked for device, asked in demand.items()}, -fds)
        self.add(windows)
        return windows

    def add(self, windows: WindowSet) -> None:
        """Adds an allocated or restored set, whose bytes then count."""
        windows.on_change = self.on_change
        self._sets.append(windows)
        self.on_change(windows)

    def expect(
        self, owner: Owner, spec: GroupSpec, generation: int, ranks: Sequence[int]
    ) -> WindowSet:
        """Adds a set of an earlier daemon that a process reports; descriptors come later.

        Its windows are taken to be on the host until `WindowSet.assume` gives their GPUs.

        Raises:
            PoolExhaustedError: over the limit of descriptors of this user or of all users.
        """
        self._check_quota(owner.uid, {}, len(ranks) + 2)
        layout = board.board_layout(spec, ranks)
        windows = WindowSet(owner, layout, generation, self._clock.monotonic_s())
        for rank, device, size_bytes in self._parts(layout, {}):
            windows.buffers.append(
                Buffer(buffer_label(owner, generation, rank), device.name, rank, size_bytes)
            )
        self.add(windows)
        return windows

    def _parts(
        self, layout: board.BoardLayout, uuids: Mapping[int, str]
    ) -> list[tuple[int, Device, int]]:
        """Returns (world rank, device, bytes) of the board, as rank -1, then of each window."""
        window_bytes = board.window_bytes(layout.spec)
        return [(-1, self._host, layout.board_bytes)] + [
            (rank, self.device(uuids.get(rank, self._host.name)), window_bytes)
            for rank in layout.ranks
        ]

    def check_room(self, device: str, asked: int, uid: int) -> None:
        """Raises PoolExhaustedError if memory that comes back would exceed a limit."""
        if not asked:
            return
        found = self.device(device)
        if self._first_full({found: asked}) is not None:
            raise self._exhausted(found, asked, uid)
        self._check_quota(uid, {found: asked})

    def device(self, name: str) -> Device:
        """Returns the host device, or the GPU with this UUID. Raises as `Gpus.get`."""
        return self._host if name == self._host.name else self._gpus.get(name)

    async def load_gpus(self) -> None:
        """Opens the GPUs on a thread if restored sets use any, so the event loop never has to."""
        if any(b.device != self._host.name for windows in self._sets for b in windows.buffers):
            # Processes that return windows get this error later.
            with contextlib.suppress(RuntimeUnavailableError):
                await asyncio.to_thread(self._gpus.load)

    def _first_full(self, demand: Mapping[Device, int]) -> Device | None:
        left = {device: device.limit_bytes - self.used_bytes(device.name) for device in demand}
        return next((device for device, asked in demand.items() if asked > left[device]), None)

    def _exhausted(self, device: Device, asked: int, uid: int) -> PoolExhaustedError:
        """Makes an error that names the user's own groups, and sums up other users' memory."""
        free = max(0, device.limit_bytes - self.used_bytes(device.name))
        held = sorted(self._sets, key=lambda s: s.bytes_on(device.name), reverse=True)
        own = [s for s in held if s.owner.uid == uid]
        holders = [
            f"{s.owner}: {iec(s.bytes_on(device.name))}, {s.state.value}"
            for s in own[:MAX_NAMED_HOLDERS]
        ]
        others = [s.bytes_on(device.name) for s in held if s.owner.uid != uid]
        if any(others):
            holders.append(f"{len(others)} groups of other users: {iec(sum(others))}")
        return PoolExhaustedError(
            f"asked for {iec(asked)} on {device.name}, {iec(free)} of {iec(device.limit_bytes)} "
            f"are free, {iec(asked - free)} too little; held by: {'; '.join(holders) or 'nobody'}",
            asked_bytes=asked,
            free_bytes=free,
            limit_bytes=device.limit_bytes,
            holders=holders,
        )

    async def format_again(self, windows: WindowSet, generation: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._admit, windows.format_again, generation)
        self.on_change(windows)

    def retain(self, windows: WindowSet) -> None:
        windows.state = WindowState.RETAINED
        self.on_change(windows)

    def lease(self, windows: WindowSet) -> None:
        windows.state = WindowState.LEASED
        self.on_change(windows)

    def release(self, windows: WindowSet) -> int:
        """Frees the set, or quarantines it while it has holders; returns bytes being freed."""
        if windows.state is WindowState.RELEASING:
            return 0
        if windows.holders:
            if windows.state is not WindowState.QUARANTINED:
                windows.state = WindowState.QUARANTINED
                self.on_change(windows)
                self._events.add(
                    "windows.quarantined",
                    f"{iec(windows.size_bytes)} of {windows.owner} wait for their holders",
                    **windows.fields,
                    holders=sorted(windows.holders),
                )
            return 0
        return self._give_back(windows)

    def _give_back(self, windows: WindowSet) -> int:
        """Begins to free a set without holders; returns its bytes."""
        size_bytes = windows.size_bytes
        windows.state = WindowState.RELEASING
        self._try_to_free(windows)
        self.on_change(windows)
        return size_bytes

    def _try_to_free(self, windows: WindowSet) -> None:
        self._freeing.add(windows)
        task = asyncio.get_running_loop().create_task(self._free(windows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _free(self, windows: WindowSet) -> None:
        """Frees the set; buffers that fail stay in it, and the set stays in the pool."""
        started, size_bytes = self._clock.monotonic_s(), windows.size_bytes
        try:
            await asyncio.get_running_loop().run_in_executor(self._reclaim, windows.free)
        except Exception as error:  # noqa: BLE001 - `free_again` reports it
            self._not_freed[windows] = error
            return
        finally:
            self._freeing.discard(windows)
            self._freed.set()
        self._sets.remove(windows)
        self._not_freed.pop(windows, None)
        self._events.add(
            "windows.freed",
            f"{iec(size_bytes)} of {windows.owner} freed",
            **windows.fields,
            duration_s=round(self._clock.monotonic_s() - started, 6),
        )

    def free_again(self) -> None:
        """Retries failed frees, and raises the error of an earlier try, if any."""
        for windows in self._not_freed.keys() - self._freeing:
            self._try_to_free(windows)
        for error in self._not_freed.values():
            raise error

    def drop_holder(self, session_id: str, windows: WindowSet) -> int:
        """Notes that `session_id` no longer maps the set; returns bytes being freed."""
        if session_id not in windows.holders:
            return 0
        windows.holders.discard(session_id)
        self.on_change(windows)
        return self.release(windows) if windows.state is WindowState.QUARANTINED else 0

    def drop_all_of(self, session_id: str) -> None:
        """Notes that `session_id` no longer maps any set."""
        for windows in self.sets:
            self.drop_holder(session_id, windows)

    def holds(self, session_id: str) -> bool:
        return any(session_id in windows.holders for windows in self._sets)

    async def settle(self) -> None:
        """Waits until no free is running."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
