"""Converts times and loads of ranks' calls to messages. Changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ep_runtime import board_tallies, wire
from ep_runtime.board_tallies import OpTally
from ep_runtime.specs import DTYPE_BYTES
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.groups.lateness import rank_record
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.rpc import views


def ranks(groups: Iterable[GroupRecord]) -> list[tuple[GroupRecord, int]]:
    """World ranks of this node whose groups have a board."""
    return [row for row in views.ranks(groups) if row[0].has_windows]


def rank_tally(row: tuple[GroupRecord, int], clock: Clock) -> pb.RankTally:
    item, rank = row
    spec = item.spec
    message = pb.RankTally(
        group=item.owner.name,
        job=item.owner.job,
        uid=item.owner.uid,
        generation=item.generation,
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
    for op, tally in board_tallies.read_ops(windows.board, windows.spec, rank).items():
        message.ops.append(_op_tally(op.name, tally))
    by_layer = itertools.groupby(group.layers.handles(), key=lambda handle: handle.layer)
    for layer, handles in by_layer:
        indices = [handle.index for handle in handles]
        load = board_tallies.read_load(windows.board, windows.spec, rank, indices)
        if load is None:
            continue
        message.layers.add(
            layer=layer,
            calls=load.calls,
            time_ns=load.time_ns,
            wait_ns=load.wait_ns,
            tokens=load.tokens,
            rows=load.rows,
        )


def _op_tally(name: str, tally: OpTally) -> pb.OpTally:
    return pb.OpTally(
        op=name,
        calls=tally.calls,
        time_ns=tally.time_ns,
        wait_ns=tally.wait_ns,
        peers=[
            pb.PeerTally(
                world_rank=peer.world_rank, arrival_ns=peer.arrival_ns, wait_ns=peer.wait_ns
            )
            for peer in tally.peers
        ],
    )
