"""Forming a group: claim ranks, fetch and map windows, report. Once per group, never per step."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ep_runtime import env, specs, wire
from ep_runtime.errors import EpRuntimeError
from ep_runtime.v1 import group_service_pb2, layer_service_pb2, types_pb2
from ep_runtime_client import transport

if TYPE_CHECKING:
    from ep_runtime_client.session import Session

# The daemon answers at `wait`; the call's own deadline only ends a call nobody answers.
_GRACE_S = 5.0


@dataclasses.dataclass(frozen=True)
class Formed:
    """A group that is READY.

    Attributes:
        generation: the daemon's; 0 without a daemon.
        native_group: the native library's number; None for transport "xla".
        reattached: retained windows were taken over and nothing was allocated.
    """

    generation: int
    native_group: int | None
    reattached: bool


def form(session: Session, spec: specs.GroupSpec, ranks: Sequence[int], *, replace: bool) -> Formed:
    """Makes the group at the daemon and maps its windows here.

    Raises:
        SpecMismatchError, GroupBusyError, GroupNotReadyError, PoolExhaustedError: of the daemon.
    """
    if not session.has_daemon:
        return Formed(0, None, False)
    wait_s = session.timeout_s
    request = group_service_pb2.CreateGroupRequest(
        op_id=uuid.uuid4().hex,
        spec=wire.group_spec_to_proto(spec),
        world_ranks=ranks,
        replace=replace,
        wait=wire.duration(wait_s),
    )
    control = session.control
    answer = control.call(control.groups.CreateGroup, request, timeout_s=wait_s + _GRACE_S)
    generation = int(answer.group.generation)
    native_group = None
    try:
        if answer.group.window_bytes:
            native_group = _map_windows(session, spec, generation)
        report = group_service_pb2.ReportAttachedRequest(
            name=spec.name, generation=generation, wait=wire.duration(wait_s)
        )
        control.call(control.groups.ReportAttached, report, timeout_s=wait_s + _GRACE_S)
    except BaseException:
        leave(session, spec.name, generation, native_group)
        raise
    return Formed(generation, native_group, bool(answer.reattached))


def _map_windows(session: Session, spec: specs.GroupSpec, generation: int) -> int:
    from ep_runtime import native

    control = session.control
    ticket = control.call(
        control.groups.AcquireWindows,
        group_service_pb2.AcquireWindowsRequest(name=spec.name, generation=generation),
    )
    found = transport.redeem(
        session.directory, session.token, ticket.ticket, transport.MUTATE_TIMEOUT_S
    )
    try:
        boards = [fd for item, fd in found if item.kind == types_pb2.WINDOW_KIND_BOARD]
        windows = {
            int(item.world_rank): fd
            for item, fd in found
            if item.kind == types_pb2.WINDOW_KIND_WINDOW
        }
        if len(boards) != 1 or sorted(windows) != list(range(spec.world_size)):
            raise EpRuntimeError(
                f"group {spec.name!r}: the daemon sent {len(boards)} boards and windows of ranks "
                f"{sorted(windows)}, wanted 1 and 0 to {spec.world_size - 1}"
            )
        return int(
            native.library().open_group(
                spec,
                generation=generation,
                board_fd=boards[0],
                window_fds=[windows[rank] for rank in range(spec.world_size)],
                debug=env.debug(),
            )
        )
    finally:
        transport.close_all([fd for _, fd in found])  # the library keeps duplicates


def leave(session: Session, name: str, generation: int, native_group: int | None) -> None:
    """Unmaps the windows and leaves the group. A daemon that is gone has freed it already."""
    if native_group is not None:
        from ep_runtime import native

        native.library().close_group(native_group)
    if not session.has_daemon or not session.alive:
        return
    request = group_service_pb2.CloseGroupRequest(name=name, generation=generation)
    session.call_quietly(session.control.groups.CloseGroup, request)


def register(
    session: Session,
    spec: specs.GroupSpec,
    generation: int,
    layers: Sequence[specs.LayerSpec],
    stacks: Sequence[wire.LayerStackSpec],
) -> tuple[list[wire.RegisteredLayer], list[wire.RegisteredLayer]]:
    """Registers layers and stacks in one call; without a daemon numbers them here.

    Raises:
        SpecMismatchError: a name is registered with other settings.
        PoolExhaustedError: more handles than a board holds.
        StaleHandleError: the group is gone.
    """
    if not session.has_daemon:
        return (
            [wire.RegisteredLayer(s, 0, specs.layer_id(spec.name, s.name), 0) for s in layers],
            [
                wire.RegisteredLayer(
                    s.spec, s.num_layers, specs.stack_base_id(spec.name, s.spec.name), 0
                )
                for s in stacks
            ],
        )
    request = layer_service_pb2.RegisterLayersRequest(
        op_id=uuid.uuid4().hex,
        group=spec.name,
        generation=generation,
        layers=[wire.layer_spec_to_proto(item) for item in layers],
        stacks=[wire.stack_spec_to_proto(item) for item in stacks],
    )
    control = session.control
    answer = control.call(
        control.layers.RegisterLayers, request, timeout_s=transport.MUTATE_TIMEOUT_S
    )
    return (
        [wire.registered_from_proto(item) for item in answer.layers],
        [wire.registered_from_proto(item) for item in answer.stacks],
    )
