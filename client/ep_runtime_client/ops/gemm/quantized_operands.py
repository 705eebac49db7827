"""Finds the sharding of weights, reads quantized operands, and routes gradients to their origins.

Also quantizes kernels once for many matmuls, in the layouts that these read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.partitioning import on_mesh, regions
from ep_runtime_client.ops.partitioning.roles import Entries, Roles, entries_of, padded
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.ops import QuantizeKernel, QuantizeStack, transposes
from ep_runtime_client.ops.quantize.pair import Pair, of_both, paired
from ep_runtime_client.ops.quantize.quantized_tensor import Kernel, QuantizedTensor, unpack
from ep_runtime_client.ops.tracing import eager
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


def origin_of(x: Kernel) -> jax.Array | Pair | None:
    """Returns the array that receives the gradient of an operand."""
    origin: jax.Array | Pair | None
    origin = paired(x.origin, "rhs") if isinstance(x, QuantizedTensor) else x
    return origin


def settled(where: regions.Partitioning, x: Any, entries: Entries) -> QuantizedTensor | None:
    """Types and places the leaves that matmuls read of a quantized operand; None if it is plain."""
    if not isinstance(x, QuantizedTensor):
        return None
    bare = dataclasses.replace(x, origin=None, amax=None, group_sizes=None, transposed=None)
    read: QuantizedTensor = regions.settle(where, bare, entries)
    transposed = regions.settle(where, x.transposed, (entries[0], *entries[2:], entries[1]))
    return dataclasses.replace(read, transposed=transposed)


def for_backward(kernel: Kernel) -> Kernel:
    """Returns a kernel to save for backward, without the copy that only forward reads."""
    if not isinstance(kernel, QuantizedTensor):
        return kernel
    return dataclasses.replace(kernel, transposed=None)


def quantize_weight(
    w: jax.Array | tuple[jax.Array, jax.Array],
    recipe: Recipe,
    *,
    layer: EpLayer | TracedLayer | None = None,
    spec: PartitionSpec | None = None,
    stack: int = 0,
) -> QuantizedTensor:
    """Quantizes kernels of experts as `grouped_gemm` does with the recipe, bit for bit.

    Args:
        w: [*stack, E, K', *N'], or (gate, up) of [*stack, E, K', M], which become one array
            [*stack, E, K', 2, M].
        recipe: how to quantize; not delayed.
        layer: as in `grouped_quantize`.
        spec: sharding of w, or of each of a pair, if traced arrays do not carry it; like rhs_spec.
        stack: number of leading dims for a stack of layers.

    Returns:
        A QuantizedTensor, with `transposed` if this process's GPU kernels read it. Gradients go to
        w. Its leaves are tagged "ep_q_w".

    Raises:
        InvalidArgumentError: sizes that the recipe cannot tile, or gate and up sharded in two ways.
    """
    arrays = [*w] if isinstance(w, tuple) else [w]
    known = of_alike(arrays, "params.wi") if spec is None else entries_of(spec, arrays[0].ndim)
    last = None if spec is None else PartitionSpec(*tuple(spec)[stack:])
    where = regions.of_call(layer, arrays, known=known is not None, rhs_spec=last)
    entries = known or padded((), arrays[0].ndim)
    if where.manual:
        entries = (*entries[:stack], *with_manual_experts(where, entries[stack:]))
    if layer is None and where.mode == "shard_map":
        assert where.roles is not None
        # Any axis on the experts' dim shards experts.
        where = dataclasses.replace(where, roles=Roles(where.roles.sizes, (), entries[stack]))
    op = _op(where, recipe, arrays, stack)
    values = [jax.lax.stop_gradient(x) for x in arrays]
    made: QuantizedTensor = eager.run(_run, (op, entries), *values)
    return dataclasses.replace(made, origin=w)


def _op(
    where: regions.Partitioning, recipe: Recipe, arrays: list[jax.Array], stack: int
) -> QuantizeKernel | QuantizeStack:
    shape, paired = tuple(arrays[0].shape[stack:]), len(arrays) == 2
    shape = of_both(shape, 2) if paired else shape
    transposed = transposes(recipe, shape)
    kernel = QuantizeKernel(where, recipe, shape, transposed=transposed, paired=paired)
    return QuantizeStack(kernel, stack) if stack else kernel


def _run(
    call: tuple[QuantizeKernel | QuantizeStack, Entries], *arrays: jax.Array
) -> QuantizedTensor:
    op, entries = call
    leaves = on_mesh.run_on_mesh(op, [entries] * len(arrays), *arrays)
    # Tag the raw bytes, because these are the arrays that a checkpoint policy saves.
    tagged = [checkpoint_name(leaf, "ep_q_w") for leaf in leaves]
    result = unpack(op.packing, tagged)
    assert isinstance(result, QuantizedTensor)
    return result


def with_gradient(q: QuantizedTensor) -> QuantizedTensor:
    """Returns `q`; if it has no origin, differentiating the result raises an error."""
    return q if q.origin is not None else dataclasses.replace(q, data=_undifferentiated(q.data))


@jax.custom_jvp
def _undifferentiated(data: jax.Array) -> jax.Array:
    return data


@_undifferentiated.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise InvalidArgumentError(
        "8-bit weights have no gradient: differentiate with respect to the masters, with "
        "ep.straight_through(masters, params8) in the loss",
        argument="params",
    )
