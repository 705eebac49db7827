"""The experts' matmuls in plain JAX, over row blocks of the rows that are there.

Every expert's zone is cut into ceil(rows / block) blocks; one loop with a dynamic trip count runs
over all blocks of all experts. Nothing is computed for experts without rows or for the slab's
tail, and rows past an expert's zone are masked before anything reads them. What comes before the
matmul (activation, weights) happens per block inside the loop, in backward too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ep_runtime_client.ops import twin
from ep_runtime_client.ops.calls import Call

MIN_BLOCK_ROWS = 64  # smaller dots spend their time in the loop's own steps
MAX_BLOCK_ROWS = 256

# Rows [block, ...] -> rows [block, K'], what the matmul of a stage multiplies.
Prologue = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One matmul of the experts. Hashable: a static argument.

    Attributes:
        call: the dispatch whose slabs it works on.
        prologue: applied to a block of rows before the matmul; None is the identity.
        dtype: what the operands are cast to, inside the loop.
    """

    call: Call
    prologue: Prologue | None
    dtype: Any

    @property
    def wide(self) -> Any:
        """Dtype of sums."""
        return jnp.float64 if self.dtype == jnp.float64 else jnp.float32


class _Blocks(NamedTuple):
    """Every row block of one slab."""

    rows: int  # rows of a block, static
    last: jax.Array  # [L] number of the block after an expert's last one
    blocks: jax.Array  # [L] blocks of each expert
    offset: jax.Array  # [L] first row of each expert
    end: jax.Array  # [L] row after each expert's last one


class _Block(NamedTuple):
    expert: jax.Array
    start: jax.Array  # first row of the slice that is read and written
    valid: jax.Array  # [block] the slice's rows that belong to this block


def grouped_matmul(
    stage: Stage,
    rows: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """prologue(rows) * row_weights times each expert's kernel, plus row_weights * bias.

    Args:
        stage: what is computed, and on which slabs.
        rows: [R, C, W], as dispatch laid them out; rows past the last zone are never trusted.
        kernel: [E, K', N'], dim 0 over the ep axes that are not manual.
        bias: [E, N'] or None.
        row_weights: [R, C] f32 or None.
        group_sizes: [R, L] int32, aligned rows per expert.

    Returns:
        [R, C, N'] in the stage's dtype; zero past the last zone. Differentiable in rows, kernel,
        bias and row_weights.
    """
    call = twin.varied(stage.call, rows, kernel, bias, row_weights, group_sizes)
    rows = twin.vary(call, twin.place(call, "rows", rows, twin.slab_spec(call)))
    kernel = twin.vary(call, kernel)
    bias = None if bias is None else twin.vary(call, bias)
    row_weights = None if row_weights is None else twin.vary(call, row_weights)
    operands = (rows, kernel, bias, row_weights, group_sizes)
    stage = dataclasses.replace(stage, call=call.anonymous())
    out: jax.Array = twin.run(_matmul_primal, stage, *operands, traced=_matmul)
    return out


def _cut(stage: Stage, capacity: int, group_sizes: jax.Array) -> _Blocks:
    alignment = stage.call.layer.alignment
    rows = min(capacity, max(MIN_BLOCK_ROWS, min(alignment, MAX_BLOCK_ROWS)))
    count = (group_sizes + rows - 1) // rows
    end = jnp.cumsum(group_sizes, dtype=jnp.int32)
    return _Blocks(rows, jnp.cumsum(count, dtype=jnp.int32), count, end - group_sizes, end)


def _block(blocks: _Blocks, capacity: int, number: jax.Array) -> _Block:
    expert = (number >= blocks.last).sum(dtype=jnp.int32)
    within = number - (blocks.last[expert] - blocks.blocks[expert])
    first = blocks.offset[expert] + within * blocks.rows
    # A slice never leaves the slab; the mask keeps its rows before `first` as they were.
    start = jnp.minimum(first, capacity - blocks.rows)
    row = start + jnp.arange(blocks.rows, dtype=jnp.int32)
    return _Block(expert, start, (row >= first) & (row < blocks.end[expert]))


def _read(array: jax.Array, blocks: _Blocks, block: _Block) -> jax.Array:
    """The block's rows of `array`, zero where the mask is off."""
    part = lax.dynamic_slice_in_dim(array, block.start, blocks.rows)
    mask = block.valid.reshape(-1, *([1] * (part.ndim - 1)))
    return jnp.where(mask, part, jnp.zeros((), part.dtype))


def _write(array: jax.Array, blocks: _Blocks, block: _Block, values: jax.Array) -> jax.Array:
    before = lax.dynamic_slice_in_dim(array, block.start, blocks.rows)
    mask = block.valid.reshape(-1, *([1] * (before.ndim - 1)))
    merged = jnp.where(mask, values.astype(array.dtype), before)
    return lax.dynamic_update_slice_in_dim(array, merged, block.start, 0)


def _pick(array: jax.Array, expert: jax.Array) -> jax.Array:
    picked: jax.Array = lax.dynamic_index_in_dim(array, expert, 0, keepdims=False)
    return picked


def _add_at(array: jax.Array, expert: jax.Array, values: jax.Array) -> jax.Array:
    total = _pick(array, expert) + values.astype(array.dtype)
    added: jax.Array = lax.dynamic_update_index_in_dim(array, total, expert, 0)
    return added


def _inputs(stage: Stage, rows: jax.Array, row_weights: jax.Array | None) -> jax.Array:
    """What the matmul multiplies: [block, K'] in the stage's dtype."""
    values = rows.astype(stage.dtype)
    if stage.prologue is not None:
        values = stage.prologue(values)
    if row_weights is not None:
        values = values * row_weights[:, None].astype(values.dtype)
    return values.astype(stage.dtype)


def _dot(stage: Stage, lhs: jax.Array, rhs: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(lhs, rhs, dims, preferred_element_type=stage.wide)


def _local_matmul(
    stage: Stage,
    rows: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """One device: rows [C, W], kernel [L, K', N'], group_sizes [L] -> [C, N']."""
    capacity = rows.shape[0]
    out = jnp.zeros((capacity, kernel.shape[-1]), stage.dtype)
    if capacity == 0:
        return out
    blocks = _cut(stage, capacity, group_sizes)

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        block = _block(blocks, capacity, number)
        part = None if row_weights is None else _read(row_weights, blocks, block)
        values = _inputs(stage, _read(rows, blocks, block), part)
        result = _dot(stage, values, _pick(kernel, block.expert).astype(stage.dtype), (1, 0))
        if bias is not None:
            added = _pick(bias, block.expert).astype(stage.wide)[None]
            result = result + (added if part is None else added * part[:, None])
        return _write(out, blocks, block, result)

    result: jax.Array = lax.fori_loop(0, blocks.last[-1], step, twin.vary(stage.call, out))
    return result


def _local_pullback(
    stage: Stage,
    rows: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    grad: jax.Array,
) -> Any:
    """One device: grad [C, N'] -> gradients of rows, kernel, bias (in f32), row_weights."""
    capacity, wide = rows.shape[0], stage.wide
    carry = (
        jnp.zeros_like(rows),
        jnp.zeros(kernel.shape, wide),
        None if bias is None else jnp.zeros(bias.shape, wide),
        None if row_weights is None else jnp.zeros_like(row_weights),
    )
    if capacity == 0:
        return carry
    blocks = _cut(stage, capacity, group_sizes)

    def step(number: jax.Array, carry: Any) -> Any:
        d_rows, d_kernel, d_bias, d_weights = carry
        block = _block(blocks, capacity, number)
        part = None if row_weights is None else _read(row_weights, blocks, block)
        grads = _read(grad, blocks, block).astype(stage.dtype)
        values, pullback = jax.vjp(
            lambda x, w: _inputs(stage, x, w), _read(rows, blocks, block), part
        )
        expert = block.expert
        weight = _pick(kernel, expert).astype(stage.dtype)
        d_values = _dot(stage, grads, weight, (1, 1)).astype(stage.dtype)
        d_block, d_part = pullback(d_values)
        d_kernel = _add_at(d_kernel, expert, _dot(stage, values, grads, (0, 0)))
        if d_bias is not None and bias is not None:
            scaled = grads.astype(wide) * (1 if part is None else part[:, None])
            d_bias = _add_at(d_bias, expert, scaled.sum(0))
            if part is not None:
                d_part = d_part + (grads.astype(wide) * _pick(bias, expert).astype(wide)).sum(-1)
        if d_weights is not None:
            d_weights = _write(d_weights, blocks, block, d_part)
        return _write(d_rows, blocks, block, d_block), d_kernel, d_bias, d_weights

    carry = jax.tree.map(functools.partial(twin.vary, stage.call), carry)
    return lax.fori_loop(0, blocks.last[-1], step, carry)


def _spread(stage: Stage, operands: tuple[Any, ...], body: Callable[..., Any], out: Any) -> Any:
    """`body` per device on (rows, kernel, bias, row_weights, group_sizes, *grads), with Nones."""
    call = stage.call
    slab, ep = twin.slab_spec(call), PartitionSpec(call.ep_axes)
    specs = [ep if place in (1, 2) else slab for place in range(len(operands))]
    given = [place for place, x in enumerate(operands) if x is not None]

    def local(*blocks: jax.Array) -> Any:
        args: list[Any] = [None] * len(operands)
        for place, block in zip(given, blocks, strict=True):
            args[place] = block if place in (1, 2) else block[0]
        return body(*args)

    return twin.per_device(
        call, local, [operands[p] for p in given], [specs[p] for p in given], out
    )


def _matmul_primal(stage: Stage, *operands: Any) -> jax.Array:
    result: jax.Array = _spread(
        stage,
        operands,
        lambda *args: _local_matmul(stage, *args)[None],
        twin.slab_spec(stage.call),
    )
    return result


def _matmul_fwd(stage: Stage, *operands: Any) -> Any:
    return twin.shared(_matmul_primal, stage, *operands), operands


def _pullback(stage: Stage, operands: Any, grad: jax.Array) -> Any:
    """Gradients of the operands; the experts' are summed over the ranks that share them."""
    call = stage.call
    sizes = call.group.axis_sizes
    # Over manual axes the user's shard_map sums, where the kernel is replicated.
    shared = tuple(a for a in call.slab_axes if a not in call.group.ep_axis and sizes[a] > 1)
    present = [operands[place] is not None for place in range(4)]

    def body(*args: Any) -> Any:
        d_rows, d_kernel, d_bias, d_weights = _local_pullback(stage, *args)
        if shared:
            d_kernel = lax.psum(d_kernel, shared)
            d_bias = None if d_bias is None else lax.psum(d_bias, shared)
        d_kernel = d_kernel.astype(operands[1].dtype)
        d_bias = None if d_bias is None else d_bias.astype(operands[2].dtype)
        grads = (d_rows[None], d_kernel, d_bias, None if d_weights is None else d_weights[None])
        return tuple(g for g, here in zip(grads, present, strict=True) if here)

    slab, ep = twin.slab_spec(call), PartitionSpec(call.ep_axes)
    out = tuple(s for s, here in zip((slab, ep, ep, slab), present, strict=True) if here)
    found = iter(_spread(stage, (*operands, grad), body, out))
    return tuple(next(found) if here else None for here in present)


def _matmul_bwd(stage: Stage, operands: Any, grad: jax.Array) -> Any:
    return (*twin.shared(_pullback, stage, operands, grad), None)


_matmul = jax.custom_vjp(_matmul_primal, nondiff_argnums=(0,))
_matmul.defvjp(_matmul_fwd, _matmul_bwd)
