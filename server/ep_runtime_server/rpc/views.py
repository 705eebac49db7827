"""Converts sessions, groups, memory, and times and loads of calls to messages."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from google.protobuf import timestamp_pb2

from ep_runtime import board, board_abi, board_records, wire
from ep_runtime.board_records import HandleRecord, RankRecord
from ep_runtime.specs import DTYPE_BYTES
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime.v1 import types_pb2
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import Event
from ep_runtime_server.callers.credentials import process_state
from ep_runtime_server.callers.quotas import Usage, UserLimits
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.fsm import State
from ep_runtime_server.groups.lateness import LateRank, late_in, rank_record
from ep_runtime_server.groups.layers import Handle
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.journal.drains import Drain
from ep_runtime_server.journal.file import Journal
from ep_runtime_server.journal.recovery import Recovery
from ep_runtime_server.memory.window_sets import Buffer
from ep_runtime_server.memory.windows import WindowSet, WindowState
from ep_runtime_server.runtime import Runtime

_BUFFER_STATES = {
    WindowState.LEASED: pb.BUFFER_STATE_LEASED,
    WindowState.RETAINED: pb.BUFFER_STATE_RETAINED,
    WindowState.QUARANTINED: pb.BUFFER_STATE_QUARANTINED,
    WindowState.RELEASING: pb.BUFFER_STATE_QUARANTINED,
}

# The last members of each group: what they were made of, and the message.
_MADE: weakref.WeakKeyDictionary[GroupRecord, tuple[Any, types_pb2.Group]]
_MADE = weakref.WeakKeyDictionary()


def timestamp(wall_s: float) -> timestamp_pb2.Timestamp:
    whole = int(wall_s)
    return timestamp_pb2.Timestamp(seconds=whole, nanos=int((wall_s - whole) * 1e9))


def descriptor(buffer: Buffer, generation: int) -> types_pb2.WindowDescriptor:
    rank, size = buffer.world_rank, buffer.size_bytes
    kind = types_pb2.WINDOW_KIND_BOARD if rank < 0 else types_pb2.WINDOW_KIND_WINDOW
    return types_pb2.WindowDescriptor(kind=kind, world_rank=rank, bytes=size, generation=generation)


def group(group: GroupRecord, clock: Clock) -> types_pb2.Group:
    spec = group.resolved
    message = types_pb2.Group(
        spec=wire.group_spec_to_proto(spec),
        job=group.owner.job,
        uid=group.owner.uid,
        generation=group.generation,
        state=f"GROUP_STATE_{group.state.value}",
        window_bytes=board.window_bytes(spec) if group.has_windows else 0,
        board_bytes=_board_bytes(group),
        create_time=timestamp(group.created_wall_s),
        epoch=group.epoch,
        attempt=group.attempt,
    )
    message.MergeFrom(_members(group))
    if group.state is State.RETAINED and group.retained_until_s is not None:
        left = max(0.0, group.retained_until_s - clock.monotonic_s())
        message.retained_left.CopyFrom(wire.duration(left))
    return message


def _members(group: GroupRecord) -> types_pb2.Group:
    """Makes a message of the members alone, once for all processes of a node that get the same."""
    ours = [(key, member.ranks, member.attached) for key, member in group.members.items()]
    now = (ours, group.remote, group.committed, set(group.left))
    made = _MADE.get(group)
    if made is not None and made[0] == now:
        return made[1]
    message, claims = types_pb2.Group(), group.claims
    for rank in range(group.spec.world_size):
        member, remote = claims.get(rank), group.remote.get(rank)
        if remote is not None:
            message.members.add(
                world_rank=rank,
                session_id=remote.session_id,
                pid=remote.pid,
                attached=group.committed and remote.session_id not in group.left,
                node=remote.node,
            )
        elif member is None:
            message.members.add(world_rank=rank)
        else:
            message.members.add(
                world_rank=rank,
                session_id=member.session.session_id,
                pid=member.session.pid,
                attached=member.attached,
            )
    _MADE[group] = now, message
    return message


def _board_bytes(group: GroupRecord) -> int:
    if not group.has_windows:
        return 0
    if group.windows is not None:
        return group.windows.layout.board_bytes
    return board.board_bytes(group.resolved, group.local_ranks)


def session(session: SessionRecord, groups: Iterable[str], clock: Clock) -> pb.SessionInfo:
    now, beat_s, ended_s = clock.monotonic_s(), session.last_beat_s, session.ended_s
    return wire.filled(
        pb.SessionInfo,
        session,
        state=f"SESSION_STATE_{session.state.value}",
        groups=groups,
        create_time=timestamp(session.created_wall_s),
        age=wire.duration(now - session.created_s),
        since_heartbeat=wire.duration(now - beat_s) if beat_s is not None else None,
        since_end=wire.duration(now - ended_s) if ended_s is not None else None,
    )


def group_info(
    item: GroupRecord, clock: Clock, nccl: tuple[str, str], gpu_index: Callable[[str], int | None]
) -> pb.GroupInfo:
    """Converts a group to a message.

    `nccl` is (version, state) of its communicators; `gpu_index(name)` returns a GPU's index.
    """
    return pb.GroupInfo(
        group=group(item, clock),
        num_layers=item.layers.num_layers,
        num_handles=item.layers.num_handles,
        total_bytes=item.windows.size_bytes if item.windows is not None else 0,
        age=wire.duration(clock.monotonic_s() - item.created_s),
        poison_reason=_poison_reason(item),
        late_ranks=[late_rank(late) for late in late_in(item, clock.monotonic_s())],
        wanted_ranks=item.windows.wanted_ranks if item.windows is not None else [],
        nccl_version=nccl[0],
        nccl_state=nccl[1],
        gpus=[
            pb.RankGpu(world_rank=rank, device=uuid, gpu_index=gpu_index(uuid))
            for rank, uuid in sorted(item.uuids.items())
        ],
    )


def _poison_reason(group: GroupRecord) -> str:
    windows = group.windows
    if windows is None or windows.board is None:
        return ""
    generation, reason = board_records.read_poison(windows.board)
    if generation < group.generation:
        return ""
    return "UNREADABLE" if reason in (None, board_abi.PoisonReason.NONE) else reason.name


def layer_info(row: tuple[GroupRecord, wire.RegisteredLayer]) -> pb.LayerInfo:
    item, layer = row
    return pb.LayerInfo(layer=wire.registered_to_proto(layer), **item.fields)


def handles(groups: Iterable[GroupRecord], layer: str) -> Iterator[tuple[GroupRecord, Handle]]:
    """Yields the handles of one layer or stack; of all if `layer` is empty."""
    for item in groups:
        for handle in item.layers.handles():
            if not layer or layer in (handle.layer, handle.layer.rpartition("[")[0]):
                yield item, handle


def handle_info(row: tuple[GroupRecord, Handle], clock: Clock) -> pb.HandleInfo:
    item, handle = row
    message = wire.filled(
        pb.HandleInfo,
        handle,
        **item.fields,
        pids=sorted(member.session.pid for member in item.members.values()),
        state=board_abi.HandleState(0).name,
        lane=-1,
    )
    windows = item.windows
    if windows is not None and windows.board is not None:
        record = board_records.read_handles(windows.board, windows.layout, [handle.index])[0]
        if record is not None:
            _add_record(message, record, clock)
    return message


def _add_record(message: pb.HandleInfo, record: HandleRecord, clock: Clock) -> None:
    for name in ("epoch", "lane", "calls", "rows", "dropped_rows", "rounds"):
        setattr(message, name, getattr(record, name))
    message.state = record.state.name
    if record.updated_ns:
        message.last_op = board_abi.OpCode(record.last_op).name
        age_s = max(0.0, clock.monotonic_s() - record.updated_ns / 1e9)
        message.age.CopyFrom(wire.duration(age_s))


def buffer_info(row: tuple[WindowSet, Buffer], runtime: Runtime) -> pb.BufferInfo:
    windows, buffer = row
    holders = [runtime.sessions.get(session_id) for session_id in windows.holders]
    return wire.filled(
        pb.BufferInfo,
        buffer,
        **windows.fields,
        bytes=buffer.size_bytes,
        kind=descriptor(buffer, windows.generation).kind,
        state=_BUFFER_STATES[windows.state],
        mapped_by=sorted(holder.pid for holder in holders if holder is not None),
        age=wire.duration(runtime.clock.monotonic_s() - windows.created_s),
        gpu_index=runtime.pool.gpu_index(buffer.device),
    )


def event(item: Event) -> pb.EventInfo:
    fields_json = json.dumps(item.fields, default=str)
    return wire.filled(pb.EventInfo, item, time=timestamp(item.wall_s), fields_json=fields_json)


def ranks(groups: Iterable[GroupRecord]) -> list[tuple[GroupRecord, int]]:
    """Returns (group, world rank) of this node's ranks."""
    return [(item, rank) for item in groups for rank in item.local_ranks]


def rank_info(row: tuple[GroupRecord, int], clock: Clock) -> pb.RankInfo:
    item, rank = row
    member = item.member_of(rank)
    silent_s = member.session.silent_s(clock.monotonic_s()) if member is not None else None
    message = pb.RankInfo(
        **item.fields,
        world_rank=rank,
        pid=member.session.pid if member is not None else 0,
        handle=-1,
        waiting_for=-1,
        silent=wire.duration(silent_s) if silent_s is not None else None,
    )
    record = rank_record(item, rank)
    if record is not None:
        _add_progress(message, record, item, clock)
    return message


def silent_process(session: SessionRecord, silent_s: float) -> pb.SilentProcess:
    state = process_state(session.pid)
    return wire.filled(
        pb.SilentProcess, session, since=wire.duration(silent_s), process_state=state
    )


def late_rank(late: LateRank) -> pb.LateRank:
    since = wire.duration(late.since_s)
    return wire.filled(pb.LateRank, late, **late.group.fields, since=since)


def usage(uid: int, held: Usage) -> pb.UserUsage:
    return pb.UserUsage(
        uid=uid,
        num_sessions=held.sessions,
        num_groups=held.groups,
        num_layers=held.layers,
        host_bytes=held.host_bytes,
        gpu_bytes=held.gpu_bytes,
        num_fds=held.fds,
        journal_bytes=held.journal_bytes,
    )


def user_limits(limits: UserLimits) -> pb.UserLimits:
    return pb.UserLimits(
        max_sessions=limits.sessions,
        max_groups=limits.groups,
        max_layers=limits.layers,
        max_host_bytes=limits.host_bytes,
        max_gpu_bytes=limits.gpu_bytes or 0,
        max_fds=limits.fds,
        max_fds_of_all=limits.all_fds,
        max_journal_bytes=limits.journal_bytes,
        max_retain=wire.duration(limits.retain_s),
    )


def journal(found: Journal) -> pb.JournalStatus:
    return pb.JournalStatus(error=found.error, bytes=found.size_bytes, cut_bytes=found.cut_bytes)


def drain(found: Drain | None, clock: Clock) -> pb.DrainStatus | None:
    if found is None:
        return None
    ends_in_s = found.ends_at_s - clock.monotonic_s() if found.ends_at_s is not None else None
    return pb.DrainStatus(
        by=found.by,
        since=wire.duration(max(clock.wall_s() - found.since_wall_s, 0.0)),
        ends_in=wire.duration(max(ends_in_s, 0.0)) if ends_in_s is not None else None,
    )


def recovery(found: Recovery) -> pb.RecoveryStatus:
    return pb.RecoveryStatus(
        under_way=found.under_way,
        num_sessions=found.num_sessions,
        num_awaited=found.num_awaited,
        adopted_bytes=found.adopted_bytes,
        awaited_bytes=found.awaited_bytes,
        lost_bytes=found.lost_bytes,
        left=wire.duration(found.left_s) if found.under_way else None,
    )


def _add_progress(
    message: pb.RankInfo, record: RankRecord, group: GroupRecord, clock: Clock
) -> None:
    message.state = record.state.name
    message.epoch = record.epoch
    message.waiting_for = record.waiting_for
    if record.state is not board_abi.RankState.IDLE:  # an idle rank's last op stays on the board
        message.op = record.op.name
        message.layer = group.layers.name_of_id(record.layer_id)
        message.handle = record.handle
    if record.since_ns:
        since_s = max(0.0, clock.monotonic_s() - record.since_ns / 1e9)
        message.since.CopyFrom(wire.duration(since_s))


def rank_tally(row: tuple[GroupRecord, int], clock: Clock) -> pb.RankTally:
    item, rank = row
    spec = item.spec
    message = pb.RankTally(
        **item.fields,
        world_rank=rank,
        read=wire.duration(clock.monotonic_s()),
        now=rank_info(row, clock),
        row_bytes=spec.hidden_size * DTYPE_BYTES[spec.max_token_dtype],
        device=item.uuids.get(rank) or "host",
        first_expert=board_records.first_expert(spec, rank),
    )
    record = rank_record(item, rank)
    if record is not None:
        for name in ("calls", "rows", "dropped_rows"):
            setattr(message, name, getattr(record, name))
        _add_sums(message, item, rank)
    return message


def _add_sums(message: pb.RankTally, group: GroupRecord, rank: int) -> None:
    windows = group.windows
    if windows is None or windows.board is None:
        return
    for op, tally in board_records.read_ops(windows.board, windows.layout, rank).items():
        peers = [wire.filled(pb.PeerTally, peer) for peer in tally.peers]
        message.ops.append(wire.filled(pb.OpTally, tally, op=op.name, peers=peers))
    by_layer = itertools.groupby(group.layers.handles(), key=lambda handle: handle.layer)
    for layer, handles in by_layer:
        indices = [handle.index for handle in handles]
        load = board_records.read_load(windows.board, windows.layout, rank, indices)
        if load is not None:
            message.layers.append(wire.filled(pb.LoadTally, load, layer=layer))
