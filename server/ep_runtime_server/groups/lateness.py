"""Finds late ranks on the boards: ranks that others wait for.

The daemon only reports late ranks, because a late process may just be compiling. A waiting rank
writes which rank it waits for. If that rank waits too, the late rank is the end of the chain: the
rank that does not wait for another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping

from ep_runtime import board, board_abi, board_records, device_layout
from ep_runtime.allowed_names import quoted
from ep_runtime_server.base.clock import Clock, paced
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.limits import LATE_AFTER_S
from ep_runtime_server.groups.record import GroupBook, GroupRecord

CHECK_EVERY_S = 1.0
MAX_NAMED_WAITERS = 16


@dataclasses.dataclass(frozen=True)
class LateRank:
    """A late rank, with the op, layer and handle of the rank that first waited for it."""

    group: GroupRecord
    world_rank: int
    pid: int
    process_index: int
    since_s: float
    waiting_ranks: tuple[int, ...]
    layer: str
    op: str
    handle: int

    @property
    def message(self) -> str:
        named = ", ".join(map(str, self.waiting_ranks[:MAX_NAMED_WAITERS]))
        more = len(self.waiting_ranks) - MAX_NAMED_WAITERS
        ranks = f"{named} and {more} more" if more > 0 else named
        group = quoted(self.group.owner.name)
        where = self.op.lower() + (f" of layer {quoted(self.layer)}" if self.layer else "")
        return (
            f"ranks {ranks} of group {group} wait for rank {self.world_rank} "
            f"(process {self.pid}, index {self.process_index}) in {where} for {self.since_s:.0f} s"
        )


def rank_records(group: GroupRecord) -> dict[int, board_records.RankRecord | None]:
    """Reads records of this node's ranks by world rank; None for a malformed record.

    Returns an empty dict without a board.
    """
    windows = group.windows
    if windows is None or windows.board is None:
        return {}
    records = board_records.read_ranks(windows.board, windows.layout)
    return dict(zip(windows.layout.ranks, records, strict=True))


def rank_record(group: GroupRecord, rank: int) -> board_records.RankRecord | None:
    """Reads one rank's record; None without a board, for another node's and a malformed one."""
    windows = group.windows
    if windows is None or windows.board is None:
        return None
    return board_records.read_ranks(windows.board, windows.layout, [rank])[0]


def _ends(waits_for: Mapping[int, int]) -> dict[int, int]:
    """Returns the end of each waiting rank's chain; the next rank for ranks in a cycle.

    The loop visits each rank once, even if clients write long chains.
    """
    ends: dict[int, int | None] = {}  # None: in a cycle, or leading to one
    for rank in waits_for:
        path, current = [], rank
        while current in waits_for and current not in ends:
            ends[current] = None
            path.append(current)
            current = waits_for[current]
        end = ends.get(current, current)
        for passed in path:
            ends[passed] = end
    return {rank: waits_for[rank] if end is None else end for rank, end in ends.items()}


def late_in(group: GroupRecord, now_s: float, *, after_s: float = LATE_AFTER_S) -> list[LateRank]:
    """Returns the ranks of one group that others have awaited for over `after_s`."""
    waiting = {
        rank: record
        for rank, record in rank_records(group).items()
        if record is not None
        and record.state in (board_abi.RankState.MEETING, board_abi.RankState.WAITING)
        and 0 <= record.waiting_for < group.spec.world_size
        and record.waiting_for != rank
    }
    waits_for = {rank: record.waiting_for for rank, record in waiting.items()}
    by_late: dict[int, list[int]] = {}
    for rank, end in _ends(waits_for).items():
        by_late.setdefault(end, []).append(rank)
    found = []
    claims = group.claims
    for late, waiters in by_late.items():
        record = min((waiting[rank] for rank in waiters), key=lambda each: each.since_ns)
        since_s, member = now_s - record.since_ns / 1e9, claims.get(late)
        if since_s <= after_s:
            continue
        found.append(
            LateRank(
                group=group,
                world_rank=late,
                pid=member.session.pid if member is not None else 0,
                process_index=member.session.process_index if member is not None else 0,
                since_s=since_s,
                waiting_ranks=tuple(sorted(waiters)),
                layer=group.layers.name_of_id(record.layer_id),
                op=board_abi.OpCode(record.op).name,
                handle=record.handle,
            )
        )
    return found


class LateRanks:
    """Reports a late rank once, and once more when others no longer wait for it."""

    def __init__(self, groups: GroupBook, events: EventLog, clock: Clock) -> None:
        self._groups = groups
        self._events = events
        self._clock = clock
        self._known: dict[tuple[str, int, int], LateRank] = {}

    async def now(self) -> list[LateRank]:
        """Returns ranks that others have awaited for over LATE_AFTER_S, longest wait first."""
        groups, now_s = self._groups.all(), self._clock.monotonic_s()
        found = [late async for group in paced(groups) for late in late_in(group, now_s)]
        return sorted(found, key=lambda late: -late.since_s)

    async def watch(self) -> None:
        """Checks every CHECK_EVERY_S until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_EVERY_S)

    async def check(self) -> None:
        """Adds an event for each rank that became late, or is no longer late."""
        now_ns = int(self._clock.monotonic_s() * 1e9)
        for group in self._groups.all():
            windows = group.windows
            if device_layout.on_device(group.spec) and windows is not None and windows.board:
                board.tell_time(windows.board, now_ns)  # GPUs cannot read the host's clock
        now = await self.now()
        found = {(x.group.group_id, x.group.generation, x.world_rank): x for x in now}
        for key, late in found.items():
            if key not in self._known:
                self._say("rank.late", late, late.message, logging.WARNING)
        for key, late in self._known.items():
            if key not in found:
                name = quoted(late.group.owner.name)
                text = f"rank {late.world_rank} of group {name} is not waited for"
                self._say("rank.arrived", late, text, logging.INFO)
        self._known = found

    def _say(self, kind: str, late: LateRank, message: str, level: int) -> None:
        self._events.add(
            kind,
            message,
            **late.group.fields,
            level=level,
            rank=late.world_rank,
            client_pid=late.pid,
            layer=late.layer,
            op=late.op,
        )
