"""Says what each mesh axis shards, and reads array shardings from specs and shardings.

Users do not name roles. The ep axes are the group's. An outer axis (one that shards tokens) on a
weight is FSDP: the weight is gathered over it. An axis that shards no tokens is tensor parallelism:
it stays on N', or on the contracted K', where the results are then summed over it.

An op says with `Resolved` what each device runs on its blocks, and with `Sums` what it adds up.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.tracing.varying import Axes

_log = logging.getLogger("ep_runtime")
Entries = tuple[Axes, ...]  # the axes on each dim of an array, major first


@functools.cache
def say_once(text: str) -> None:
    """Logs a text as a warning the first time."""
    _log.warning("%s", text)


@dataclasses.dataclass(frozen=True)
class Roles:
    """Says what each axis of a mesh shards. Hashable.

    Attributes:
        sizes: (axis, size) of every axis that can shard an operand here, mesh order.
        outer: axes that shard tokens but not experts, major first.
        ep: axes that shard experts, major first; they also shard tokens, minor to the outer axes.
        owner: whose axes they are, for messages. Not compared.
        apart: sum over one axis after the other, minor first: the gradient of a weight with unknown
            layout then has the same bits as one that is scattered over some of the axes.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    outer: Axes = ()
    ep: Axes = ()
    owner: str = dataclasses.field(default="the operands", compare=False)
    apart: bool = False

    @functools.cached_property
    def slab(self) -> Axes:
        """Axes on dim 0 of slabs."""
        return self.outer + self.ep

    def size(self, axes: Iterable[str]) -> int:
        sizes = dict(self.sizes)
        return prod(sizes[axis] for axis in axes)

    def real(self, axes: Iterable[str]) -> Axes:
        """Returns the axes along which the mesh has more than one device."""
        sizes = dict(self.sizes)
        return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)

    def without(self, axes: Collection[str]) -> Roles:
        """Returns the roles inside manual `axes`, which no longer shard the operands."""

        def rest(given: Axes) -> Axes:
            return tuple(axis for axis in given if axis not in axes)

        sizes = tuple((axis, size) for axis, size in self.sizes if axis not in axes)
        return dataclasses.replace(self, sizes=sizes, outer=rest(self.outer), ep=rest(self.ep))

    def named(self, axes: Iterable[str]) -> str:
        """Returns the axes with their sizes as a text for messages."""
        sizes = dict(self.sizes)
        return ", ".join(f"{axis}={sizes.get(axis, '?')}" for axis in axes)


def flat(entries: Iterable[Axes]) -> Axes:
    """Returns the axes of all dims in one tuple."""
    return tuple(axis for entry in entries for axis in entry)


def padded(entries: Sequence[Axes], ndim: int) -> Entries:
    """Returns entries with one for every dim of an array."""
    return (*(tuple(entry) for entry in entries[:ndim]), *([()] * (ndim - len(entries))))


def read_off(
    sizes: Iterable[tuple[str, int]],
    slabs: Axes,
    *,
    num_slabs: int,
    num_groups: int,
    num_experts: int,
) -> Roles:
    """Infers roles without a layer, from the axes on dim 0 of the slabs.

    Slab r holds groups from r * num_groups on, modulo num_experts, so the minor axes are ep.

    Args:
        sizes: every axis of the mesh.
        slabs: axes on dim 0 of the rows, major first.
        num_slabs: R.
        num_groups: L, groups of one slab.
        num_experts: E.

    Raises:
        InvalidArgumentError: no split of the axes gives every device its experts.
    """
    found = Roles(tuple(sizes))
    axes = found.real(slabs)
    here = num_slabs // max(found.size(axes), 1)  # slabs on one device
    ranks, rest = divmod(num_experts, max(num_groups, 1))
    for first in range(len(axes) + 1):
        ep = axes[first:]
        whole = here * found.size(ep) == ranks if ep else here % max(ranks, 1) == 0
        if whole and not rest:
            return dataclasses.replace(found, outer=axes[:first], ep=ep)
    raise InvalidArgumentError(
        f"{num_slabs} slabs over the axes {found.named(axes)} do not put the {num_experts} experts "
        f"in groups of {num_groups} on devices; pass layer=",
        argument="lhs",
    )


def entries_of(spec: Any, ndim: int) -> Entries:
    """Returns the entries of a PartitionSpec, for every dim."""
    return padded([entry_axes(entry) for entry in spec or ()], ndim)


def entry_axes(entry: Any) -> Axes:
    """Returns the axis names of one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def known_spec(array: Any) -> PartitionSpec | None:
    """Returns the spec an array is known to have: its type's (Explicit axes), or a concrete
    array's.

    Returns:
        None for a tracer in Auto mode, a NumPy array, or an array on a single device.
    """
    if not isinstance(array, jax.core.Tracer):
        sharding = getattr(array, "sharding", None)
        return sharding.spec if isinstance(sharding, NamedSharding) else None
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", None)
    return spec if spec is not None and any(entry_axes(entry) for entry in spec) else None


def typed(mesh: Any, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns `x` with the type that `spec` gives it on an explicit mesh.

    Leaves an array that already has it: next to Auto axes a reshard also fixes the order of axes.
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
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))


def explicit_axes(mesh: Any) -> frozenset[str]:
    """Returns the Explicit axes of a mesh, which types of arrays name."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def placed(spec: PartitionSpec, axes: Collection[str]) -> list[tuple[str, ...]]:
    """Returns which of `axes` are on each dim, without trailing dims that have none."""
    entries = [tuple(a for a in entry_axes(entry) if a in axes) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return entries


def is_explicit(mesh: Any) -> bool:
    return AxisType.Explicit in tuple(mesh.axis_types)


def explicit_mesh(array: Any) -> Any:
    """Returns the mesh in an array's type if it has Explicit axes, else None."""
    mesh = getattr(getattr(jax.typeof(array), "sharding", None), "mesh", None)
    return mesh if mesh is not None and not mesh.empty and is_explicit(mesh) else None


def as_auto(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names)


def decode(sharding: Any, shape: tuple[int, ...], mesh: Mesh) -> Entries:
    """Returns the mesh axes on each dim of an array, found from the block of each device.

    A dim whose sharding the mesh's axes cannot express counts as replicated.
    """
    if sharding is None or sharding.is_fully_replicated:
        return ((),) * len(shape)
    # Only the order of devices matters, and both lists have the program's order.
    blocks = [
        tuple(part.indices(size)[0] for part, size in zip(index, shape, strict=True))
        for index in sharding.devices_indices_map(shape).values()
    ]
    grid = np.array(blocks).reshape(*mesh.devices.shape, len(shape))
    return tuple(_axes_of_dim(grid[..., dim], shape[dim], mesh) for dim in range(len(shape)))


def _axes_of_dim(starts: Any, size: int, mesh: Mesh) -> Axes:
    """Returns the axes, major first, along which the first row of a dim's block grows."""
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
    """Returns the PartitionSpec of entries, without `manual` axes."""
    return PartitionSpec(*(tuple(a for a in axes if a not in manual) or None for axes in entries))


Sizes = tuple[tuple[str, int], ...]  # (name, size) of mesh axes
Arrived = Sequence[Entries]  # shardings of an op's operands as they arrive
Wanted = Sequence[Entries] | None  # wanted shardings of an op's results, if known
Shapes = Sequence[tuple[int, ...]]  # global shapes of the operands


@dataclasses.dataclass(frozen=True)
class Resolved:
    """An op resolved for one sharding of its operands.

    Attributes:
        operands: entries of each operand inside the op.
        results: entries of each result.
        local: local blocks of the operands -> tuple of local blocks of the results. It calls the
            op's collectives, which name mesh axes.
    """

    operands: tuple[Entries, ...]
    results: tuple[Entries, ...]
    local: Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over mesh axes, as called on one device.

    Attributes:
        roles: the axes' sizes.
        manual: axes of the user's enclosing shard_map, which does its own sums.
    """

    roles: Roles
    manual: Axes = ()

    def free(self, axes: Axes) -> Axes:
        return tuple(axis for axis in self.roles.real(axes) if axis not in self.manual)

    def total(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Sums `x` over `axes`."""
        over = self.free(axes)
        if self.roles.apart:
            for axis in reversed(over):
                x = lax.psum(x, axis)
            return x
        return lax.psum(x, over) if over else x

    def back(self, x: jax.Array, gathered: Entries, summed: Axes) -> jax.Array:
        """Returns this device's shard of a gathered weight's gradient, summed over `summed`.

        Along a gathered axis that does not split rows, all devices have the same gradient. The
        shard is then a slice of this gradient.
        """
        over = set(self.roles.real(summed))
        for dim, axes in enumerate(gathered):
            for on_rows, found in itertools.groupby(axes, over.__contains__):
                run = tuple(found)
                x = (scatter if on_rows else cut)(x, run, dim)
        done = flat(gathered)
        return self.total(x, tuple(axis for axis in summed if axis not in done))


def scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sums `x` over `axes`; this device keeps its part of `dim`.

    Between processes on CPU it makes the whole sum and cuts the part out. Before jaxlib 0.12, the
    reduce-scatter that XLA uses there (gloo's) overwrites values it still sends: rank 0 may get
    wrong values. It is also slower.
    """

    def reduce_scatter(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    # Only processes under jax.distributed use gloo; devices of one process never do.
    if not jax.distributed.is_initialized():
        return reduce_scatter(x)
    return lax.platform_dependent(
        x, cpu=lambda x: cut(lax.psum(x, axes), axes, dim), default=reduce_scatter
    )


def cut(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Cuts this device's part of `dim` out of an array that all devices along `axes` have."""
    size = x.shape[dim] // int(lax.psum(1, axes))
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Joins the parts of `dim` over `axes`; the gradient is `scatter`."""
    return lax.all_gather(x, axes, axis=dim, tiled=True)


gather.defvjp(
    lambda x, axes, dim: (gather(x, axes, dim), None),
    lambda axes, dim, _, grad: (scatter(grad, axes, dim),),
)
