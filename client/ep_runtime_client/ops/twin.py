"""The shard_map that an op writes around its per-device function.

Users never write it: the mesh and the specs come from the layer. Inside a shard_map of the user
that is manual over every axis of the group, the per-device function is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.calls import Call, varying
from ep_runtime_client.ops.token_layout import known_spec, say_reshard


def slab_spec(call: Call) -> PartitionSpec:
    """Spec of an array with the slab dim R in front."""
    return PartitionSpec(call.group.token_axes)


def per_device(
    call: Call,
    body: Callable[..., Any],
    operands: Sequence[jax.Array],
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
) -> Any:
    """Runs `body` once per device on the local blocks of `operands`.

    Args:
        call: gives the mesh, and whether the operands are local already.
        body: takes as many arrays as there are operands; collectives over mesh axes work in it.
        operands: global arrays, or local blocks inside a manual shard_map.
        in_specs: one per operand.
        out_specs: a prefix of what `body` returns.

    Returns:
        What `body` returns, as global arrays (or local ones).
    """
    operands = [refuse_vmap(x) for x in operands]
    if call.manual:
        return jax.tree.map(varying, body(*(varying(x) for x in operands)))
    mesh = _mesh_of(call, operands)
    if mesh is not None and _is_explicit(mesh):
        operands = [
            jax.sharding.reshard(x, NamedSharding(mesh, spec))
            for x, spec in zip(operands, in_specs, strict=True)
        ]
    ambient = jax.sharding.get_abstract_mesh()
    mapped = jax.shard_map(
        body,
        mesh=mesh if ambient.empty else None,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
    return mapped(*operands)


def run(
    function: Callable[..., Any],
    call: Hashable,
    *operands: Any,
    traced: Callable[..., Any] | None = None,
) -> Any:
    """`function(call, *operands)`, compiled when every operand is concrete.

    `traced` is what to call instead under a trace: the same with a gradient of its own.
    """
    leaves = jax.tree.leaves(operands)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return (traced or function)(call, *operands)
    return _compiled(function, call, *operands)


def _call_function(function: Callable[..., Any], call: Hashable, *operands: Any) -> Any:
    return function(call, *operands)


_compiled = jax.jit(_call_function, static_argnums=(0, 1))


def place(call: Call, name: str, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`array` moved to `spec` where it is known to lie elsewhere; said once with both specs.

    A tracer in Auto mode is left to the partitioner, which reshards it at the op.
    """
    if call.manual:
        return array
    known = known_spec(array)
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
    """Whether two specs agree once axes of size 1 and trailing Nones are left out."""
    sizes = call.group.axis_sizes

    def canonical(spec: PartitionSpec) -> list[tuple[str, ...]]:
        entries = [
            tuple(a for a in ((e,) if isinstance(e, str) else (e or ())) if sizes.get(a, 2) > 1)
            for e in spec
        ]
        while entries and not entries[-1]:
            entries.pop()
        return entries

    return canonical(known) == canonical(wanted)


def _is_explicit(mesh: Any) -> bool:
    return AxisType.Explicit in tuple(mesh.axis_types)


def _mesh_of(call: Call, operands: Sequence[jax.Array]) -> Any:
    """The mesh of the shard_map: the ambient one, the operands' explicit one, or the layer's.

    Raises:
        InvalidArgumentError: the ambient mesh is not the layer's.
    """
    ambient = jax.sharding.get_abstract_mesh()
    wanted = dict(call.group.mesh_axes)
    if not ambient.empty:
        if dict(ambient.shape) != wanted:
            raise InvalidArgumentError(
                f"layer {call.layer.name!r} is used under a mesh with the axes "
                f"{dict(ambient.shape)}, its group {call.group.name!r} has {wanted}",
                argument="mesh",
            )
        return ambient
    for x in operands:
        mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and _is_explicit(mesh):
            return mesh
    return _auto(call.mesh) if _is_explicit(call.mesh) else call.mesh


def _auto(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names)


def vary(call: Call, x: jax.Array) -> jax.Array:
    """`x` typed as varying over every axis inside a manual region of the user.

    The transpose of this cast sums the gradient of an operand that was replicated, so it comes
    before the op and not inside it.
    """
    return varying(x) if call.manual else x


@custom_vmap
def _not_batched(x: jax.Array) -> jax.Array:
    return x


@_not_batched.def_vmap
def _refuse(axis_size: int, in_batched: Any, x: jax.Array) -> Any:
    raise NotImplementedError(
        "ep ops cannot run under vmap: one call moves the tokens of all ranks at once, and its "
        "buffers have one capacity. Put the batch into the token dims ([B, S, H]) instead."
    )


def refuse_vmap(x: jax.Array) -> jax.Array:
    """`x`, with a NotImplementedError that gives the reason should it be batched by vmap."""
    result: jax.Array = _not_batched(x)
    return result
