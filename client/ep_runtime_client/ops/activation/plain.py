"""Computes the experts' activation on one device, over existing rows only.

Zones follow each other from row 0 of a slab, so the rows of all experts are a prefix of the slab: a
loop with a dynamic trip count processes them in blocks, forward and backward. Nothing past the last
zone is read. On a GPU the kernels of `kernels.py` replace the loop if they support the call.

S: number of slabs on this device; more than one only if slabs are not sharded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops.activation import kernels
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.kernels import row_blocks, serve
from ep_runtime_client.ops.kernels.ffi import register_for_gpus
from ep_runtime_client.ops.tracing import slack

# A loop step costs tens of microseconds on a GPU; a block of this many rows hides them.
GPU_BLOCK_ROWS = 8192

Result = TypeVar("Result")


def forward(
    static: Activation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """Computes the activation of rows, times their weights.

    Args:
        static: the activation.
        hidden: [S, C, 2, M] (0 gate, 1 up), [S, C, 2M] (gate then up) or [S, C, M].
        row_weights: [S, C] f32 or None.
        group_sizes: [S, L] int32, rows of each expert's zone.

    Returns:
        [S, C, M] in static.dtype; past the last zone zeros, or undefined on a GPU.
    """
    operands = (hidden, row_weights, group_sizes)
    if kernels.supports(static, hidden, group_sizes):
        kernel = functools.partial(kernels.forward, static)
        plain = functools.partial(_forward, static, False)
        return slack.cleared(serve.choose(kernel, plain, *operands), group_sizes)
    return _on_platform(_forward, static, *operands)


def _on_platform(function: Callable[..., Result], static: Activation, *operands: Any) -> Result:
    """Calls `function(static, on_gpu, *operands)` for the platform of the lowered program."""
    here = functools.partial(function, static, False)
    if not register_for_gpus():
        return here(*operands)
    return serve.choose(functools.partial(function, static, True), here, *operands)


def _forward(
    static: Activation,
    on_gpu: bool,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    def block(_: Any, hidden: jax.Array, weights: jax.Array | None) -> tuple[jax.Array]:
        return (_weighted(static, hidden, weights),)

    width = math.prod(hidden.shape[2:]) // (2 if static.gated else 1)
    out = jnp.zeros((*hidden.shape[:2], width), static.dtype)
    return _walk((hidden, row_weights), (out,), group_sizes, block, on_gpu)[0]


def after(group_sizes: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `group_sizes` as a value that XLA computes only after `rows`.

    The pullback writes into the memory of hidden. If it could run before another reader of hidden,
    XLA would copy all rows of a slab: in a rematerialised block nothing else orders the two.
    """
    if rows.size == 0:
        return group_sizes
    first = rows[(0,) * rows.ndim]
    if not jnp.issubdtype(first.dtype, jnp.unsignedinteger):
        first = lax.bitcast_convert_type(first, f"uint{8 * first.dtype.itemsize}")
    nothing = lax.population_count(first) >> 7  # always 0, which XLA cannot prove
    return group_sizes + nothing.astype(group_sizes.dtype)


def pullback(
    static: Activation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    grad: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns gradients of hidden (its shape and dtype) and of row_weights ([S, C] f32, or None).

    `grad`: [S, C, M]; its values past the last zone are not read. There the gradient of hidden is
    undefined, and the gradient of row_weights zero. A weight's gradient sums over the columns of M
    on this device.
    """
    operands = (hidden, row_weights, group_sizes, grad)
    if kernels.supports(static, hidden, group_sizes):
        kernel = functools.partial(kernels.pullback, static)
        plain = functools.partial(_pullback, static, False)
        d_hidden, d_weights = serve.choose(kernel, plain, *operands)
    else:
        d_hidden, d_weights = _on_platform(_pullback, static, *operands)
    return slack.cleared(d_hidden, group_sizes), d_weights


def value_grads(
    static: Activation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    grad: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns gradients of `static.values`, in their dtypes, from `grad` [S, C, M]; None if int."""
    slabs, capacity = grad.shape[:2]
    blocks = row_blocks.cut(capacity, group_sizes)
    flat = [x.reshape(slabs * capacity, *x.shape[2:]) for x in (hidden, grad)]
    weights = None if row_weights is None else row_weights.reshape(-1)
    learned = [jnp.issubdtype(x.dtype, jnp.inexact) for x in static.values]
    start = [
        jnp.zeros(x.shape, jnp.promote_types(x.dtype, static.wide))
        for x, is_so in zip(static.values, learned, strict=True)
        if is_so
    ]

    def step(block: row_blocks.RowBlock, sums: list[jax.Array]) -> list[jax.Array]:
        rows, grads = (block.read(x) for x in flat)
        # Replace rows outside the block by a row inside it, so that the derivative exists.
        valid = block.valid.reshape(-1, *[1] * (rows.ndim - 1))
        rows = jnp.where(valid, rows, rows[jnp.argmax(block.valid)])

        def made(changed: list[jax.Array]) -> jax.Array:
            left = iter(changed)
            pairs = zip(static.values, learned, strict=True)
            values = tuple(next(left) if is_so else x for x, is_so in pairs)
            bound = dataclasses.replace(static, values=values)
            return _weighted(bound, rows, None if weights is None else block.read(weights))

        own = [x for x, is_so in zip(static.values, learned, strict=True) if is_so]
        (found,) = jax.vjp(made, own)[1](grads.astype(static.wide))
        return [total + part.astype(total.dtype) for total, part in zip(sums, found, strict=True)]

    found: list[jax.Array] = row_blocks.loop(
        blocks, step, start, *flat, weights, list(static.values)
    )
    sums = iter(found)
    return tuple(
        next(sums).astype(x.dtype) if is_so else None  # type: ignore[misc]
        for x, is_so in zip(static.values, learned, strict=True)
    )


def _pullback(
    static: Activation,
    on_gpu: bool,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    grad: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    # Gradients overwrite the rows in place, because a fresh buffer costs a fill of all C rows.
    # Narrow rows on CPU get a fresh buffer: XLA before 0.11 widens a whole bf16 buffer for every
    # slice that a loop changes.
    in_place = on_gpu or hidden.dtype == static.wide

    def block(
        before: tuple[jax.Array, ...],
        grad: jax.Array,
        weights: jax.Array | None,
        rows: jax.Array | None,
    ) -> Any:
        operands = (before[0] if rows is None else rows, *(() if weights is None else (weights,)))
        _, pull = jax.vjp(lambda h, w=None: _weighted(static, h, w), *operands)
        return pull(grad.astype(static.wide))

    start = hidden if in_place else jnp.zeros_like(hidden)
    outs = (start,) if row_weights is None else (start, jnp.zeros_like(row_weights))
    inputs = (grad, row_weights, None if in_place else hidden)
    grads = _walk(inputs, outs, group_sizes, block, on_gpu)
    return grads[0], None if row_weights is None else grads[1]


def _weighted(static: Activation, hidden: jax.Array, weights: jax.Array | None) -> jax.Array:
    values = static.rows(hidden)
    return values if weights is None else values * weights[:, None].astype(values.dtype)


def _walk(
    inputs: tuple[jax.Array | None, ...],
    outs: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    rows_to_rows: Callable[..., Any],
    on_gpu: bool,
) -> tuple[jax.Array, ...]:
    """Applies a function to rows of `outs` and the inputs that zones cover; returns new `outs`."""
    slabs, capacity = outs[0].shape[:2]
    totals = group_sizes.sum(-1, keepdims=True, dtype=jnp.int32)
    rows = GPU_BLOCK_ROWS if on_gpu else row_blocks.MAX_BLOCK_ROWS
    blocks = row_blocks.cut(capacity, totals, rows, rows)

    def flat(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.reshape(slabs * capacity, *x.shape[2:])

    reads = [flat(x) for x in inputs]

    def step(block: row_blocks.RowBlock, walked: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        parts = (None if x is None else block.read(x) for x in reads)
        before = tuple(block.read(out) for out in walked)
        results = zip(walked, rows_to_rows(before, *parts), strict=True)
        return tuple(block.write(out, part) for out, part in results)

    start = tuple(out.reshape(slabs * capacity, *out.shape[2:]) for out in outs)
    walked = row_blocks.loop(blocks, step, start, reads)
    return tuple(new.reshape(out.shape) for new, out in zip(walked, outs, strict=True))
