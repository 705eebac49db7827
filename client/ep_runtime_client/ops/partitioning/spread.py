"""Runs a matmul op: as it is on local blocks, in a shard_map of its own, or by its rule.

The shard_map is the twin of the rule: both ask the op's placement and run its one per-device
function, so they give the same bits. It serves where the layouts of operands are known, and
everywhere inside a shard_map of the user.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.partitioning import rule
from ep_runtime_client.ops.partitioning.meshes import explicit_axes, typed
from ep_runtime_client.ops.partitioning.regions import Where
from ep_runtime_client.ops.partitioning.roles import Entries, Roles, say_once
from ep_runtime_client.ops.partitioning.rule import Op
from ep_runtime_client.ops.tracing.batching import batched_over, one_each
from ep_runtime_client.ops.tracing.varying import Axes, spread_over


def run(op: Op, arrived: Sequence[Entries], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The op's results.

    Args:
        op: what is computed, and where.
        arrived: entries of the operands where they are known; the rule finds them itself.
        operands: global but for manual axes.
    """
    where = op.where
    operands = batched_over(where.outside, *operands, never=where.never_batched)
    with jax.named_scope(f"ep_{op.name}/{where.label}"):
        if where.mode == "rule":
            return rule.run(op, functools.partial(_run_unasked, op, arrived), *operands)
        return _run_known(op, where.roles, arrived, operands)


def _run_unasked(
    op: Op, arrived: Sequence[Entries], *operands: jax.Array, vmapped: Axes = ()
) -> tuple[jax.Array, ...]:
    """What stands for the rule in an exported program, and under a vmap over the axes `vmapped`:
    nothing tells how operands lie.

    Raises:
        InvalidArgumentError: there is no layer either, which would say on which mesh.
    """
    roles = op.where.roles
    if roles is None:
        raise InvalidArgumentError(
            f"{op.name} needs a mesh to be exported for several devices, got no layer; pass "
            "layer=, call it inside a shard_map, or use Explicit axes",
            argument="layer",
        )
    if any(axis not in roles.ep + vmapped for axis, size in roles.sizes if size > 1):
        who = f"a vmap over {', '.join(vmapped)}" if vmapped else "an exported program"
        say_once(
            f"{who} takes weights of {roles.owner} whole but for "
            f"{roles.named(roles.ep)}: it cannot ask how they lie over the other axes; rhs_spec=, "
            "params_spec= or Explicit axes say it"
        )
    return _run_known(op, dataclasses.replace(roles, apart=True), arrived, operands)


def _run_known(
    op: Op, roles: Roles | None, arrived: Sequence[Entries], operands: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    where = op.where
    assert roles is not None, "a known layout comes with the roles of its axes"
    shapes = [
        whole_shape(where, x.shape, entries) for x, entries in zip(operands, arrived, strict=True)
    ]
    resolved = op.resolve(roles, arrived, shapes, None)
    operands = [spread_over(x, where.varying) for x in operands]
    if where.mode == "local":
        return tuple(spread_over(x, where.varying) for x in resolved.local(*operands))
    in_specs = [_spec(entries, where.manual) for entries in resolved.operands]
    mesh = mesh_here(where, operands)
    if AxisType.Explicit in tuple(mesh.axis_types):
        operands = [typed(mesh, *each) for each in zip(operands, in_specs, strict=True)]
    mapped = jax.shard_map(
        one_each(resolved.local),
        mesh=mesh if jax.sharding.get_abstract_mesh().empty else None,
        axis_names={axis for axis in mesh.axis_names if axis not in where.manual},
        in_specs=tuple(in_specs),
        out_specs=tuple(_spec(entries, where.manual) for entries in resolved.results),
        check_vma=False,
    )
    return tuple(spread_over(x, where.varying) for x in mapped(*operands))


def whole_shape(where: Where, shape: tuple[int, ...], entries: Entries) -> tuple[int, ...]:
    """The shape that an operand has without the manual axes around."""
    roles = where.roles or Roles()
    return tuple(
        size * roles.size(axis for axis in axes if axis in where.manual)
        for size, axes in zip(shape, entries, strict=True)
    )


def _spec(entries: Entries, manual: Axes) -> PartitionSpec:
    free = (tuple(axis for axis in axes if axis not in manual) for axes in entries)
    return PartitionSpec(*(axes or None for axes in free))


def mesh_here(where: Where, operands: Sequence[Any]) -> Any:
    """The mesh of a shard_map: the one around, the operands' explicit one, or the layer's.

    Raises:
        InvalidArgumentError: the one around has other axes.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty:
        roles = where.roles
        if roles is not None and dict(ambient.shape) != dict(roles.sizes):
            raise InvalidArgumentError(
                f"an op of {roles.owner} is used under a mesh with the axes "
                f"{dict(ambient.shape)}, its own has {dict(roles.sizes)}",
                argument="mesh",
            )
        return ambient
    for x in operands:
        mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and AxisType.Explicit in tuple(mesh.axis_types):
            return mesh
    own = where.mesh
    if isinstance(own, Mesh) and AxisType.Explicit in tuple(own.axis_types):
        return Mesh(own.devices, own.axis_names)
    return own


def settle(where: Where, x: Any, entries: Entries) -> Any:
    """`x` (an array, a QuantizedTensor, or None) typed and placed for an op.

    Values vary over what the op's results do: the transpose of this cast sums the gradient of an
    operand that was replicated. A concrete array that is committed to fewer devices is moved.
    """

    def one(leaf: jax.Array) -> jax.Array:
        leaf = spread_over(jnp.asarray(leaf), where.varying)
        if where.manual or isinstance(leaf, jax.core.Tracer) or not isinstance(where.mesh, Mesh):
            return leaf
        if not leaf.committed or leaf.sharding.device_set == set(where.mesh.devices.flat):
            return leaf
        sharding = NamedSharding(where.mesh, _spec(entries[: leaf.ndim], ()))
        moved: jax.Array = jax.device_put(leaf, sharding)
        return moved

    return jax.tree.map(one, x)


def typed_as(x: jax.Array | None, entries: Entries | None) -> jax.Array | None:
    """`x` with the layout in its type, where types say layouts and `entries` gives one."""
    mesh = None if x is None else jax.typeof(x).sharding.mesh
    if entries is None or mesh is None or mesh.empty:
        return x
    explicit = explicit_axes(mesh)
    kept = (tuple(axis for axis in axes if axis in explicit) or None for axes in entries)
    typed: jax.Array = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))
    return typed
