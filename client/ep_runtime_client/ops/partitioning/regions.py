"""Decides how a matmul op runs: the mesh, the roles of its axes, and the partitioning mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.partitioning.roles import (
    Entries,
    Roles,
    Sizes,
    entries_of,
    explicit_axes,
    explicit_mesh,
    is_explicit,
    known_spec,
    spec_of,
)
from ep_runtime_client.ops.tracing.ambient import manual_axes, open_layer
from ep_runtime_client.ops.tracing.batching import NO_LAYER, RULED, batched_p
from ep_runtime_client.ops.tracing.scopes import label
from ep_runtime_client.ops.tracing.varying import Axes, spread_over, varied_axes


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """The mesh, roles of axes and mode with which an op runs. Hashable: part of a static argument.

    Attributes:
        mode: "local" (operands are already this device's blocks), "shard_map" or "rule".
        roles: what the mesh's axes shard; None if only the partitioner will know.
        mesh: of the shard_map or the rule; None stands for the ambient mesh.
        manual: axes of `roles` that are manual in an enclosing shard_map.
        varying: axes that operands vary over, if an enclosing shard_map tracks it.
        ruled: whether the layer's group has partitioning="rule", which allows no other mode.
        label: the layer's name as part of a scope; not compared, so equal layers are traced once.
        identity: fingerprint of every setting of the layer that the program depends on.
        tokens: axes on the leading dims of tokens, for an op on tokens as users shard them.
    """

    mode: str
    roles: Roles | None = None
    mesh: Mesh | AbstractMesh | None = None
    manual: Axes = ()
    varying: Axes = ()
    ruled: bool = False
    label: str = dataclasses.field(default="-", compare=False)
    identity: int = 0
    tokens: tuple[Axes, ...] = ()

    def unbatched(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Returns `operands`, unless a vmap batches any of them.

        A vmap may batch operands over mesh axes outside the layer's group.

        Raises:
            NotImplementedError: the vmap is not supported; the text has the reason.
        """
        free: tuple[tuple[str, int], ...] = ()
        if self.roles is not None and self.mode != "local":
            taken = {*self.roles.slab, *self.manual}
            free = tuple((axis, size) for axis, size in self.roles.sizes if axis not in taken)
        never = RULED if self.ruled else NO_LAYER if self.roles is None else ""
        return tuple(batched_p.bind(*operands, free=free, never=never))


def known_entries(array: Any, ndim: int) -> Entries | None:
    """Returns entries of an array with a known layout; None for a tracer in Auto mode.

    A concrete array on one device counts as replicated.
    """
    spec = known_spec(array)
    if spec is None:
        return None if isinstance(array, jax.core.Tracer) else entries_of(None, ndim)
    return entries_of(spec, ndim)


def of_call(
    layer: EpLayer | TracedLayer | None,
    operands: Sequence[Any],
    *,
    known: bool,
    slabs: bool = False,
    rhs_spec: PartitionSpec | None = None,
) -> Partitioning:
    """Decides how an op runs.

    Args:
        layer: its layer, or None.
        operands: arrays of the call.
        known: whether the layout of its weight is known, or of its slabs if it has no weight.
        slabs: whether the op has no weight: token axes shard only dim 0 of slabs.
        rhs_spec: sharding of the weight, if the caller gave it; only read without a layer.
    """
    if layer is None:
        return _of_operands(operands, rhs_spec)
    static, _, mesh = open_layer(layer)
    return of_opened(static, mesh, operands, known=known, slabs=slabs)


def of_opened(
    static: EpLayer, mesh: Mesh, operands: Sequence[Any], *, known: bool, slabs: bool = False
) -> Partitioning:
    """Like `of_call`, for a layer that is already open."""
    group = static.group_spec
    manual = manual_axes(group)
    owner = f"layer {static.name!r}"
    roles = Roles(group.mesh_axes, group.outer_axes, group.ep_axis, owner)
    real = roles.real(axis for axis, _ in group.mesh_axes)
    varying: Axes = ()
    if manual:
        local = {*real, *group.token_axes} <= {*manual}
        mode = "local" if local else "shard_map"
        varying = varied_over(group, manual, operands)
    elif explicit(operands) or group.partitioning == "shard_map":
        mode = "shard_map"
    elif group.partitioning == "rule":
        mode = "rule"
    else:
        # Only the partitioner knows the layout of a traced weight.
        open_axes = {*real} - {*(group.token_axes if slabs else ())}
        mode = "rule" if open_axes and not known else "shard_map"
    ruled = group.partitioning == "rule"
    return Partitioning(
        mode, roles, mesh, manual, varying, ruled, label(static), static.fingerprint
    )


def varied_over(group: GroupSpec, manual: Axes, operands: Sequence[Any]) -> Axes:
    """Returns the manual axes that operands and results of an op vary over: the tokens' axes, and
    all axes that an operand varies over."""
    return tuple(sorted(varied_axes(*operands) | {a for a in manual if a in group.token_axes}))


def check_slabs(where: Partitioning, name: str, num_slabs: int) -> None:
    """Raises InvalidArgumentError unless every shard of a layer's tokens has exactly one slab.

    The position of a slab decides which experts its groups belong to: with more slabs group l of
    slab r would not be expert (r * L + l) % E.
    """
    assert where.roles is not None
    free = where.roles.without(where.manual)
    if num_slabs != free.size(free.slab):
        raise InvalidArgumentError(
            f"{name} has {num_slabs} slabs for the {free.size(free.slab)} shards of the token axes "
            f"{free.named(free.slab) or 'none'} of {free.owner}: there is one slab for each",
            argument=name,
        )


def _of_operands(operands: Sequence[Any], rhs_spec: PartitionSpec | None) -> Partitioning:
    """Decides how an op without a layer runs. Unless the mode is local, roles are found later."""
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.manual_axes:
        manual = tuple(axis for axis in ambient.axis_names if axis in ambient.manual_axes)
        sizes = tuple((axis, int(ambient.shape[axis])) for axis in manual)
        entries = entries_of(rhs_spec, len(rhs_spec) if rhs_spec is not None else 0)
        outer = tuple(axis for axis in manual if any(axis in entry for entry in entries))
        varying = tuple(sorted(varied_axes(*operands)))
        return Partitioning("local", Roles(sizes, outer), None, manual, varying)
    mesh = mesh_of(operands)
    if mesh is not None:
        return Partitioning("shard_map", Roles(sizes_of(mesh)), mesh)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands)):
        return Partitioning("rule")
    return Partitioning("local", Roles())


def mesh_of(operands: Sequence[Any]) -> Mesh | AbstractMesh | None:
    """Returns the mesh of more than one device on which operands are known to be.

    Raises:
        InvalidArgumentError: operands are on different meshes.
    """
    found: list[Any] = []
    for x in jax.tree.leaves(operands):
        if isinstance(x, jax.core.Tracer):
            mesh = explicit_mesh(x)
            if mesh is None:
                continue
        else:
            sharding = getattr(x, "sharding", None)
            if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
                continue
            mesh = sharding.mesh
        if mesh not in found:
            found.append(mesh)
    if len({(mesh.axis_names, mesh.axis_sizes) for mesh in found}) > 1:
        raise InvalidArgumentError(
            f"operands must be on one mesh, got {[dict(mesh.shape) for mesh in found]}",
            argument="mesh",
        )
    return found[0] if found else None


def sizes_of(mesh: Mesh | AbstractMesh) -> Sizes:
    """Returns (name, size) of every axis of a mesh."""
    return tuple((str(axis), int(mesh.shape[axis])) for axis in mesh.axis_names)


def explicit(operands: Sequence[Any]) -> bool:
    """Whether the types of operands, or of all arrays here, carry shardings."""
    here = is_explicit(jax.sharding.get_abstract_mesh())
    return here or any(explicit_mesh(x) is not None for x in jax.tree.leaves(operands))


def type_of(x: Any) -> Entries | None:
    """Returns the entries in the type of an array; None if types have no shardings."""
    if x is None or explicit_mesh(x) is None:
        return None
    kind = jax.typeof(x)
    return entries_of(kind.sharding.spec, kind.ndim)


def whole_shape(where: Partitioning, shape: tuple[int, ...], entries: Entries) -> tuple[int, ...]:
    """Returns the global shape of an operand that is local along the manual axes."""
    if not where.manual:
        return shape
    roles = where.roles or Roles()
    taken = (roles.size(axis for axis in axes if axis in where.manual) for axes in entries)
    return tuple(size * count for size, count in zip_longest(shape, taken, fillvalue=1))


def settle(where: Partitioning, x: Any, entries: Entries) -> Any:
    """Types and places `x` (an array, a QuantizedTensor, or None) for an op.

    Values vary over the same axes as the op's results: the transpose of this cast sums the gradient
    of an operand that was replicated. A concrete array committed to fewer devices is moved.
    """

    def one(leaf: jax.Array) -> jax.Array:
        leaf = spread_over(jnp.asarray(leaf), where.varying)
        if where.manual or isinstance(leaf, jax.core.Tracer) or not isinstance(where.mesh, Mesh):
            return leaf
        if not leaf.committed or leaf.sharding.device_set == set(where.mesh.devices.flat):
            return leaf
        sharding = NamedSharding(where.mesh, spec_of(entries[: leaf.ndim]))
        return jax.device_put(leaf, sharding)

    return jax.tree.map(one, x)


def typed_tree(tree: Any, types: Sequence[Entries | None]) -> Any:
    """Calls `typed_as` for the arrays of a tree, each with its own entries."""
    leaves, structure = jax.tree.flatten(tree)
    typed = [typed_as(*each) for each in zip(leaves, types, strict=True)]
    return jax.tree.unflatten(structure, typed)


def typed_as(x: jax.Array | None, entries: Entries | None) -> jax.Array | None:
    """Puts the sharding of `entries` into the type of `x`, if types have shardings."""
    mesh = None if x is None else jax.typeof(x).sharding.mesh
    if entries is None or mesh is None or mesh.empty:
        return x
    others = tuple({*mesh.axis_names} - explicit_axes(mesh))
    return jax.sharding.reshard(x, NamedSharding(mesh, spec_of(entries, others)))
