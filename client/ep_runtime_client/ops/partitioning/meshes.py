"""Meshes whose axes the types of arrays name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ep_runtime_client.ops.partitioning.specs import entry_axes


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
