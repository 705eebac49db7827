"""The shard_map that an op writes around its per-device function.

Users never write it: the mesh and the specs come from the layer. Inside a shard_map of the user
it is nested, over exactly the axes that are not manual yet; where none is missing, the per-device
function is called as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.token_layout import say_reshard
from ep_runtime_client.ops.movement import rule
from ep_runtime_client.ops.partitioning.meshes import (
    as_auto,
    explicit_axes,
    is_explicit,
    placed,
    typed,
)
from ep_runtime_client.ops.partitioning.specs import entry_axes, known_spec
from ep_runtime_client.ops.tracing.ambient import check_ambient, check_devices
from ep_runtime_client.ops.tracing.batching import RULED, batched_over, one_each
from ep_runtime_client.ops.tracing.varying import spread_over, varied_axes


def slab_spec(call: Call) -> PartitionSpec:
    """Spec of an array with the slab dim R in front."""
    return PartitionSpec(call.slab_axes)


def run(
    call: Call,
    op: str,
    body: Callable[..., Any],
    operands: Sequence[jax.Array],
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
    variant: str = "",
) -> Any:
    """Runs `body` once per device on the local blocks of `operands`.

    Args:
        call: gives the mesh, and whether the operands are local already.
        op: its name in scopes.
        body: takes as many arrays as there are operands; collectives over mesh axes work in it.
        operands: arrays that are global but for the manual axes.
        in_specs: one per operand, without manual axes.
        out_specs: a prefix of what `body` returns.
        variant: what `body` depends on beside the call and the operands' types.

    Returns:
        What `body` returns, spread like the operands.
    """
    operands = batched_over(_outside(call), *operands, never=_never(call))
    cast = functools.partial(vary, call)
    if call.is_local:
        return jax.tree.map(cast, body(*map(cast, operands)))
    mesh = _mesh_of(call, operands)
    if is_explicit(mesh):
        operands = [typed(mesh, *each) for each in zip(operands, in_specs, strict=True)]
    ambient = jax.sharding.get_abstract_mesh()
    mapped = jax.shard_map(
        one_each(body),
        mesh=mesh if ambient.empty else None,
        axis_names=set(call.free_axes),
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
    if rule.serves(call, mesh):
        return rule.per_device(call, op, body, mapped, operands, in_specs, out_specs, variant)
    # A shard_map that checks nothing forgets over which of the user's axes its results vary.
    return jax.tree.map(cast, mapped(*operands))


def place(call: Call, name: str, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`array` moved to `spec` where it is known to lie elsewhere; said once with both specs.

    A tracer in Auto mode is left to the partitioner, which reshards it at the op.
    """
    if call.manual:
        return array
    check_devices(call.group, call.mesh, name, array)
    known = known_spec(array)
    if isinstance(array, jax.core.Tracer) and known is not None:
        named = explicit_axes(jax.typeof(array).sharding.mesh)
        spec = PartitionSpec(*(tuple(a for a in entry_axes(e) if a in named) for e in spec))
    if known is not None and not _same(known, spec, call):
        say_reshard(name, call.layer.name, str(known), str(spec))
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return array
    devices = set(call.mesh.devices.flat)
    if array.sharding.device_set == devices or not array.committed:
        return array
    moved: jax.Array = jax.device_put(array, NamedSharding(call.mesh, spec))
    return moved


def _same(known: PartitionSpec, wanted: PartitionSpec, call: Call) -> bool:
    """Whether two specs agree on every axis that divides anything."""
    sizes = call.group.axis_sizes
    named = {axis for spec in (known, wanted) for entry in spec for axis in entry_axes(entry)}
    axes = {axis for axis in named if sizes.get(axis, 2) > 1}
    return placed(known, axes) == placed(wanted, axes)


def _mesh_of(call: Call, operands: Sequence[jax.Array]) -> Any:
    """The mesh of the shard_map: the ambient one, the operands' explicit one, or the layer's.

    Raises:
        InvalidArgumentError: the ambient mesh is not the layer's.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty:
        check_ambient(call.group, ambient.shape)
        return ambient
    for x in operands:
        mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and is_explicit(mesh):
            return mesh
    return as_auto(call.mesh) if is_explicit(call.mesh) else call.mesh


def varied(call: Call, *operands: Any) -> Call:
    """`call` with the manual axes that its operands and results vary over.

    They are those of the tokens, and whatever else an operand varies over.
    """
    if not call.manual:
        return call
    axes = varied_axes(*operands) | {a for a in call.manual if a in call.group.token_axes}
    return dataclasses.replace(call, varying=tuple(sorted(axes)))


def _outside(call: Call) -> tuple[tuple[str, int], ...]:
    """(axis, size) of the mesh axes over which a vmap may batch the call: each of their places is
    an EP group of its own."""
    if call.is_local:
        return ()
    taken = {*call.group.token_axes, *call.manual}
    return tuple((axis, size) for axis, size in call.group.mesh_axes if axis not in taken)


def _never(call: Call) -> str:
    """Why no vmap batches the call at all."""
    return RULED if call.group.partitioning == "rule" else ""


def vary(call: Call, x: jax.Array) -> jax.Array:
    """`x` typed as varying over the call's axes.

    The transpose of this cast sums the gradient of an operand that was replicated, so it comes
    before the op and not inside it.
    """
    return spread_over(x, call.varying)
