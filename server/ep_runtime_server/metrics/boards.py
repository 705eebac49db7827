"""Reads the series of a group's layers and ranks from its board.

A board has sums since it was formatted, and the current state of each rank.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence

from ep_runtime import board_records
from ep_runtime.board_abi import HandleState, OpCode, RankState
from ep_runtime.board_records import HandleRecord, RankRecord
from ep_runtime_server.base.clock import paced
from ep_runtime_server.base.limits import LATE_AFTER_S
from ep_runtime_server.groups.lateness import LateRank, late_in, rank_records
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.metrics.catalogue import (
    HISTOGRAM,
    LAYER,
    METRICS,
    RANK,
    SERIES_OF_HISTOGRAM,
    Sheet,
)

Labels = tuple[str, ...]

SERIES_OF_RANK = sum(metric.labels[: len(RANK)] == RANK for metric in METRICS.values())
SERIES_OF_LAYER = sum(metric.labels == LAYER for metric in METRICS.values())
SERIES_OF_LAYER_AND_RANK = sum(metric.detail for metric in METRICS.values())
# Five ops: prepare, and dispatch and combine with their backward passes.
SERIES_OF_OPS = (
    5 * SERIES_OF_HISTOGRAM * sum(metric.kind == HISTOGRAM for metric in METRICS.values())
)
_WAITING = (RankState.MEETING, RankState.WAITING)


def max_mean_ratio(rows: Sequence[int]) -> float | None:
    """Returns the largest value divided by the mean: 1.0 if all are equal, None if all are 0."""
    total = sum(rows)
    return max(rows) * len(rows) / total if total else None


async def put_ranks(sheet: Sheet, group: GroupRecord, labels: Labels, now_s: float) -> None:
    """Puts series of this node's ranks, of ranks that they wait for, and of the group's balance."""
    found = {rank: record for rank, record in rank_records(group).items() if record is not None}
    ratio = max_mean_ratio([record.rows for record in found.values()])
    if ratio is not None:
        sheet.put("group_load_max_mean_ratio", labels, ratio)
    waited_for = {peer.world_rank: peer for peer in late_in(group, now_s, after_s=0.0)}
    async for rank in paced(dict.fromkeys([*found, *waited_for])):  # may include other nodes' ranks
        of_rank = (*labels, str(rank))
        if rank in found:
            _put_rank(sheet, of_rank, found[rank], now_s)
        _put_peer(sheet, of_rank, waited_for.get(rank))


def _put_rank(sheet: Sheet, labels: Labels, record: RankRecord, now_s: float) -> None:
    sheet.put("rank_calls_total", labels, record.calls)
    sheet.put("rank_rows_total", labels, record.rows)
    sheet.put("rank_dropped_rows_total", labels, record.dropped_rows)
    sheet.put("rank_state", (*labels, record.state.name, record.op.name), 1.0)
    sheet.put("rank_open_calls", labels, record.open_calls)
    if record.progress_ns:
        sheet.put("rank_last_call_seconds", labels, _since(record.progress_ns, now_s))
    waits = record.state in _WAITING and record.since_ns
    sheet.put("rank_wait_seconds", labels, _since(record.since_ns, now_s) if waits else 0.0)


def _put_peer(sheet: Sheet, labels: Labels, peer: LateRank | None) -> None:
    waited_s, waiters = (peer.since_s, peer.waiting_ranks) if peer is not None else (0.0, ())
    sheet.put("peer_wait_seconds", labels, waited_s)
    sheet.put("peer_waiters", labels, len(waiters))
    if peer is not None and waited_s > LATE_AFTER_S:
        sheet.put("late_rank_seconds", (*labels, peer.layer, peer.op), waited_s)


def _since(then_ns: int, now_s: float) -> float:
    return max(0.0, now_s - then_ns / 1e9)


async def put_ops(sheet: Sheet, group: GroupRecord, labels: Labels) -> None:
    """Puts histograms of the calls of this node's ranks, and their sums of waiting times."""
    times: dict[OpCode, list[board_records.OpTally]] = collections.defaultdict(list)
    waited_ns, waited_for_ns = collections.Counter[int](), collections.Counter[int]()
    async for rank in paced(group.local_ranks):
        windows = group.windows
        if windows is None or windows.board is None:  # may change at an await
            return
        for op, tally in board_records.read_ops(windows.board, windows.layout, rank).items():
            times[op].append(tally)
            waited_ns[rank] += tally.wait_ns
            for peer in tally.peers:
                waited_for_ns[peer.world_rank] += peer.wait_ns
    for op, tallies in times.items():
        of_op = (*labels, op.name)
        counts = map(sum, zip(*(tally.times for tally in tallies), strict=True))
        time_s = sum(tally.time_ns for tally in tallies) / 1e9
        sheet.put_histogram("op_seconds", of_op, counts, time_s)
        counts = map(sum, zip(*(tally.waits for tally in tallies), strict=True))
        wait_s = sum(tally.wait_ns for tally in tallies) / 1e9
        sheet.put_histogram("op_wait_seconds", of_op, counts, wait_s)
    for rank in group.local_ranks:
        of_rank = (*labels, str(rank))
        sheet.put("rank_waited_seconds_total", of_rank, waited_ns[rank] / 1e9)
        sheet.put("peer_waited_seconds_total", of_rank, waited_for_ns[rank] / 1e9)


async def put_layers(
    sheet: Sheet, group: GroupRecord, labels: Labels, now_s: float, *, detail: bool
) -> int:
    """Puts series of each layer; returns how many layers did not fit on the sheet."""
    ranks = group.local_ranks
    experts = sorted({expert for rank in ranks for expert in _experts(group, rank)})
    cost = SERIES_OF_LAYER
    if detail:
        cost += SERIES_OF_LAYER_AND_RANK * len(ranks) + len(experts)
    left_out = 0
    states: collections.Counter[HandleState] = collections.Counter()
    by_layer = itertools.groupby(group.layers.handles(), key=lambda handle: handle.layer)
    async for name, handles in paced(by_layer):
        windows = group.windows
        if windows is None or windows.board is None:  # may change at an await
            return left_out
        if not sheet.fits(cost):
            left_out += 1
            continue
        indices = [handle.index for handle in handles]
        found = board_records.read_handles(windows.board, windows.layout, indices)
        records = [record for record in found if record is not None]
        states.update(record.state for record in records)
        _put_layer(sheet, (*labels, name), records, now_s)
        loads = board_records.read_device_rows(windows.board, windows.layout, indices)
        if loads is not None:
            _put_loads(sheet, (*labels, name), loads, detail=detail)
        rows, tokens = dict.fromkeys(experts, 0), 0
        for rank in ranks:
            load = board_records.read_load(windows.board, windows.layout, rank, indices)
            if load is not None:
                tokens += load.tokens
                for expert, count in zip(_experts(group, rank), load.rows, strict=True):
                    rows[expert] += count
        sheet.put("tokens_total", (*labels, name), tokens)
        _put_experts(sheet, (*labels, name), rows, detail=detail)
    for state in HandleState:
        sheet.put("group_handles", (*labels, state.name), states[state])
    return left_out


def _experts(group: GroupRecord, rank: int) -> range:
    """Returns the indices of the rank's experts."""
    first = board_records.first_expert(group.spec, rank)
    return range(first, first + group.spec.experts_per_rank)


def _put_experts(sheet: Sheet, labels: Labels, rows: dict[int, int], *, detail: bool) -> None:
    ratio = max_mean_ratio([*rows.values()])
    if ratio is not None:
        sheet.put("layer_expert_load_max_mean_ratio", labels, ratio)
    for expert, count in rows.items() if detail else ():
        sheet.put("expert_rows_total", (*labels, str(expert)), count)


def _put_layer(sheet: Sheet, labels: Labels, records: list[HandleRecord], now_s: float) -> None:
    sheet.put("calls_total", labels, sum(record.calls for record in records))
    sheet.put("rows_total", labels, sum(record.rows for record in records))
    sheet.put("dropped_rows_total", labels, sum(record.dropped_rows for record in records))
    sheet.put("rounds_total", labels, sum(record.rounds for record in records))
    updated_ns = max((record.updated_ns for record in records), default=0)
    if updated_ns:
        sheet.put("layer_last_call_seconds", labels, _since(updated_ns, now_s))


def _put_loads(
    sheet: Sheet, labels: Labels, loads: Mapping[int, tuple[int, int]], *, detail: bool
) -> None:
    """Puts a layer's load series; `loads` has (rows, dropped rows) by world rank."""
    ratio = max_mean_ratio([rows for rows, _ in loads.values()])
    if ratio is not None:
        sheet.put("layer_load_max_mean_ratio", labels, ratio)
    for rank, (rows, dropped_rows) in loads.items() if detail else ():
        sheet.put("layer_rank_rows_total", (*labels, str(rank)), rows)
        sheet.put("layer_rank_dropped_rows_total", (*labels, str(rank)), dropped_rows)
