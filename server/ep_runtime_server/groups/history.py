"""Saves copies of boards, so that readers can see a group's past state.

The daemon copies each board every SAMPLE_EVERY_S. It keeps all copies of the last FINE_S, then one
per COARSE_S, and none older than KEPT_S. All copies together may have MOST_BYTES, compressed; above
that, the user with the most bytes loses the oldest copy. Boards of more than MOST_RAW_BYTES are not
copied, because copying and unpacking them would block the event loop. The journal does not hold
copies, so a restarted daemon has none.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import ctypes
import dataclasses
import functools
import mmap
import zlib
from collections.abc import Callable, Iterator

from ep_runtime import board, board_abi
from ep_runtime.board_abi import MAX_HANDLES, MAX_LOADS
from ep_runtime_server.base.clock import Clock, paced
from ep_runtime_server.groups.record import GroupBook, GroupRecord

SAMPLE_EVERY_S = 10.0
FINE_S = 120.0
COARSE_S = 60.0
KEPT_S = 2 * 3600.0
MOST_BYTES = 64 << 20
MOST_RAW_BYTES = 16 << 20
_LEVEL = 1  # zlib's level; higher ones save little

# A group in a past state, and a clock stopped at that time.
Past = tuple[GroupRecord, Clock]


@dataclasses.dataclass(frozen=True)
class StoppedClock:
    """A clock that always shows the same time."""

    now_s: float
    now_wall_s: float

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_wall_s


@dataclasses.dataclass(frozen=True)
class BoardCopy:
    """A copy of a board that did not change from `taken_s` to `until_s`.

    `packed` holds the compressed `parts` of the board.
    """

    uid: int
    generation: int
    num_handles: int
    layout: board.BoardLayout
    taken_s: float
    until_s: float
    checksum: int
    packed: bytes


def parts(where: board.BoardLayout, num_handles: int) -> Iterator[slice]:
    """Yields the used parts of a board: records of ranks and handles, and tallies of ranks."""

    def part(offset: int, size: int) -> slice:
        return slice(offset, offset + size)

    handles, loads = min(num_handles, MAX_HANDLES), min(num_handles, MAX_LOADS)
    yield part(where.ranks_offset, len(where.ranks) * ctypes.sizeof(board_abi.RankRecordStruct))
    yield part(where.handles_offset, handles * ctypes.sizeof(board_abi.HandleRecordStruct))
    size = ctypes.sizeof(board_abi.DeviceRowsStruct)
    tally = where.tally
    for seat in range(len(where.ranks)):
        if where.tallies_offset:
            start = where.tallies_offset + seat * tally.tally_bytes
            yield part(start, tally.loads_offset + loads * tally.load_bytes)
        if where.device_rows_offset:
            yield part(where.device_rows_offset + seat * MAX_HANDLES * size, handles * size)


class History:
    """Copies the boards of all groups. For the event loop's thread only."""

    def __init__(self, groups: GroupBook, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock
        self._samples: dict[str, list[BoardCopy]] = {}  # by group_id, oldest first

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes_by_user().values())

    async def watch(self) -> None:
        """Copies boards every SAMPLE_EVERY_S until cancelled."""
        while True:
            await self.copy_boards()
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def copy_boards(self) -> None:
        """Copies each board that changed since its last copy."""
        groups = self._groups.all()
        known = {group.group_id for group in groups}
        self._samples = {key: kept for key, kept in self._samples.items() if key in known}
        async for group in paced(groups):
            await self._copy_board(group)
        self._make_room()

    async def _copy_board(self, group: GroupRecord) -> None:
        windows, now_s = group.windows, self._clock.monotonic_s()
        if windows is None or windows.board is None:
            return
        layout, handles = windows.layout, group.layers.num_handles
        wanted = [*parts(layout, handles)]
        if sum(part.stop - part.start for part in wanted) > MOST_RAW_BYTES:
            return
        raw = b"".join(windows.board[part] for part in wanted)
        about = (group.owner.uid, group.generation, handles, layout)
        checksum = zlib.crc32(raw)
        kept = self._of(group)
        last = (kept[-1].checksum, kept[-1].num_handles, kept[-1].layout) if kept else None
        if last == (checksum, handles, layout):
            kept[-1] = dataclasses.replace(kept[-1], until_s=now_s)
        else:
            packed = await asyncio.to_thread(zlib.compress, raw, _LEVEL)
            kept.append(BoardCopy(*about, now_s, now_s, checksum, packed))
        self._samples[group.group_id] = _thinned(kept, now_s)

    def _of(self, group: GroupRecord) -> list[BoardCopy]:
        """Returns the copies of the group's current generation."""
        kept = self._samples.get(group.group_id, [])
        return [sample for sample in kept if sample.generation == group.generation]

    def _bytes_by_user(self) -> collections.Counter[int]:
        held = collections.Counter[int]()
        for kept in self._samples.values():
            for sample in kept:
                held[sample.uid] += len(sample.packed)
        return held

    def _make_room(self) -> None:
        held = self._bytes_by_user()
        while held.total() > MOST_BYTES:
            ((uid, _),) = held.most_common(1)
            of_user = [kept for kept in self._samples.values() if kept and kept[0].uid == uid]
            oldest = min(of_user, key=lambda kept: kept[0].taken_s)
            held[uid] -= len(oldest.pop(0).packed)

    def back(self, age_s: float) -> Callable[[GroupRecord], Past | None]:
        """Returns a function from a group to its state `age_s` ago; None for one without copies.

        The function uses the youngest copy that is old enough, or else the oldest copy. It caches
        its last result.
        """
        then_s = self._clock.monotonic_s() - age_s

        @functools.lru_cache(maxsize=1)
        def as_it_was(group: GroupRecord) -> Past | None:
            kept = self._of(group)
            if not kept or group.windows is None:
                return None
            older = [sample for sample in kept if sample.taken_s <= then_s]
            sample = older[-1] if older else kept[0]
            at_s = max(sample.taken_s, min(then_s, sample.until_s))
            past = copy.copy(group)
            past.windows = copy.copy(group.windows)
            past.windows.layout = sample.layout
            past.windows.board = _unpacked(sample)
            ago_s = self._clock.monotonic_s() - at_s
            return past, StoppedClock(at_s, self._clock.wall_s() - ago_s)

        return as_it_was


def _thinned(samples: list[BoardCopy], now_s: float) -> list[BoardCopy]:
    kept: list[BoardCopy] = []
    for sample in samples:
        if now_s - sample.until_s > KEPT_S:
            continue
        coarse = now_s - sample.until_s > FINE_S
        if coarse and kept and sample.until_s - kept[-1].until_s < COARSE_S:
            continue
        kept.append(sample)
    return kept


def _unpacked(sample: BoardCopy) -> mmap.mmap:
    """Makes a board from a copy; unused parts are zero."""
    made = mmap.mmap(-1, sample.layout.board_bytes)
    raw, used = zlib.decompress(sample.packed), 0
    for part in parts(sample.layout, sample.num_handles):
        size = part.stop - part.start
        made[part] = raw[used : used + size]
        used += size
    return made
