"""Grouped GEMM on one device, in plain JAX: one dot per row block of the rows that are there.

Letters: C rows of a slab, S slabs on this device, L groups of a slab, G experts of the weights on
this device, K' contracted, N' the kernel's trailing dims (one, or more such as [2, M]).

Every function takes rows [C, ...] with group_sizes [L], or [S, C, ...] with [S, L]; group l of
slab s uses expert (s * L + l) % G. Rows past sum(group_sizes) are neither read nor trusted and
come out as zeros. Nothing here is differentiable: the ops around it define their gradients by
`data_grad`, `weight_grad` and `bias_grad`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops import row_blocks
from ep_runtime_client.ops.row_blocks import Block, Blocks


@dataclasses.dataclass(frozen=True)
class Gemm:
    """What is static about a grouped GEMM. Hashable.

    Attributes:
        out_dtype: dtype of the rows that `forward` and `data_grad` return.
        alignment: what group sizes are known to be multiples of; chooses the block's rows only.
    """

    out_dtype: Any
    alignment: int = 1


def forward(
    gemm: Gemm, lhs: Any, rhs: Any, bias: jax.Array | None, group_sizes: jax.Array
) -> jax.Array:
    """Each group's rows times its expert's kernel, plus its bias.

    Args:
        gemm: static description.
        lhs: [C, K'] rows.
        rhs: [G, K', *N'] kernels.
        bias: [G, *N'] or None; added in the dtype of sums.
        group_sizes: [L] int32, on the device, any counts.

    Returns:
        [C, *N'] in gemm.out_dtype, summed in f32 (f64 where an operand is f64).

    Cost: sum(ceil(group_size / block)) dots, and C * N' zeros.
    """
    shape = (*lhs.shape[:-1], *rhs.shape[2:])
    blocks = _cut(gemm, lhs, group_sizes)
    rows = _flat_rows(lhs, group_sizes)
    out = jnp.zeros((blocks.num_rows, *rhs.shape[2:]), gemm.out_dtype)

    def step(block: Block, out: jax.Array) -> jax.Array:
        expert = block.group % rhs.shape[0]
        result = _dot(_read(rows, block), _matrix(rhs, expert), (1, 0))
        result = result.reshape(-1, *rhs.shape[2:])
        if bias is not None:
            result = result + row_blocks.pick(bias, expert).astype(result.dtype)
        return block.write(out, result)

    return row_blocks.loop(blocks, step, out, lhs, rhs, bias).reshape(shape)


def data_grad(gemm: Gemm, grad: Any, rhs: Any, group_sizes: jax.Array) -> jax.Array:
    """Gradient of the rows: grad [C, *N'], rhs [G, K', *N'] -> [C, K'] in gemm.out_dtype."""
    lead = group_sizes.ndim
    blocks = _cut(gemm, grad, group_sizes)
    rows = _flat_rows(grad, group_sizes)
    out = jnp.zeros((blocks.num_rows, rhs.shape[1]), gemm.out_dtype)

    def step(block: Block, out: jax.Array) -> jax.Array:
        matrix = _matrix(rhs, block.group % rhs.shape[0])
        return block.write(out, _dot(_read(rows, block), matrix, (1, 1)))

    out = row_blocks.loop(blocks, step, out, grad, rhs)
    return out.reshape(*grad.shape[:lead], rhs.shape[1])


def weight_grad(
    gemm: Gemm, lhs: Any, grad: Any, group_sizes: jax.Array, num_experts: int | None = None
) -> jax.Array:
    """Gradient of the kernels.

    Args:
        gemm: static description.
        lhs: [C, K'] rows of the forward pass.
        grad: [C, *N'].
        group_sizes: [L] int32.
        num_experts: G; None is as many as there are groups.

    Returns:
        [G, K', *N'] in f32 (f64 where an operand is f64), zeros for experts without rows.
    """
    trailing = grad.shape[group_sizes.ndim :]
    blocks = _cut(gemm, lhs, group_sizes)
    rows, grads = _flat_rows(lhs, group_sizes), _flat_rows(grad, group_sizes)
    experts = math.prod(group_sizes.shape) if num_experts is None else num_experts
    out = jnp.zeros((experts, lhs.shape[-1], math.prod(trailing)), _wide(lhs, grad))

    def step(block: Block, out: jax.Array) -> jax.Array:
        product = _dot(_read(rows, block), _read(grads, block), (0, 0))
        return row_blocks.add_at(out, block.group % experts, product)

    out = row_blocks.loop(blocks, step, out, lhs, grad)
    return out.reshape(experts, lhs.shape[-1], *trailing)


def bias_grad(
    gemm: Gemm, grad: Any, group_sizes: jax.Array, num_experts: int | None = None
) -> jax.Array:
    """Gradient of the bias: grad [C, *N'] -> [G, *N'] in f32 (f64 for f64), summed over rows."""
    trailing = grad.shape[group_sizes.ndim :]
    blocks = _cut(gemm, grad, group_sizes)
    grads = _flat_rows(grad, group_sizes)
    experts = math.prod(group_sizes.shape) if num_experts is None else num_experts
    out = jnp.zeros((experts, math.prod(trailing)), _wide(grad))

    def step(block: Block, out: jax.Array) -> jax.Array:
        total = _read(grads, block).astype(out.dtype).sum(0)
        return row_blocks.add_at(out, block.group % experts, total)

    return row_blocks.loop(blocks, step, out, grad).reshape(experts, *trailing)


def _wide(*operands: Any) -> Any:
    """Dtype of sums."""
    return jnp.float64 if any(x.dtype == jnp.float64 for x in operands) else jnp.float32


def _cut(gemm: Gemm, rows: Any, group_sizes: jax.Array) -> Blocks:
    return row_blocks.cut(rows.shape[group_sizes.ndim - 1], group_sizes, gemm.alignment)


def _flat_rows(array: Any, group_sizes: jax.Array) -> Any:
    """All slabs' rows as one dim 0."""
    lead = group_sizes.ndim
    return array.reshape(math.prod(array.shape[:lead]), *array.shape[lead:])


def _read(rows: Any, block: Block) -> jax.Array:
    """[rows of a block, everything else]."""
    part = block.read(rows)
    return part.reshape(part.shape[0], -1)


def _matrix(kernels: Any, expert: jax.Array) -> jax.Array:
    """[K', everything else]."""
    part = row_blocks.pick(kernels, expert)
    return part.reshape(part.shape[0], -1)


def _dot(lhs: jax.Array, rhs: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(
        lhs.astype(dtype), rhs.astype(dtype), dims, preferred_element_type=_wide(lhs, rhs)
    )
