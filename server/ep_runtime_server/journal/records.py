"""Converts sessions, groups and window sets to JSON values of the journal, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ep_runtime import board
from ep_runtime.layer_specs import LayerSpec
from ep_runtime.specs import GroupSpec, make_group_spec
from ep_runtime.wire import RegisteredLayer, group_spec_to_proto
from ep_runtime_server.callers.sessions import LIVE, SessionRecord, SessionState
from ep_runtime_server.groups.fsm import State
from ep_runtime_server.groups.record import Answered, GroupMember, GroupRecord, RemoteMember
from ep_runtime_server.journal import shapes
from ep_runtime_server.memory.window_sets import Buffer
from ep_runtime_server.memory.windows import Owner, WindowSet, WindowState


def of_session(session: SessionRecord) -> dict[str, Any] | None:
    """Converts a session to a record; None for an ended one, which the journal drops."""
    if session.over:
        return None
    fields = {name: getattr(session, name) for name in shapes.SESSION}
    return fields | {"state": session.state.value}


def to_session(session_id: str, value: Mapping[str, Any]) -> SessionRecord:
    """Converts a record to a session, which is SUSPECT until its process sends a message."""
    shapes.check(value, shapes.SESSION)
    fields = dict(value)
    state = SessionState(fields.pop("state"))
    suspect = state in LIVE and state is not SessionState.CONNECTED
    return SessionRecord(
        session_id=session_id,
        token="",
        pidfd=-1,
        state=SessionState.SUSPECT if suspect else state,
        **fields,
    )


def _of_owner(owner: Owner) -> list[Any]:
    return [owner.uid, owner.job, owner.name]


def _of_spec(spec: GroupSpec) -> dict[str, Any]:
    """Converts a spec; leaves out default values so that older daemons can read it."""
    fields = dataclasses.fields(spec)
    return {f.name: v for f in fields if (v := getattr(spec, f.name)) != f.default}


def _to_spec(value: Mapping[str, Any]) -> GroupSpec:
    fields = dict(value)
    fields["mesh_axes"] = tuple((name, size) for name, size in fields["mesh_axes"])
    for name in ("ep_axis", "outer_axes"):
        fields[name] = tuple(fields[name])
    spec = make_group_spec(**fields)
    board.check_world(spec)  # raises if a daemon would refuse the spec
    group_spec_to_proto(spec)  # raises if the spec does not fit the protocol
    return spec


def of_windows(windows: WindowSet) -> dict[str, Any] | None:
    """Converts a window set to a record; None for a set that is being freed."""
    if windows.state is WindowState.RELEASING:
        return None
    return {
        "owner": _of_owner(windows.owner),
        "spec": _of_spec(windows.spec),
        "ranks": windows.layout.ranks,
        "generation": windows.generation,
        "created_s": windows.created_s,
        "state": windows.state.value,
        "buffers": [
            [b.buffer_id, b.device, b.world_rank, b.size_bytes, b.identity] for b in windows.buffers
        ],
        "holders": sorted(windows.holders),
    }


def to_windows(set_id: str, value: Mapping[str, Any]) -> WindowSet:
    """Converts a record to a window set, whose descriptors must still come back."""
    shapes.check(value, shapes.WINDOWS)
    layout = board.board_layout(_to_spec(value["spec"]), value["ranks"])
    windows = WindowSet(Owner(*value["owner"]), layout, value["generation"], value["created_s"])
    windows.set_id = set_id
    windows.state = WindowState(value["state"])
    windows.holders = set(value["holders"])
    for buffer_id, device, world_rank, size_bytes, identity in value["buffers"]:
        right = layout.board_bytes if world_rank < 0 else board.window_bytes(windows.spec)
        if size_bytes != right:
            raise ValueError(f"rank {world_rank} must have {right} bytes, got {size_bytes}")
        known = (identity[0], identity[1]) if identity is not None else None
        windows.buffers.append(Buffer(buffer_id, device, world_rank, size_bytes, known))
    return windows


def of_group(group: GroupRecord) -> dict[str, Any] | None:
    """Converts a group, without its layers, to a record; None if the journal should drop it.

    The journal drops closed groups, and groups that had only claims.
    """
    if group.state is State.CLOSED:
        return None
    return {
        "owner": _of_owner(group.owner),
        "spec": _of_spec(group.spec),
        "node_size": group.node_size,
        "generation": group.generation,
        "state": group.state.value,
        "formed": group.formed,
        "members": [[m.session.session_id, m.ranks, m.attached] for m in group.members.values()],
        "previous": [[m.session.session_id, m.ranks, m.attached] for m in group.previous.values()],
        "left": sorted(group.left),
        "windows": group.windows.set_id if group.windows is not None else None,
        "reattached": group.reattached,
        "retained_until_s": group.retained_until_s,
        "created_s": group.created_s,
        "created_wall_s": group.created_wall_s,
        # A restarted daemon needs an uncommitted view only because other nodes may have it.
        "undecided": _of_undecided(group),
        "spans": group.spans,
        "epoch": group.epoch if group.committed else 0,
        "remote": [[rank, m.node, m.session_id, m.pid] for rank, m in group.remote.items()]
        if group.committed
        else [],
        "answered": _of_answered(group.answered),
    }


def _of_undecided(group: GroupRecord) -> list[Any] | None:
    if not group.remote or group.committed:
        return None
    nodes = sorted({member.node for member in group.remote.values()})
    return [group.epoch, nodes, group.local_ranks]


def _of_answered(answered: Answered | None) -> list[Any] | None:
    if answered is None:
        return None
    ours = {rank: s.session_id for rank, s in answered.sessions.items() if s is not None}
    return [answered.epoch, sorted(answered.nodes), [*ours.items()]]


def _to_answered(value: list[Any] | None, sessions: Mapping[str, SessionRecord]) -> Answered | None:
    if value is None:
        return None
    epoch, nodes, ours = value
    return Answered(epoch, frozenset(nodes), {rank: sessions.get(key) for rank, key in ours})


def to_group(
    group_id: str,
    value: Mapping[str, Any],
    sessions: Mapping[str, SessionRecord],
    sets: Mapping[str, WindowSet],
) -> GroupRecord:
    """Converts a record to a group with its members and its window set.

    Raises LookupError if the journal lacks one of them; then only the processes know the group.
    """
    shapes.check(value, shapes.GROUP)
    group = GroupRecord(Owner(*value["owner"]), _to_spec(value["spec"]), value["generation"])
    group.group_id = group_id
    group.state = State(value["state"])
    for name in ("members", "previous"):
        found = {
            session_id: GroupMember(sessions[session_id], tuple(ranks), attached)
            for session_id, ranks, attached in value[name]
        }
        setattr(group, name, found)
    group.left = set(value["left"])
    group.remote = {rank: RemoteMember(*rest) for rank, *rest in value.get("remote", ())}
    group.spans = value.get("spans", False)
    group.node_size = value.get("node_size", 0)
    undecided = value.get("undecided")
    if undecided is not None:
        group.undecided = undecided[0], tuple(undecided[1]), tuple(undecided[2])
    group.answered = _to_answered(value.get("answered"), sessions)
    group.committed, group.epoch = bool(group.remote), value.get("epoch", 0)
    group.windows = sets[value["windows"]] if value["windows"] is not None else None
    for name in ("formed", "reattached", "retained_until_s", "created_s", "created_wall_s"):
        setattr(group, name, value[name])
    return group


_LAYER_FIELDS = tuple(field.name for field in dataclasses.fields(LayerSpec))


def of_layer(layer: RegisteredLayer) -> list[Any]:
    spec = {name: getattr(layer.spec, name) for name in _LAYER_FIELDS}  # 8 times as fast as asdict
    return [spec, layer.num_layers, layer.base_id, layer.handle_base]


def to_layer(value: list[Any]) -> RegisteredLayer:
    spec, num_layers, base_id, handle_base = value
    numbers = (num_layers, base_id, handle_base)
    if any(type(x) is not int or not 0 <= x < 1 << 63 for x in numbers):
        raise TypeError(f"a layer cannot have the numbers {numbers}")
    layer = LayerSpec(**spec)
    sizes = [getattr(layer, name) for name in _LAYER_FIELDS if name != "name"]
    if any(type(x) is not int or x >= 1 << 62 for x in sizes if x is not None):
        raise TypeError(f"layer {layer.name!r} cannot have the sizes {sizes}")
    return RegisteredLayer(layer, num_layers, base_id, handle_base)
