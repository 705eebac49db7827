"""Grouped GEMM on one device, in plain JAX: one dot per block of existing rows.

On a GPU the kernels of `kernels_16.py`, `kernels_32.py` and `kernels_8.py` run instead, if they
support a matmul.

Letters: C rows of a slab, S slabs on this device, L groups of a slab, G experts of the weights on
this device, K' contracted, N' the kernel's trailing dims (one, or more such as [2, M]).

Operands are arrays or QuantizedTensors, in any mix; kernels may also be a Pair, as [G, K', 2, M].
Quantized operands are widened to f32 and multiplied by their scales block by block; a scale that
covers a whole group multiplies the dot's result instead.

Every function takes rows [C, ...] with group_sizes [L], or [S, C, ...] with [S, L]; group l of slab
s uses expert (s * L + l) % G. Rows past sum(group_sizes) are not read. Their results are zeros; in
a forward pass on a GPU they are undefined. Nothing here is differentiable: the ops that call these
functions define their gradients with `pullback` and `bias_grad`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.base.dtypes import sum_dtype
from ep_runtime_client.ops.gemm import kernels_8, kernels_16, kernels_32, kernels_bias
from ep_runtime_client.ops.gemm.product import GemmKernels, Product
from ep_runtime_client.ops.kernels import row_blocks, serve
from ep_runtime_client.ops.quantize.formats.format import Part, flat, matrix
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.pair import Pair, of_each
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor

Kernel = Callable[..., jax.Array]
# The kernels of the CUDA library; the first that supports a matmul runs it.
FAMILIES = (kernels_16.KERNELS, kernels_32.KERNELS, kernels_8.KERNELS)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """Holds the static settings of a grouped GEMM. Hashable.

    Attributes:
        out_dtype: dtype of the rows that `forward` and `data_grad` return.
        alignment: known divisor of all group sizes; it only sets the number of rows in a block.
        compute_dtype: dtype to which arrays are cast block by block; None does not cast.
        clear_slack: a caller may read the gradient of rows past the last group. If False, a GPU
            leaves them undefined; on other platforms they are zeros anyway.
        tf32: a GPU may round f32 operands to tf32.
    """

    out_dtype: Any
    alignment: int = 1
    compute_dtype: Any = None
    clear_slack: bool = True
    tf32: bool = False


def forward(
    gemm: Gemm, lhs: Any, rhs: Any, bias: jax.Array | None, group_sizes: jax.Array
) -> jax.Array:
    """Multiplies each group's rows by its expert's kernel, and adds the expert's bias.

    Args:
        gemm: static description.
        lhs: [C, K'] rows, an array or a QuantizedTensor.
        rhs: [G, K', *N'] kernels, likewise.
        bias: [G, *N'] or None; added in the dtype of sums.
        group_sizes: [L] int32, on the device, any counts.

    Returns:
        [C, *N'] in gemm.out_dtype, summed in f32 (f64 if an operand is f64).

    Cost: sum(ceil(group_size / block)) dots, and C * N' zeros.
    """
    operands = (lhs, rhs, bias, group_sizes)
    plain = functools.partial(_forward, gemm)
    by = _served_by(gemm, lhs, rhs, rhs.shape, group_sizes)
    if by is None:
        return plain(*operands)
    kernel = functools.partial(by.forward, gemm.out_dtype, _cast_by(gemm, by))
    return serve.choose(kernel, plain, *operands)


def _forward(
    gemm: Gemm, lhs: Any, rhs: Any, bias: jax.Array | None, group_sizes: jax.Array
) -> jax.Array:
    lead = group_sizes.ndim
    blocks = _cut(gemm, lhs, group_sizes)
    rows = _row_reader(lhs, lead, dtype=gemm.compute_dtype)
    kernels = _kernel_reader(rhs, dtype=gemm.compute_dtype)
    out = jnp.zeros((blocks.num_rows, *rhs.shape[2:]), gemm.out_dtype)

    def step(block: row_blocks.RowBlock, out: jax.Array) -> jax.Array:
        expert = blocks.expert(block, rhs.shape[0])
        result = _dot(rows(block), kernels(expert), (1, 0))
        result = result.reshape(blocks.rows, *rhs.shape[2:])
        if bias is not None:
            result = result + row_blocks.pick(bias, expert).astype(result.dtype)
        return block.write(out, result)

    out = row_blocks.loop(blocks, step, out, lhs, rhs, bias)
    return out.reshape(*lhs.shape[:lead], *rhs.shape[2:])


def data_grad(gemm: Gemm, grad: Any, rhs: Any, group_sizes: jax.Array) -> jax.Array:
    """Computes the gradient of rows: grad [C, *N'], rhs [G, K', *N'] -> [C, K'] in gemm.out_dtype.

    Both may be QuantizedTensors; of MXFP8 kernels the column-wise copy is read.
    """

    def plain(grad: Any, rhs: Any, group_sizes: jax.Array) -> jax.Array:
        return _gradients(gemm, None, rhs, grad, group_sizes)[0]

    by = _served_by(gemm, grad, rhs, rhs.shape, group_sizes)
    if by is None:
        return plain(grad, rhs, group_sizes)
    return serve.choose(_data_kernel(gemm, by), plain, grad, rhs, group_sizes)


def weight_grad(
    gemm: Gemm,
    lhs: Any,
    grad: Any,
    group_sizes: jax.Array,
    num_experts: int | None = None,
    out_dtype: Any = None,
    paired: bool = False,
) -> Any:
    """Computes the gradient of the kernels.

    Args:
        gemm: static description.
        lhs: [C, K'] rows of the forward pass, an array or a QuantizedTensor; of MXFP8 tensors, here
            and in `grad`, the column-wise copy is read.
        grad: [C, *N'], likewise.
        group_sizes: [L] int32.
        num_experts: G; None means the number of groups.
        out_dtype: of the result; None is the dtype of sums, f32 (f64 if an operand is f64).
        paired: N' is [2, M], and the kernels are a Pair.

    Returns:
        [G, K', *N'], or a Pair of [G, K', M]; zeros for experts without rows.
    """
    experts = math.prod(group_sizes.shape) if num_experts is None else num_experts
    dtype = wide(lhs, grad) if out_dtype is None else out_dtype

    def plain(lhs: Any, grad: Any, group_sizes: jax.Array) -> Any:
        return _gradients(gemm, lhs, None, grad, group_sizes, experts, dtype, paired)[0]

    by = _served_by(gemm, lhs, grad, _kernel_shape(experts, lhs, grad, group_sizes), group_sizes)
    if by is None:
        return plain(lhs, grad, group_sizes)
    kernel = _weight_kernel(gemm, by, experts, dtype, paired)
    return serve.choose(kernel, plain, lhs, grad, group_sizes)


def pullback(
    gemm: Gemm,
    lhs: Any,
    rhs: Any,
    grad: Any,
    group_sizes: jax.Array,
    out_dtype: Any = None,
    *,
    paired: bool = False,
) -> tuple[jax.Array, Any]:
    """Computes `data_grad` and `weight_grad`; in plain JAX one loop reads the gradient once."""
    experts = rhs.shape[0]
    dtype = wide(lhs, grad) if out_dtype is None else out_dtype
    by = _served_by(gemm, grad, rhs, rhs.shape, group_sizes)
    shape = _kernel_shape(experts, lhs, grad, group_sizes)
    if by is not _served_by(gemm, lhs, grad, shape, group_sizes):
        d_lhs = data_grad(gemm, grad, rhs, group_sizes)
        return d_lhs, weight_grad(gemm, lhs, grad, group_sizes, experts, out_dtype, paired)

    def plain(lhs: Any, rhs: Any, grad: Any, group_sizes: jax.Array) -> tuple[Any, ...]:
        return _gradients(gemm, lhs, rhs, grad, group_sizes, experts, dtype, paired)

    def kernels(lhs: Any, rhs: Any, grad: Any, group_sizes: jax.Array) -> tuple[Any, ...]:
        assert by is not None
        d_lhs = _data_kernel(gemm, by)(grad, rhs, group_sizes)
        return d_lhs, _weight_kernel(gemm, by, experts, dtype, paired)(lhs, grad, group_sizes)

    operands = (lhs, rhs, grad, group_sizes)
    d_lhs, d_rhs = plain(*operands) if by is None else serve.choose(kernels, plain, *operands)
    return d_lhs, d_rhs


def _kernel_shape(experts: int, lhs: Any, grad: Any, group_sizes: jax.Array) -> tuple[int, ...]:
    return (experts, lhs.shape[-1], *grad.shape[group_sizes.ndim :])


def _data_kernel(gemm: Gemm, by: GemmKernels) -> Kernel:
    static = (gemm.out_dtype, _cast_by(gemm, by), gemm.clear_slack)
    return functools.partial(by.data_grad, *static)


def _weight_kernel(
    gemm: Gemm, by: GemmKernels, experts: int, dtype: Any, paired: bool
) -> Callable[..., Any]:
    return functools.partial(by.weight_grad, dtype, _cast_by(gemm, by), experts, paired)


def _cast_by(gemm: Gemm, by: GemmKernels) -> Any:
    return gemm.compute_dtype if by.cast is None else by.cast


def _gradients(
    gemm: Gemm,
    lhs: Any,
    rhs: Any,
    grad: Any,
    group_sizes: jax.Array,
    experts: int = 0,
    weight_dtype: Any = None,
    paired: bool = False,
) -> tuple[Any, ...]:
    """Computes gradients of rows, unless rhs is None, and of kernels, unless lhs is None."""
    lead = group_sizes.ndim
    blocks = _cut(gemm, grad, group_sizes, 0 if lhs is None else _contracted_rows(lhs, grad))
    read = functools.partial(_row_reader, lead=lead, dtype=gemm.compute_dtype)
    # One step computes both gradients, so that rows are read once.
    outs: list[Any] = []
    steps: list[Callable[[row_blocks.RowBlock, Any], Any]] = []
    if rhs is not None:
        grads, kernels = read(grad), _kernel_reader(rhs, columns=True, dtype=gemm.compute_dtype)
        outs.append(jnp.zeros((blocks.num_rows, rhs.shape[1]), gemm.out_dtype))

        def to_rows(block: row_blocks.RowBlock, out: jax.Array) -> jax.Array:
            expert = blocks.expert(block, rhs.shape[0])
            return block.write(out, _dot(grads(block), kernels(expert), (1, 1)))

        steps.append(to_rows)
    if lhs is not None:
        rows, columns = read(lhs, columns=True), read(grad, columns=True)
        count = 1 + int(paired)
        width = math.prod(grad.shape[lead:]) // count
        outs.append([jnp.zeros((experts, lhs.shape[-1], width), wide(lhs, grad))] * count)

        def to_kernels(block: row_blocks.RowBlock, out: list[jax.Array]) -> list[jax.Array]:
            product = _dot(rows(block), columns(block), (0, 0))
            expert = blocks.expert(block, experts)
            parts = jnp.split(product, 2, axis=1) if paired else [product]
            summed = zip(out, parts, strict=True)
            return [row_blocks.add_at(each, expert, part) for each, part in summed]

        steps.append(to_kernels)

    def step(block: row_blocks.RowBlock, outs: list[Any]) -> list[Any]:
        return [each(block, out) for each, out in zip(steps, outs, strict=True)]

    made = row_blocks.loop(blocks, step, outs, lhs, rhs, grad)
    # The loop returns them with flat dims, and the kernels' gradient in the dtype of sums.
    if rhs is not None:
        made[0] = made[0].reshape(*grad.shape[:lead], rhs.shape[1])
    if lhs is not None:
        shape = of_each(_kernel_shape(experts, lhs, grad, group_sizes), paired)
        kernels_made = [each.reshape(shape).astype(weight_dtype) for each in made[-1]]
        made[-1] = Pair(*kernels_made) if paired else kernels_made[0]
    return tuple(made)


def bias_grad(
    gemm: Gemm, grad: Any, group_sizes: jax.Array, num_experts: int | None = None
) -> jax.Array:
    """Sums the gradient of the bias over rows: grad [C, *N'] -> [G, *N'], f32 (f64 for f64)."""
    experts = math.prod(group_sizes.shape) if num_experts is None else num_experts
    groups, trailing = group_sizes.shape, grad.shape[group_sizes.ndim :]
    summed = Product(grad, None, groups, experts, trailing, gemm.compute_dtype)
    kernel = functools.partial(kernels_bias.bias_grad, experts)
    plain = functools.partial(_bias_grad, gemm, experts)
    return serve.either(kernels_bias.supports(summed), kernel, plain, grad, group_sizes)


def _bias_grad(gemm: Gemm, experts: int, grad: Any, group_sizes: jax.Array) -> jax.Array:
    lead = group_sizes.ndim
    blocks = _cut(gemm, grad, group_sizes)
    grads = _row_reader(grad, lead, dtype=gemm.compute_dtype)
    trailing = grad.shape[lead:]
    out = jnp.zeros((experts, math.prod(trailing)), wide(grad))

    def step(block: row_blocks.RowBlock, out: jax.Array) -> jax.Array:
        part = grads(block)
        total = _scaled(part.values.astype(out.dtype).sum(0), part)
        return row_blocks.add_at(out, blocks.expert(block, experts), total)

    return row_blocks.loop(blocks, step, out, grad).reshape(experts, *trailing)


def wide(*operands: Any) -> Any:
    """Returns the dtype in which the operands' products are summed."""
    return sum_dtype(*(x.dtype for x in operands))


def _served_by(
    gemm: Gemm, rows: Any, other: Any, kernel: tuple[int, ...], group_sizes: jax.Array
) -> GemmKernels | None:
    """Returns the GPU kernels that support weights of the shape `kernel`, or None."""
    static = (gemm.compute_dtype, gemm.tf32)
    product = Product(rows, other, group_sizes.shape, kernel[0], kernel[1:], *static)
    return next((each for each in FAMILIES if each.supports(product)), None)


def _cut(gemm: Gemm, rows: Any, group_sizes: jax.Array, exactly: int = 0) -> row_blocks.Blocks:
    """Cuts each group's rows into blocks; all have `exactly` rows, if given, except the last."""
    capacity = rows.shape[group_sizes.ndim - 1]
    if exactly:
        return row_blocks.cut(capacity, group_sizes, exactly, most=exactly)
    return row_blocks.cut(capacity, group_sizes, gemm.alignment)


def dot(lhs: jax.Array, rhs: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Multiplies matrices over one dim of each; sums are wide."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(
        lhs.astype(dtype), rhs.astype(dtype), dims, preferred_element_type=wide(lhs, rhs)
    )


def _dot(lhs: Part, rhs: Part, contract: tuple[int, int]) -> jax.Array:
    return _scaled(_scaled(dot(lhs.values, rhs.values, contract), lhs), rhs)


def _scaled(result: jax.Array, part: Part) -> jax.Array:
    # One scale after the other, because the product of two small scales underflows f32.
    return result if part.scale is None else result * part.scale


def _row_reader(
    operand: Any, lead: int, *, columns: bool = False, dtype: Any = None
) -> Callable[[row_blocks.RowBlock], Part]:
    """Returns a function that reads a block's rows; rows of other groups are zeros.

    Args:
        operand: [C, ...] or [S, C, ...] array or QuantizedTensor.
        lead: number of dims for the rows, 1 or 2.
        columns: the GEMM contracts the rows: MXFP8's column-wise copy is read.
        dtype: dtype to which an array is cast; None does not cast.
    """
    if not isinstance(operand, QuantizedTensor):
        rows = flat(operand, lead)
        return lambda block: Part(matrix(_cast(block.read(rows), dtype)))
    return format_of(operand.recipe).row_reader(operand, lead, columns=columns)


def _contracted_rows(*operands: Any) -> int:
    """Returns the most rows of a block if a GEMM contracts rows of `operands`; 0: no limit."""
    wanted = [
        format_of(each.recipe).contracted_rows
        for each in operands
        if isinstance(each, QuantizedTensor)
    ]
    return max(wanted, default=0)


def _kernel_reader(
    operand: Any, *, columns: bool = False, dtype: Any = None
) -> Callable[[jax.Array], Part]:
    """Returns a function that reads one expert's kernel [K', all other dims].

    Args:
        operand: [G, K', *N'] array, Pair or QuantizedTensor.
        columns: the GEMM contracts N': MXFP8's column-wise copy is read.
        dtype: dtype to which an array is cast; None does not cast.
    """
    if isinstance(operand, Pair):
        # Join one expert's halves at a time, so that sums over N' run as for one array.
        halves = [_kernel_reader(half, dtype=dtype) for half in (operand.gate, operand.up)]
        return lambda expert: Part(jnp.concatenate([read(expert).values for read in halves], 1))
    if not isinstance(operand, QuantizedTensor):
        return lambda expert: Part(matrix(_cast(row_blocks.pick(operand, expert), dtype)))
    return format_of(operand.recipe).kernel_reader(operand, columns=columns)


def _cast(part: jax.Array, dtype: Any) -> jax.Array:
    return part if dtype is None else part.astype(dtype)
