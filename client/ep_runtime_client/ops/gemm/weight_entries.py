"""How the weight of experts lies on the mesh, by itself, by what is told, and in a shard_map."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.partitioning import regions
from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.partitioning.roles import Entries, entries_of
from ep_runtime_client.ops.quantize.packing import Kernel
from ep_runtime_client.ops.quantize.pair import Pair, of_both
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor


def known(rhs: Kernel) -> Entries | None:
    """Entries of a weight where they are known; those of a pair per dim of [E, K', 2, M].

    Raises:
        InvalidArgumentError: gate and up of a pair lie on the mesh in two ways.
    """
    if not isinstance(rhs, Pair):
        return regions.known_entries(values_of(rhs), rhs.ndim)
    gate, up = (regions.known_entries(each, rhs.ndim - 1) for each in (rhs.gate, rhs.up))
    if gate is None or up is None:
        return None
    if gate != up:
        raise InvalidArgumentError(
            f"gate and up of a pair must be sharded alike, got {gate} and {up}", argument="rhs"
        )
    return of_both(gate, ())


def told(rhs: Kernel, spec: PartitionSpec | None) -> Entries:
    """Entries of a weight by its rhs_spec; that of a pair is of each."""
    if isinstance(rhs, Pair):
        return of_both(entries_of(spec, rhs.ndim - 1), ())
    return entries_of(spec, rhs.ndim)


def with_manual_experts(where: Partitioning, entries: Entries) -> Entries:
    """Entries of a weight whose expert dim is local to the manual ep axes already."""
    ep = () if where.roles is None else where.roles.ep
    missing = tuple(axis for axis in ep if axis in where.manual and axis not in entries[0])
    return (missing + entries[0], *entries[1:])


def values_of(x: Kernel) -> Any:
    """The array of a weight or of rows that has their shape and layout."""
    return x.data if isinstance(x, QuantizedTensor) else x
