"""Checks of specs and claims at the daemon, beyond `make_group_spec`."""

from __future__ import annotations

from collections.abc import Sequence

from ep_runtime import board, device_layout, wire
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import STATE, TRANSPORTS, GroupSpec
from ep_runtime.text import check_printable
from ep_runtime.units import iec
from ep_runtime_server.base import limits

SERVED_TRANSPORTS = (*TRANSPORTS, STATE)
MAX_LANES = 64
MAX_UUID_BYTES = 64
MAX_GROUP_BYTES = 1 << 60  # the wire's int64 must hold every sum


def check_spec(spec: GroupSpec) -> None:
    """Raises InvalidArgumentError for a spec that this daemon does not allow."""
    names = [name for name, _ in spec.mesh_axes]
    if len(set(names)) != len(names) or any(size < 1 for _, size in spec.mesh_axes):
        raise InvalidArgumentError(
            f"mesh_axes must have unique names and positive sizes, got {spec.mesh_axes}",
            argument="mesh_axes",
        )
    if spec.transport not in SERVED_TRANSPORTS:
        raise InvalidArgumentError(
            f"transport must be one of {SERVED_TRANSPORTS} on this daemon, got {spec.transport!r}",
            argument="transport",
        )
    if spec.lanes > MAX_LANES:
        raise InvalidArgumentError(
            f"lanes must be at most {MAX_LANES}, got {spec.lanes}", argument="lanes"
        )
    board.board_layout(spec)  # refuses a mesh of too many devices
    if spec.world_size * board.window_bytes(spec) > MAX_GROUP_BYTES:
        raise InvalidArgumentError(
            f"windows of {iec(board.window_bytes(spec))} on {spec.world_size} ranks are more than "
            f"any host has; lower max_tokens_per_rank={spec.max_tokens_per_rank} or lanes",
            argument="max_tokens_per_rank",
        )


def check_new_spec(spec: GroupSpec) -> None:
    """Checks as `check_spec`, for a new group."""
    check_spec(spec)
    device_layout.check_limits(spec)
    if spec.node_size:
        raise InvalidArgumentError(
            f"node_size follows from where the ranks are; leave it 0, got {spec.node_size}",
            argument="node_size",
        )


def check_layer_count(layers: int) -> None:
    """Raises InvalidArgumentError if one call carries more layers and stacks than it may."""
    if layers > wire.MAX_LAYERS_PER_CALL:
        raise InvalidArgumentError(
            f"layers and stacks must be at most {wire.MAX_LAYERS_PER_CALL} per call, got {layers}",
            argument="layers",
        )


def checked_ranks(given: Sequence[int], spec: GroupSpec) -> tuple[int, ...]:
    """World ranks, ascending. Raises InvalidArgumentError if they are none of the group's."""
    ranks = tuple(given[: spec.world_size + 1])  # one too many is enough to refuse them
    wrong = [rank for rank in ranks if not 0 <= rank < spec.world_size]
    if not ranks or wrong or len(set(ranks)) != len(ranks):
        raise InvalidArgumentError(
            f"world_ranks must be distinct numbers in 0..{spec.world_size - 1}, "
            f"got {list(ranks[:16])}",
            argument="world_ranks",
        )
    return tuple(sorted(ranks))


def checked_uuids(uuids: Sequence[str], ranks: Sequence[int], spec: GroupSpec) -> tuple[str, ...]:
    """The GPUs of `ranks`, in the order of `checked_ranks`; none for windows on the host.

    Raises:
        InvalidArgumentError: not one for each rank of a group on GPUs, or no name of one.
    """
    wanted = len(ranks) if device_layout.on_device(spec) else 0
    if len(uuids) != wanted:
        raise InvalidArgumentError(
            f"device_uuids must name {wanted} GPUs for {len(ranks)} ranks of a group of transport "
            f"{spec.transport!r}, got {len(uuids)}",
            argument="device_uuids",
        )
    for uuid in uuids:
        check_printable("device_uuids", uuid, MAX_UUID_BYTES)
    return tuple(uuid for _, uuid in sorted(zip(ranks, uuids, strict=False)))


def checked_wait(wait_s: float) -> float:
    """`wait_s`. Raises InvalidArgumentError for a wait that is too long, or none."""
    if not 0 <= wait_s <= limits.MAX_WAIT_S:
        raise InvalidArgumentError(
            f"wait must be 0 to {limits.MAX_WAIT_S:.0f} s, got {wait_s}", argument="wait"
        )
    return wait_s
