"""The gradient of grouped_gemm: what is quantized, what is kept, and what comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime_client.ops.gemm.ops import GemmBackward, GemmForward, arrivals
from ep_runtime_client.ops.gemm.plain import Gemm
from ep_runtime_client.ops.gemm.quantized_operands import for_backward
from ep_runtime_client.ops.partitioning import on_mesh
from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.partitioning.roles import Entries, padded
from ep_runtime_client.ops.quantize import ops as quantize_ops
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.packing import Kernel, Matrix, pack
from ep_runtime_client.ops.quantize.pair import Pair, of_each
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.tracing import eager, first_order, slack

# lhs, rhs (plain ones, or where the gradients of quantized ones go), bias, quantized lhs and rhs
# without origin, group_sizes [R, L], given scales of rows [R, L] and kernels [E] or None.
Operands = tuple[
    jax.Array | None,
    jax.Array | Pair | None,
    jax.Array | None,
    QuantizedTensor | None,
    QuantizedTensor | None,
    jax.Array,
    tuple[jax.Array, jax.Array] | None,
]
Amax = tuple[jax.Array, jax.Array] | None  # of rows [R, L] and kernels [E], where scales are given


@dataclasses.dataclass(frozen=True)
class GemmCall:
    """The static argument of one call. Hashable.

    Attributes:
        where: where it runs.
        recipe: how plain operands and gradients are quantized; None leaves them.
        gemm: static side of the GEMM on one device.
        num_experts: E, over all devices.
        lhs: entries of the rows [R, C, K'].
        rhs: entries of the weight, where they are known.
        lies: of what is multiplied: quantized, it may lie over fewer axes.
        bias: entries of the bias, likewise.
        types: entries that the gradients of every array of lhs, rhs and bias must have as types;
            None where types say nothing.
        paired: whether rhs is a pair; its entries are those of [E, K', 2, M].
    """

    where: Partitioning
    recipe: Recipe | None
    gemm: Gemm
    num_experts: int
    lhs: Entries
    rhs: Entries
    lies: Entries
    bias: Entries
    types: tuple[tuple[Entries | None, ...], ...] = ((), (), ())
    paired: bool = False


def run(call: GemmCall, operands: Operands) -> tuple[jax.Array, Amax]:
    """[R, C, *N'], differentiable in the first three operands, and this call's amax."""
    result: tuple[jax.Array, Amax] = eager.run(_primal, call, *operands, traced=_gemm)
    return result


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
    """What the GEMM multiplies: quantized here where there is a recipe for plain operands."""
    rows, kernel = _either(q_lhs, lhs), _either(q_rhs, rhs)
    if call.recipe is None:
        return rows, kernel, None
    scaled = scales is not None
    x_scale, w_scale = ((), ()) if scales is None else ((scales[0],), (scales[1],))
    found: list[Any] = []
    if q_rhs is None:
        transposed = quantize_ops.transposes(call.recipe, kernel.shape)
        kernel_op = quantize_ops.QuantizeKernel(
            call.where, call.recipe, kernel.shape, scaled, transposed, call.paired
        )
        q = quantize_ops.kernel(kernel_op, call.rhs, _unquantized(kernel), *w_scale)
        found.append(q.amax)
        kernel = _tagged(q, "ep_q_w")
    if q_lhs is None:
        rows_op = quantize_ops.QuantizeRows(
            call.where, call.recipe, 3, call.num_experts, scaled, clear_slack=slack.checked()
        )
        q = quantize_ops.rows(rows_op, call.lhs, _unquantized(rows), group_sizes, *x_scale)
        found.append(q.amax)
        rows = _tagged(dataclasses.replace(q, group_sizes=None), "ep_q_x")
    return rows, kernel, (found[1], found[0]) if scaled else None


def _either(quantized: QuantizedTensor | None, plain: Any) -> Any:
    if quantized is not None:
        return quantized
    assert plain is not None
    return plain


def _unquantized(x: Any) -> Any:
    assert not isinstance(x, QuantizedTensor)
    return x


def _tagged(q: QuantizedTensor, name: str) -> QuantizedTensor:
    """`q` with 8-bit floats as uint8, which is what is kept until backward."""
    kept = quantize_ops.raw(dataclasses.replace(q, amax=None))
    tagged: QuantizedTensor = jax.tree.map(lambda leaf: checkpoint_name(leaf, name), kept)
    return tagged


def _forward(
    call: GemmCall, rows: Matrix, kernel: Kernel, bias: jax.Array | None, group_sizes: jax.Array
) -> jax.Array:
    lhs, lhs_packing = pack(quantize_ops.from_raw(rows, rows=True), rows=True)
    rhs, rhs_packing = pack(quantize_ops.from_raw(kernel, rows=False), rows=False)
    op = GemmForward(call.where, lhs_packing, rhs_packing, bias is not None, call.gemm)
    others = [] if bias is None else [bias]
    known = [] if bias is None else [call.bias]
    arrived = arrivals(lhs_packing, rhs_packing, call.lhs, call.lies, *known, padded((), 2))
    return on_mesh.run_on_mesh(op, arrived, *lhs, *rhs, *others, group_sizes)[0]


def _fwd(call: GemmCall, *operands: Any) -> Any:
    out, (rows, kernel, _, _, likes) = eager.shared(_forward_kept, call, *operands)
    lhs, rhs, bias, q_lhs, q_rhs, group_sizes, _ = operands
    # What is kept as it came is the very argument: a scan that has it keeps no copy of it.
    if q_lhs is not None or call.recipe is None:
        rows = _either(q_lhs, lhs)
    if q_rhs is not None or call.recipe is None:
        kernel = for_backward(_either(q_rhs, rhs))
    return out, (rows, kernel, bias, group_sizes, likes)


def _bwd(call: GemmCall, kept: Any, grads_out: tuple[jax.Array, Any]) -> Any:
    grads = eager.shared(_pullback, call, kept, grads_out[0])
    typed = [_typed(*each) for each in zip(grads, call.types, strict=True)]
    return (*typed, None, None, None, None)


def _typed(grad: Any, types: tuple[Entries | None, ...]) -> Any:
    leaves, tree = jax.tree.flatten(grad)
    typed = [on_mesh.typed_as(*each) for each in zip(leaves, types, strict=True)]
    return jax.tree.unflatten(tree, typed)


def _forward_kept(call: GemmCall, *operands: Any) -> Any:
    """((out, amax), what backward needs)."""
    lhs, rhs, bias, _, _, group_sizes, _ = operands
    rows, kernel, amax = _multiplied(call, lhs, rhs, *operands[3:])
    out = _forward(call, rows, kernel, bias, group_sizes)
    likes = [None if x is None else jax.numpy.zeros((), x.dtype) for x in (lhs, rhs)]
    if rhs is not None and isinstance(kernel, QuantizedTensor):
        blocks = pack(kernel, rows=False)[1].blocks
        shape = on_mesh.whole_shape(call.where, rhs.shape, call.rhs)
        likes[1] = rhs if quantize_ops.uneven(call.where, shape, blocks) else likes[1]
    return (out, amax), (rows, for_backward(kernel), bias, group_sizes, likes)


def _pullback(call: GemmCall, kept: Any, grad: jax.Array) -> Any:
    """Gradients of lhs, rhs and bias."""
    rows, kernel, bias, group_sizes, likes = kept
    lhs, lhs_packing = pack(quantize_ops.from_raw(rows, rows=True), rows=True, columns=True)
    rhs, rhs_packing = pack(quantize_ops.from_raw(kernel, rows=False), rows=False, columns=True)
    dtypes = [grad.dtype if like is None else like.dtype for like in likes]
    itself = [] if likes[1] is None or not likes[1].ndim else jax.tree.leaves(likes[1])
    gemm = dataclasses.replace(call.gemm, out_dtype=dtypes[0])
    bias_dtype = None if bias is None else bias.dtype
    op = GemmBackward(
        call.where,
        lhs_packing,
        rhs_packing,
        bias is not None,
        gemm,
        call.recipe,
        dtypes[1],
        bias_dtype,
        bool(itself),
        call.paired,
    )
    others = [] if bias is None else [bias]
    known = [] if bias is None else [call.bias]
    own = of_each(call.rhs) if call.paired else call.rhs
    rest = (*known, padded((), 2), padded((), grad.ndim), *[own] * len(itself))
    arrived = arrivals(lhs_packing, rhs_packing, call.lhs, call.lies, *rest)
    operands = (*lhs, *rhs, *others, group_sizes, grad, *itself)
    d_lhs, *others = on_mesh.run_on_mesh(op, arrived, *operands)
    count = 1 + int(call.paired)
    d_rhs, d_bias = others[:count], others[count:]
    return (
        None if likes[0] is None else d_lhs,
        None if likes[1] is None else Pair(*d_rhs) if call.paired else d_rhs[0],
        d_bias[0] if d_bias else None,
    )


_gemm = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("grouped_gemm", _gemm, _fwd, _bwd)
