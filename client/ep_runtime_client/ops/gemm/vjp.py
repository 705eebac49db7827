"""The gradient of grouped_gemm: quantizes operands, saves them for backward, and pulls back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ep_runtime_client.ops.gemm.ops import GemmBackward, GemmForward
from ep_runtime_client.ops.gemm.plain import Gemm
from ep_runtime_client.ops.gemm.quantized_operands import for_backward
from ep_runtime_client.ops.partitioning import on_mesh, regions
from ep_runtime_client.ops.partitioning.roles import Entries, padded
from ep_runtime_client.ops.quantize import ops as quantize_ops
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.pair import Pair, of_each
from ep_runtime_client.ops.quantize.quantized_tensor import (
    Kernel,
    Matrix,
    Packing,
    QuantizedTensor,
    pack,
)
from ep_runtime_client.ops.tracing import eager, first_order, slack

# lhs and rhs (plain, or the origins of quantized ones), bias, quantized lhs and rhs without origin,
# group_sizes [R, L], given scales of rows [R, L] and kernels [E] or None.
Operands = tuple[
    jax.Array | None,
    jax.Array | Pair | None,
    jax.Array | None,
    QuantizedTensor | None,
    QuantizedTensor | None,
    jax.Array,
    tuple[jax.Array, jax.Array] | None,
]
Amax = tuple[jax.Array, jax.Array] | None  # new amax of rows [R, L] and kernels [E]


@dataclasses.dataclass(frozen=True)
class GemmCall:
    """The static argument of one call. Hashable.

    Attributes:
        where: the mesh axes and the mode in which the call runs.
        recipe: how plain operands and gradients are quantized; None does not quantize.
        gemm: static side of the GEMM on one device.
        num_experts: E, over all devices.
        lhs: entries of the rows [R, C, K'].
        rhs: entries of the weight, if known.
        multiplied: entries of the weight in the matmul; a quantized one may be over fewer axes.
        bias: entries of the bias, if known.
        types: entries that the gradients of every array of lhs, rhs and bias must have as types;
            None if types carry no sharding.
        paired: whether rhs is a pair; its entries are those of [E, K', 2, M].
    """

    where: regions.Partitioning
    recipe: Recipe | None
    gemm: Gemm
    num_experts: int
    lhs: Entries
    rhs: Entries
    multiplied: Entries
    bias: Entries
    types: tuple[tuple[Entries | None, ...], ...] = ((), (), ())
    paired: bool = False


def run(call: GemmCall, operands: Operands) -> tuple[jax.Array, Amax]:
    """Returns [R, C, *N'], differentiable in the first three operands, and this call's amax."""
    return eager.run(_primal, call, *operands, traced=_gemm)


def _primal(call: GemmCall, *operands: Any) -> tuple[jax.Array, Amax]:
    bias, group_sizes = operands[2], operands[5]
    rows, kernel, amax = _multiplied(call, *operands[:2], *operands[3:])
    return _forward(call, rows, kernel, bias, group_sizes), amax


def _multiplied(
    call: GemmCall,
    lhs: jax.Array | None,
    rhs: jax.Array | Pair | None,
    q_lhs: QuantizedTensor | None,
    q_rhs: QuantizedTensor | None,
    group_sizes: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
) -> tuple[Matrix, Kernel, Amax]:
    """Returns the operands of the GEMM and their amax; a recipe quantizes plain operands here."""
    rows: Any = lhs if q_lhs is None else q_lhs
    kernel: Any = rhs if q_rhs is None else q_rhs
    if call.recipe is None:
        return rows, kernel, None
    scaled = scales is not None
    x_scale, w_scale = ((), ()) if scales is None else ((scales[0],), (scales[1],))
    found: list[Any] = []
    if q_rhs is None:
        kernel, amax = quantize_ops.weight(call.where, call.recipe, call.rhs, kernel, *w_scale)
        found.append(amax)
    if q_lhs is None:
        rows_op = quantize_ops.QuantizeRows(
            call.where, call.recipe, 3, call.num_experts, scaled, clear_slack=slack.checked()
        )
        q = quantize_ops.rows((rows_op, call.lhs), rows, group_sizes, *x_scale)
        found.append(q.amax)
        rows = quantize_ops.tagged(q, "ep_q_x")
    return rows, kernel, (found[1], found[0]) if scaled else None


def _forward(
    call: GemmCall, rows: Matrix, kernel: Kernel, bias: jax.Array | None, group_sizes: jax.Array
) -> jax.Array:
    packings, arrived, operands = _packed(call, rows, kernel, bias, group_sizes)
    op = GemmForward(call.where, *packings, bias is not None, call.gemm)
    return on_mesh.run_on_mesh(op, arrived, *operands)[0]


def _packed(
    call: GemmCall,
    rows: Matrix,
    kernel: Kernel,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    *,
    columns: bool = False,
) -> tuple[tuple[Packing, Packing], tuple[Entries, ...], list[jax.Array]]:
    """Returns (packings of rows and kernel, entries of all operands, the operands)."""
    lhs, of_lhs = pack(quantize_ops.from_raw(rows, rows=True), rows=True, columns=columns)
    rhs, of_rhs = pack(quantize_ops.from_raw(kernel, rows=False), rows=False, columns=columns)
    operands = [*lhs, *rhs, *([] if bias is None else [bias]), group_sizes]
    of_bias = [] if bias is None else [call.bias]
    weight = of_rhs.spread(call.multiplied)
    return (of_lhs, of_rhs), (*of_lhs.spread(call.lhs), *weight, *of_bias, padded((), 2)), operands


def _fwd(call: GemmCall, *operands: Any) -> Any:
    out, (rows, kernel, _, _, likes) = eager.shared(_forward_and_saved, call, *operands)
    lhs, rhs, bias, q_lhs, q_rhs, group_sizes, _ = operands
    # Save the argument itself if it is unchanged: a scan then saves no copy of it.
    if q_lhs is not None or call.recipe is None:
        rows = lhs if q_lhs is None else q_lhs
    if q_rhs is not None or call.recipe is None:
        kernel = for_backward(rhs if q_rhs is None else q_rhs)
    return out, (rows, kernel, bias, group_sizes, likes)


def _bwd(call: GemmCall, saved: Any, grads_out: tuple[jax.Array, Any]) -> Any:
    grads = eager.shared(_pullback, call, saved, grads_out[0])
    typed = [regions.typed_tree(*each) for each in zip(grads, call.types, strict=True)]
    return (*typed, None, None, None, None)


def _forward_and_saved(call: GemmCall, *operands: Any) -> Any:
    """Returns ((out, amax), arrays saved for backward)."""
    lhs, rhs, bias, _, _, group_sizes, _ = operands
    rows, kernel, amax = _multiplied(call, lhs, rhs, *operands[3:])
    out = _forward(call, rows, kernel, bias, group_sizes)
    likes = [None if x is None else jax.numpy.zeros((), x.dtype) for x in (lhs, rhs)]
    if rhs is not None and isinstance(kernel, QuantizedTensor):
        blocks = pack(kernel, rows=False)[1].blocks
        shape = regions.whole_shape(call.where, rhs.shape, call.rhs)
        likes[1] = rhs if quantize_ops.uneven(call.where, shape, blocks) else likes[1]
    return (out, amax), (rows, for_backward(kernel), bias, group_sizes, likes)


def _pullback(call: GemmCall, saved: Any, grad: jax.Array) -> Any:
    """Computes gradients of lhs, rhs and bias."""
    rows, kernel, bias, group_sizes, likes = saved
    packings, arrived, operands = _packed(call, rows, kernel, bias, group_sizes, columns=True)
    dtypes = [grad.dtype if like is None else like.dtype for like in likes]
    itself = [] if likes[1] is None or not likes[1].ndim else jax.tree.leaves(likes[1])
    gemm = dataclasses.replace(call.gemm, out_dtype=dtypes[0])
    bias_dtype = None if bias is None else bias.dtype
    op = GemmBackward(
        call.where,
        *packings,
        bias is not None,
        gemm,
        call.recipe,
        dtypes[1],
        bias_dtype,
        bool(itself),
        call.paired,
    )
    own = of_each(call.rhs, call.paired)
    arrived = (*arrived, padded((), grad.ndim), *[own] * len(itself))
    d_lhs, *others = on_mesh.run_on_mesh(op, arrived, *operands, grad, *itself)
    count = 1 + int(call.paired)
    d_rhs, d_bias = others[:count], others[count:]
    return (
        None if likes[0] is None else d_lhs,
        None if likes[1] is None else Pair(*d_rhs) if call.paired else d_rhs[0],
        d_bias[0] if d_bias else None,
    )


_gemm = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("grouped_gemm", _gemm, _fwd, _bwd)
