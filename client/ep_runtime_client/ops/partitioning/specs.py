"""Reads PartitionSpecs, meshes, and the shardings in types of arrays."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ep_runtime_client.ops.partitioning.roles import Entries
from ep_runtime_client.ops.tracing.varying import Axes


def entry_axes(entry: Any) -> Axes:
    """The axis names of one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def known_spec(array: Any) -> PartitionSpec | None:
    """The spec an array is known to have: its type's under Explicit axes, a concrete array's own.

    Returns:
        None for a tracer in Auto mode, a NumPy array, or an array on a single device.
    """
    if not isinstance(array, jax.core.Tracer):
        sharding = getattr(array, "sharding", None)
        return sharding.spec if isinstance(sharding, NamedSharding) else None
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", None)
    return spec if spec is not None and any(entry_axes(entry) for entry in spec) else None


def typed(mesh: Any, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`x` with the type that `spec` asks for on an explicit mesh.

    One that has it stays as it is: beside Auto axes a reshard would also fix the order of axes.
    """
    named = explicit_axes(mesh)
    known = getattr(jax.typeof(x), "sharding", None)
    if (
        known is not None
        and not known.mesh.empty
        and placed(known.spec, named) == placed(spec, named)
    ):
        return x
    entries = (tuple(a for a in entry_axes(e) if a in named) or None for e in spec)
    moved: jax.Array = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))
    return moved


def explicit_axes(mesh: Any) -> frozenset[str]:
    """The axes of a mesh that types of arrays name."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def placed(spec: PartitionSpec, axes: Collection[str]) -> list[tuple[str, ...]]:
    """Which of `axes` lie on each dim, without the dims behind the last of them."""
    entries = [tuple(a for a in entry_axes(entry) if a in axes) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return entries


def is_explicit(mesh: Any) -> bool:
    return AxisType.Explicit in tuple(mesh.axis_types)


def as_auto(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names)


def decode(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> Entries:
    """The mesh axes on each dim of an array, read off which block each device has.

    What the mesh's axes cannot express counts as replicated.
    """
    if sharding is None or sharding.is_fully_replicated:
        return ((),) * len(shape)
    # Only the order of devices matters, and both lists are in that of the program.
    blocks = [
        tuple(part.indices(size)[0] for part, size in zip(index, shape, strict=True))
        for index in sharding.devices_indices_map(shape).values()
    ]
    grid = np.array(blocks).reshape(*mesh.devices.shape, len(shape))
    return tuple(_axes_of_dim(grid[..., dim], shape[dim], mesh) for dim in range(len(shape)))


def _axes_of_dim(starts: Any, size: int, mesh: Mesh) -> Axes:
    """Axes, major first, along which the first row of a dim's block grows."""
    strides = {}
    for place, axis in enumerate(mesh.axis_names):
        if mesh.shape[axis] > 1:
            step = np.take(starts, 1, place) - np.take(starts, 0, place)
            strides[axis] = int(step.reshape(-1)[0])
    axes = sorted((a for a, stride in strides.items() if stride), key=lambda a: -strides[a])
    expected, shard = np.zeros(starts.shape, int), size
    for axis in axes:
        shard //= mesh.shape[axis]
        ramp = np.arange(mesh.shape[axis]) * shard
        places = [1] * starts.ndim
        places[mesh.axis_names.index(axis)] = -1
        expected = expected + ramp.reshape(places)
    return tuple(axes) if np.array_equal(expected, starts) else ()


def spec_of(entries: Entries, manual: Axes = ()) -> PartitionSpec:
    """The PartitionSpec of entries, without `manual` axes."""
    return PartitionSpec(*(tuple(a for a in axes if a not in manual) or None for axes in entries))
