"""grouped_gemm: every expert's rows times its kernel, under the sharding rules."""

from __future__ import annotations

import dataclasses
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.dtypes import as_dtype
from ep_runtime_client.base.layers import EpLayer, TracedLayer, resolve
from ep_runtime_client.ops.gemm import kernels_32, quantized_operands, vjp
from ep_runtime_client.ops.gemm.checks import (
    check_delayed,
    check_experts,
    check_gemm,
    check_slabs_share,
)
from ep_runtime_client.ops.gemm.plain import Gemm
from ep_runtime_client.ops.gemm.quantized_operands import origin_of, settled, values_of
from ep_runtime_client.ops.partitioning import regions
from ep_runtime_client.ops.partitioning.placement import expert_weight, grouped
from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.partitioning.roles import Entries, padded
from ep_runtime_client.ops.quantize import delayed, quantized_tensor
from ep_runtime_client.ops.quantize.formats.recipes import DelayedState, Recipe
from ep_runtime_client.ops.quantize.ops import rows_roles
from ep_runtime_client.ops.quantize.pair import Pair, of_each, paired
from ep_runtime_client.ops.quantize.quantized_tensor import Kernel, Matrix, QuantizedTensor


@overload
def grouped_gemm(
    lhs: Matrix,
    rhs: Matrix | tuple[jax.Array, jax.Array],
    group_sizes: jax.Array,
    *,
    layer: EpLayer | TracedLayer | None = None,
    bias: jax.Array | None = None,
    recipe: Recipe | None = None,
    out_dtype: Any = None,
    rhs_spec: PartitionSpec | None = None,
    state: None = None,
) -> jax.Array: ...
@overload
def grouped_gemm(
    lhs: Matrix,
    rhs: Matrix | tuple[jax.Array, jax.Array],
    group_sizes: jax.Array,
    *,
    layer: EpLayer | TracedLayer | None = None,
    bias: jax.Array | None = None,
    recipe: Recipe | None = None,
    out_dtype: Any = None,
    rhs_spec: PartitionSpec | None = None,
    state: DelayedState,
) -> tuple[jax.Array, DelayedState]: ...
def grouped_gemm(
    lhs: Matrix,
    rhs: Matrix | tuple[jax.Array, jax.Array],
    group_sizes: jax.Array,
    *,
    layer: EpLayer | TracedLayer | None = None,
    bias: jax.Array | None = None,
    recipe: Recipe | None = None,
    out_dtype: Any = None,
    rhs_spec: PartitionSpec | None = None,
    state: DelayedState | None = None,
) -> jax.Array | tuple[jax.Array, DelayedState]:
    """Multiplies the rows of every expert by the kernel of that expert.

    Args:
        lhs: [R, C, K'] rows as `dispatch` returns them, or [rows, K']; float, or a QuantizedTensor.
            Rows past the last group are never read.
        rhs: [E, K', *N'] kernels, with any trailing dims; or a QuantizedTensor; or a pair
            (gate, up) of [E, K', M] each. For its sharding see docs/weights.md.
        group_sizes: [R, L] int32, rows of each group, on the device; [E] for [rows, K']. Group l
            of slab r is expert (r * L + l) % E.
        layer: the layer whose mesh and axes the sharding rules use. Without it they come from the
            operands' shardings; unsharded operands mean one device.
        bias: [E, *N'], added once to every row of its expert.
        recipe: how plain operands are quantized, in backward too; None and BF16 quantize nothing.
        out_dtype: dtype of the result and its gradient; None is lhs's, or bf16 with BF16() and for
            a quantized lhs.
        rhs_spec: sharding of rhs, if a traced array does not carry it.
        state: with TensorScaling(delayed=True), the histories that give the scales.

    Returns:
        [R, C, *N'] or [rows, *N'], summed in f32 (f64 for f64 operands); rows past the last group
        are undefined. With `state`, a pair of that and the next state. Differentiable in lhs, rhs
        and bias; experts without rows get zero gradients.

    Raises:
        InvalidArgumentError: shapes, dtypes or the sharding of rhs do not fit.
        NotImplementedError: under a vmap, as in `dispatch`, or a second derivative.

    Cost: the work follows sum(group_sizes). Forward and backward all-gather rhs over its outer axes
    (8-bit data and scales with a recipe). Backward also reduce-scatters once.

    Source: MegaBlocks (arXiv:2211.15841), with the semantics of `jax.lax.ragged_dot`; 8-bit sums as
    in DeepSeek-V3 (arXiv:2412.19437, 3.3.2).

    Examples:
        >>> x = jnp.array([[1.0], [2.0], [3.0]])
        >>> w = jnp.array([[[10.0]], [[100.0]]])  # two experts, K and N of 1
        >>> ep.grouped_gemm(x, w, jnp.array([1, 2]))[:, 0].tolist()
        [10.0, 200.0, 300.0]
    """
    kernel: Kernel = paired(rhs, "rhs")
    flat_rows = group_sizes.ndim == 1
    # Manual axes that shard no tokens of the layer stay on rhs: rows are split over them too.
    over = None if layer is None else resolve(layer)[0].group_spec.token_axes
    shape = quantized_operands.outside_shape(kernel, rhs_spec, over)
    check_gemm(lhs, kernel, shape, group_sizes, bias, recipe)
    plain = not any(isinstance(x, QuantizedTensor) for x in (lhs, kernel))
    check_delayed(recipe, state, plain=plain)
    if recipe is not None and not recipe.quantizes:
        lhs, kernel = _cast(lhs, jnp.bfloat16), _cast(kernel, jnp.bfloat16)
        recipe = None
    if flat_rows:
        lhs, group_sizes = jax.tree.map(lambda x: x[None], lhs), group_sizes[None]
    group_sizes = group_sizes.astype(jnp.int32)
    call = _call(lhs, kernel, group_sizes, bias, layer, recipe, out_dtype, rhs_spec)
    out, state = _run(call, lhs, kernel, bias, group_sizes, state)
    out = out[0] if flat_rows else out
    return out if state is None else (out, state)


def _cast(x: Any, dtype: Any) -> Any:
    return x if isinstance(x, QuantizedTensor) else x.astype(dtype)


def _call(
    lhs: Matrix,
    rhs: Kernel,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    layer: EpLayer | TracedLayer | None,
    recipe: Recipe | None,
    out_dtype: Any,
    rhs_spec: PartitionSpec | None,
) -> vjp.GemmCall:
    """Makes the static side of a call."""
    # Find how operands are sharded, because that decides how the op runs.
    operands = [x for x in (values_of(lhs), values_of(rhs), bias, group_sizes) if x is not None]
    known = quantized_operands.known(rhs)
    given = known if rhs_spec is None else quantized_operands.told(rhs, rhs_spec)
    rows = regions.known_entries(values_of(lhs), lhs.ndim)
    where = regions.of_call(layer, operands, known=given is not None, rhs_spec=rhs_spec)
    given = given or padded((), rhs.ndim)
    if where.manual:
        given = quantized_operands.with_manual_experts(
            where, quantized_operands.told(rhs, rhs_spec)
        )
    if layer is None and where.mode == "shard_map":
        assert where.roles is not None
        slabs = rows or padded((), lhs.ndim)
        roles = rows_roles(where.roles.sizes, slabs, group_sizes.shape, rhs.shape[0])
        where = dataclasses.replace(where, roles=roles)
    num_experts, multiplied = rhs.shape[0], given
    if where.roles is not None:
        # The weight also decides which axes shard K' of the rows.
        shape = regions.whole_shape(where, rhs.shape, given)
        num_experts = shape[0]
        rows = grouped(where.roles, rows, given, shape, blocks=_blocks_of(recipe, rhs)).lhs
        multiplied = with_whole_blocks(where, recipe, rhs, given)
    # Checks that need the layer, or the facts that it would give.
    alignment = 1
    if layer is not None:
        static = resolve(layer)[0]
        alignment = static.alignment
        regions.check_slabs(where, "lhs", lhs.shape[0])
        check_experts(where, num_experts, group_sizes.shape, static.group_spec.num_experts)
    else:
        check_slabs_share(tuple(rhs.shape), tuple(group_sizes.shape))
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if isinstance(lhs, QuantizedTensor) else lhs.dtype
    gemm = Gemm(as_dtype(out_dtype, "out_dtype"), alignment, tf32=kernels_32.allowed())
    bias_entries = padded((), rhs.ndim - 1) if bias is None else entries_of_bias(where, bias, given)
    # The mesh axes that gradients must have in their types.
    typed = (origin_of(lhs), origin_of(rhs), bias)
    types = tuple(tuple(map(regions.type_of, jax.tree.leaves(x))) for x in typed)
    rows, both = rows or padded((), lhs.ndim), isinstance(origin_of(rhs), Pair)
    fields = (where, recipe, gemm, num_experts, rows, given, multiplied, bias_entries, types)
    return vjp.GemmCall(*fields, paired=both)


def with_whole_blocks(
    where: Partitioning, recipe: Recipe | None, rhs: Kernel, given: Entries
) -> Entries:
    """Returns a weight's entries in its matmul, without axes that leave no whole blocks if `recipe`
    quantizes it.

    Raises:
        InvalidArgumentError: a shard_map has cut the weight, and rows too, over such an axis.
    """
    if where.roles is None or recipe is None or isinstance(rhs, QuantizedTensor):
        return given
    shape, blocks = regions.whole_shape(where, rhs.shape, given), _blocks_of(recipe, rhs)
    weight = expert_weight(where.roles, given, shape, blocks=blocks)
    for dim, axes in enumerate(weight.before):
        cut = [axis for axis in axes if axis in where.manual and axis not in where.roles.slab]
        if cut:
            raise InvalidArgumentError(
                f"rhs dim {dim} must be a multiple of {blocks[dim]}, the recipe's blocks, on every "
                f"shard of {where.roles.named(cut)}, got size {shape[dim]} in a shard_map that is "
                "manual over it; leave the axis to the partitioner, or choose another recipe or "
                "size",
                argument="recipe",
            )
    return weight.entries


def entries_of_bias(where: Partitioning, bias: jax.Array, weight: Entries) -> Entries:
    """Returns the entries of the bias [E, *N'] of a weight."""
    if where.manual:  # sharded over experts like the weight, whole on other dims
        return padded(weight[:1], len(weight) - 1)
    # A bias of unknown layout is sharded like its weight.
    known = regions.known_entries(bias, len(weight) - 1)
    return (weight[0], *weight[2:]) if known is None else known


def _blocks_of(recipe: Recipe | None, rhs: Kernel) -> tuple[int, ...]:
    """Returns, per dim of rhs, the number that must divide its size on a device."""
    return quantized_tensor.blocks_of(
        rhs.recipe if isinstance(rhs, QuantizedTensor) else recipe, rhs.ndim
    )


def _run(
    call: vjp.GemmCall,
    lhs: Matrix,
    rhs: Kernel,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    state: DelayedState | None,
) -> tuple[jax.Array, DelayedState | None]:
    primals: list[Any] = []
    quantized: list[Any] = []
    for x, entries in ((lhs, call.lhs), (rhs, call.rhs)):
        origin = origin_of(x)
        sharding = of_each(entries, isinstance(origin, Pair))
        primals.append(regions.settle(call.where, origin, sharding))
        quantized.append(settled(call.where, x, entries))
    bias = regions.settle(call.where, bias, call.bias)
    group_sizes = regions.settle(call.where, group_sizes, call.lhs[:1])
    scales, after = None, None
    if state is not None:
        assert call.recipe is not None
        layout = (group_sizes.shape, call.lhs, call.rhs)
        scales, after = delayed.begin(call.where, call.recipe, call.num_experts, *layout, state)
    operands: Any = (*primals, bias, *quantized, group_sizes, scales)
    out, amax = vjp.run(call, operands)
    if after is not None and amax is not None:
        state = after(*amax)
    # JAX's own sum over a manual axis also counts the gradient correctly.
    on_k = tuple(axis for axis in call.lhs[2] if axis in call.where.manual)
    return jax.lax.psum(out, on_k) if on_k else out, state
