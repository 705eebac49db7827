"""The other partitioning of an op: custom_partitioning with a Shardy rule.

The layout of a weight under plain jit is known to the partitioner alone. The op tells it by a
rule which dims go together; when it partitions, it calls back, and the callback, like the
shard_map of `spread`, asks the op's own placement how operands are taken and runs the same
per-device function, collectives included.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import ep_runtime
from ep_runtime import specs
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.partitioning import partitioned
from ep_runtime_client.ops.partitioning.regions import Where
from ep_runtime_client.ops.partitioning.resolved import Resolved
from ep_runtime_client.ops.partitioning.roles import Entries, Roles, entries_of
from ep_runtime_client.ops.tracing.varying import Axes

# Factors of dims that lie alike in every op of a layer: that of slabs, and what is inside one.
SLABS, ROWS = "r", ("c", "c32", "l")


class Op(Protocol):
    """A matmul op on flat arrays. Hashable: the static argument of everything here."""

    @property
    def where(self) -> Where: ...

    @property
    def name(self) -> str:
        """Of the scope in compiled programs."""

    def roles(
        self, sizes: tuple[tuple[str, int], ...], arrived: Sequence[Entries], shapes: Any
    ) -> Roles:
        """What the axes of a mesh are for, where no layer says it."""

    def resolve(
        self,
        roles: Roles,
        arrived: Sequence[Entries],
        shapes: Sequence[tuple[int, ...]],
        wanted: Sequence[Entries] | None,
    ) -> Resolved:
        """Placement and per-device function for operands that arrive like this."""

    def factors(self) -> tuple[list[str], list[str]]:
        """Shardy factors of operands and of results; equal ones are sharded alike."""


def run(op: Op, mapped: Callable[..., Any], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The op's results; how operands lie decides the partitioner. `mapped` is for exports."""
    given, made = op.factors()
    pinned = _pinned(op, given, operands)
    results = partitioned.run(functools.partial(_rule, op), mapped, _identity(op), *pinned)
    return tuple(_pinned(op, made, results))


def _pinned(op: Op, factors: Sequence[str], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Slabs held to their layout, whose place on the mesh the layer says; other dims as they are.

    So no weight's fsdp axis reaches rows, also where nobody reads the rows that come out.
    """
    roles, mesh = op.where.roles, op.where.mesh
    if roles is None or not isinstance(mesh, Mesh):
        return list(arrays)
    slab, free = roles.slab or None, PartitionSpec.UNCONSTRAINED
    auto = Mesh(mesh.devices, mesh.axis_names)

    def pin(x: jax.Array, names: str) -> jax.Array:
        first, *rest = names.split()
        if first != SLABS:
            return x
        spec = PartitionSpec(slab, *(None if name in ROWS else free for name in rest))
        pinned: jax.Array = lax.with_sharding_constraint(x, NamedSharding(auto, spec))
        return pinned

    return [pin(*each) for each in zip(arrays, factors, strict=True)]


def _identity(op: Op) -> int:
    settings: Any = op
    parts = [
        f"{field.name}={getattr(op, field.name)!r}"
        for field in dataclasses.fields(settings)
        if field.name != "where"  # its mesh names devices
    ]
    named = (ep_runtime.__version__, type(op).__name__, op.where.named_in_programs())
    return specs.stable_id("rule", *named, *parts)


def _whole(op: Op, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The op where there is one device, and the shapes of its results everywhere."""
    shapes = [x.shape for x in operands]
    nothing = [entries_of(None, len(shape)) for shape in shapes]
    local = op.resolve(Roles(), nothing, shapes, None).local
    results: tuple[jax.Array, ...] = local(*operands)
    return results


def _shardy_rule(op: Op, mesh: Any, operands: Any, results: Any) -> str:
    given, made = op.factors()
    return ", ".join(given) + " -> " + ", ".join(made)


def _partition(op: Op, mesh: Mesh, operands: Any, results: Any) -> Any:
    """custom_partitioning's callback."""
    mesh = _mesh(op, mesh)
    arrived = [_entries(each, mesh) for each in operands]
    wanted = [_entries(each, mesh) for each in results]
    shapes = [tuple(each.shape) for each in operands]
    try:
        roles = op.where.roles
        if roles is None:
            sizes = tuple((str(axis), int(mesh.shape[axis])) for axis in mesh.axis_names)
            roles = op.roles(sizes, arrived, shapes)
        resolved = op.resolve(roles, arrived, shapes, wanted)
    except InvalidArgumentError as error:
        # XLA wraps what a callback raises; this text is found in it by ep.error_of.
        fields = json.dumps(error.fields)
        raise ValueError(f"EP_RUNTIME/InvalidArgumentError: {error} {fields}") from error

    def lower(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        # JAX 0.12 traces this under the ambient mesh, whose Explicit axes do not belong here.
        with (
            jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
            jax.named_scope(f"ep_{op.name}/{op.where.label}"),
        ):
            return tuple(resolved.local(*blocks))

    return (
        mesh,
        lower,
        tuple(_sharding(mesh, entries) for entries in resolved.results),
        tuple(_sharding(mesh, entries) for entries in resolved.operands),
    )


def _mesh(op: Op, mesh: Mesh) -> Mesh:
    """The layer's mesh, else the one that the partitioner found; never with Explicit axes."""
    own = op.where.mesh
    found = own if isinstance(own, Mesh) else mesh
    if found.empty:
        raise ValueError(
            "EP_RUNTIME/InvalidArgumentError: no mesh is known for an op without a layer: pass "
            "layer=, or give its operands a NamedSharding {}"
        )
    return Mesh(found.devices, found.axis_names)


def _sharding(mesh: Mesh, entries: Entries) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in entries)))


def _entries(array: Any, mesh: Mesh) -> Entries:
    """How an operand arrives, in terms of the mesh's axes."""
    sharding, ndim = array.sharding, len(array.shape)
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == mesh.axis_names:
        return entries_of(sharding.spec, ndim)
    return decode(sharding, tuple(array.shape), mesh)


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


_rule = custom_partitioning(_whole, static_argnums=(0,))
_rule.def_partition(_partition, sharding_rule=_shardy_rule)
