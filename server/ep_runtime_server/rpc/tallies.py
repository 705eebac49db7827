"""Converts times and loads of ranks' calls to messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ep_runtime import board_tallies, wire
from ep_runtime.specs import DTYPE_BYTES
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.groups.lateness import rank_record
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.rpc import views


def ranks(groups: Iterable[GroupRecord]) -> list[tuple[GroupRecord, int]]:
    """Returns (group, world rank) of this node's ranks whose groups have a board."""
    return [row for row in views.ranks(groups) if row[0].has_windows]


def rank_tally(row: tuple[GroupRecord, int], clock: Clock) -> pb.RankTally:
    item, rank = row
    spec = item.spec
    message = pb.RankTally(
        **views.generation_of(item),
        world_rank=rank,
        read=wire.duration(clock.monotonic_s()),
        now=views.rank_info(row, clock),
        row_bytes=spec.hidden_size * DTYPE_BYTES[spec.max_token_dtype],
        device=item.uuids.get(rank) or "host",
        first_expert=board_tallies.first_expert(spec, rank),
    )
    record = rank_record(item, rank)
    if record is not None:
        message.calls = record.calls
        message.rows = record.rows
        message.dropped_rows = record.dropped_rows
        _add_sums(message, item, rank)
    return message


def _add_sums(message: pb.RankTally, group: GroupRecord, rank: int) -> None:
    windows = group.windows
    if windows is None or windows.board is None:
        return
    for op, tally in board_tallies.read_ops(windows.board, windows.layout, rank).items():
        message.ops.append(_op_tally(op.name, tally))
    by_layer = itertools.groupby(group.layers.handles(), key=lambda handle: handle.layer)
    for layer, handles in by_layer:
        indices = [handle.index for handle in handles]
        load = board_tallies.read_load(windows.board, windows.layout, rank, indices)
        if load is None:
            continue
        message.layers.append(wire.filled(pb.LoadTally, load, layer=layer))


def _op_tally(name: str, tally: board_tallies.OpTally) -> pb.OpTally:
    peers = [wire.filled(pb.PeerTally, peer) for peer in tally.peers]
    return wire.filled(pb.OpTally, tally, op=name, peers=peers)
