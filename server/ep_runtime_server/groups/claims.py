"""Checks specs and claims for the daemon, in addition to `make_group_spec`."""

from __future__ import annotations

from collections.abc import Sequence

from ep_runtime import board, device_layout, wire
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import STATE, TRANSPORTS, GroupSpec
from ep_runtime.text import check_printable, iec
from ep_runtime_server.base import limits

SERVED_TRANSPORTS = (*TRANSPORTS, STATE)
MAX_LANES = 64
MAX_UUID_BYTES = 64
MAX_GROUP_BYTES = 1 << 60  # so that the protocol's int64 can hold sums


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
    board.check_world(spec)
    if spec.world_size * board.window_bytes(spec) > MAX_GROUP_BYTES:
        raise InvalidArgumentError(
            f"windows of {iec(board.window_bytes(spec))} on {spec.world_size} ranks are more than "
            f"any host has; lower max_tokens_per_rank={spec.max_tokens_per_rank} or lanes",
            argument="max_tokens_per_rank",
        )


def check_new_spec(spec: GroupSpec) -> None:
    """Runs `check_spec`, and checks what only a new group must meet: GPU limits, no node_size."""
    check_spec(spec)
    device_layout.check_limits(spec)
    if spec.node_size:
        raise InvalidArgumentError(
            f"node_size follows from where the ranks are; leave it 0, got {spec.node_size}",
            argument="node_size",
        )


def check_layer_count(layers: int) -> None:
    """Raises InvalidArgumentError if a call has too many layers and stacks."""
    if layers > wire.MAX_LAYERS_PER_CALL:
        raise InvalidArgumentError(
            f"layers and stacks must be at most {wire.MAX_LAYERS_PER_CALL} per call, got {layers}",
            argument="layers",
        )


def checked_ranks(given: Sequence[int], spec: GroupSpec) -> tuple[int, ...]:
    """Returns world ranks in ascending order. Raises InvalidArgumentError for wrong ones."""
    ranks = tuple(given[: spec.world_size + 1])  # one rank too many suffices to refuse
    wrong = [rank for rank in ranks if not 0 <= rank < spec.world_size]
    if not ranks or wrong or len(set(ranks)) != len(ranks):
        raise InvalidArgumentError(
            f"world_ranks must be distinct numbers in 0..{spec.world_size - 1}, "
            f"got {list(ranks[:16])}",
            argument="world_ranks",
        )
    return tuple(sorted(ranks))


def checked_uuids(uuids: Sequence[str], ranks: Sequence[int], spec: GroupSpec) -> tuple[str, ...]:
    """Returns the GPUs of `ranks`, ordered as `checked_ranks`; empty for host windows.

    Raises:
        InvalidArgumentError: a group on GPUs lacks a GPU for a rank, or a UUID is malformed.
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
    """Returns `wait_s`. Raises InvalidArgumentError if it is negative or too long."""
    if not 0 <= wait_s <= limits.MAX_WAIT_S:
        raise InvalidArgumentError(
            f"wait must be 0 to {limits.MAX_WAIT_S:.0f} s, got {wait_s}", argument="wait"
        )
    return wait_s
