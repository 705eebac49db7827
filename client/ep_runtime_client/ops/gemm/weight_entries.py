"""Finds the sharding of the experts' weight: from the array, from a spec, or in a shard_map."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.partitioning import regions
from ep_runtime_client.ops.partitioning.roles import Entries, entries_of
from ep_runtime_client.ops.quantize.packing import Kernel
from ep_runtime_client.ops.quantize.pair import Pair, of_both
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.tracing.varying import Axes


def known(rhs: Kernel, spec: PartitionSpec | None = None) -> Entries | None:
    """Returns a weight's entries, from its rhs_spec or its sharding; None if unknown.

    Entries of a pair are per dim of [E, K', 2, M].

    Raises:
        InvalidArgumentError: gate and up of a pair are sharded in two ways.
    """
    if spec is not None:
        return told(rhs, spec)
    if not isinstance(rhs, Pair):
        return regions.known_entries(values_of(rhs), rhs.ndim)
    each = of_alike([rhs.gate, rhs.up], "rhs")
    return None if each is None else of_both(each, ())


def of_alike(arrays: Sequence[jax.Array], name: str) -> Entries | None:
    """Returns the entries that one or two arrays share; None if unknown.

    Raises:
        InvalidArgumentError: the entries of the two arrays differ.
    """
    found = [regions.known_entries(x, x.ndim) for x in arrays]
    if None not in found and found[0] != found[-1]:
        raise InvalidArgumentError(
            f"gate and up of a pair must be sharded alike, got {found[0]} and {found[-1]}",
            argument=name,
        )
    return None if None in found else found[0]


def told(rhs: Kernel, spec: PartitionSpec | None) -> Entries:
    """Returns a weight's entries from its rhs_spec; the spec of a pair describes each half."""
    if isinstance(rhs, Pair):
        return of_both(entries_of(spec, rhs.ndim - 1), ())
    return entries_of(spec, rhs.ndim)


def outside_shape(
    rhs: Kernel, spec: PartitionSpec | None, over: Axes | None = None
) -> tuple[int, ...]:
    """Returns the shape of a weight outside a shard_map that is manual over axes of its rhs_spec.

    The expert dim keeps its local size. Axes outside `over`, if given, are not counted either.
    """
    ambient = jax.sharding.get_abstract_mesh()
    manual = [axis for axis in ambient.manual_axes if over is None or axis in over]
    shape = list(rhs.shape)
    if not manual:
        return tuple(shape)
    for dim, axes in enumerate(told(rhs, spec)):
        shape[dim] *= prod(ambient.shape[axis] for axis in axes if axis in manual) if dim else 1
    return tuple(shape)


def with_manual_experts(where: regions.Partitioning, entries: Entries) -> Entries:
    """Returns entries of a weight whose expert dim is already local to the manual ep axes."""
    ep = () if where.roles is None else where.roles.ep
    missing = tuple(axis for axis in ep if axis in where.manual and axis not in entries[0])
    return (missing + entries[0], *entries[1:])


def values_of(x: Kernel) -> Any:
    """Returns the array that has the shape and sharding of a weight or of rows."""
    return x.data if isinstance(x, QuantizedTensor) else x
