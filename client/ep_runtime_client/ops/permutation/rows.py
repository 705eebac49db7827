"""Copies rows of a permutation out of tokens on one shard, and sums them back.

Both directions are gathers. A row without a slot is never added, and nothing is multiplied by a
mask: a NaN in such a row has no effect, a NaN in a filled row reaches the result. On a GPU the
kernels of `kernels/move_rows.py` run instead, if they support the arrays.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.base.dtypes import sum_dtype
from ep_runtime_client.ops.kernels import move_rows as kernels
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.kernels.slots import exclusive_sum, rows_at
from ep_runtime_client.ops.permutation.plan import PermutationArrays
from ep_runtime_client.ops.tracing.varying import like

# Up to this many slots are unrolled, so that one fused pass adds them up.
_WRITTEN_OUT = 16


def copied(values: jax.Array, source: jax.Array, slots: int) -> jax.Array:
    """Copies values [T, ...] of each row's token, zero if it has none: [rows, ...]."""
    kernel = functools.partial(kernels.copied, slots)
    plain = functools.partial(gathered, slots=slots)
    return either(kernels.supports(values, source, moves=True), kernel, plain, values, source)


def placed(values: jax.Array, arrays: PermutationArrays) -> jax.Array:
    """Like `copied`, for the rows of a plan [T, S]."""
    slots = arrays.slot_row.shape[1]
    if slots == 1:
        return copied(values, arrays.source, slots)

    def kernel(values: jax.Array, arrays: PermutationArrays) -> jax.Array:
        return kernels.spread(values, arrays.source, arrays.slot_row)[0]

    def plain(values: jax.Array, arrays: PermutationArrays) -> jax.Array:
        return gathered(values, arrays.source, slots)

    served = kernels.supports(values, arrays.slot_row, moves=True) and arrays.source.size > 0
    return either(served, kernel, plain, values, arrays)


def gathered(values: jax.Array, source: jax.Array, slots: int) -> jax.Array:
    """Like `copied`, with XLA's own ops on every platform."""
    if not values.size:
        zeros = jnp.zeros((source.shape[0], *values.shape[1:]), values.dtype)
        return like(like(zeros, values), source)
    filled = (source >= 0).reshape(-1, *[1] * (values.ndim - 1))
    rows = rows_at(values, jnp.maximum(source, 0) // slots)
    return jnp.where(filled, rows, jnp.zeros((), values.dtype))


def of_slots(values: jax.Array, slot_row: jax.Array) -> jax.Array:
    """Returns each slot's element of `values` [rows], by slot_row; 0 for slots without a row."""
    if not values.size:
        return like(like(jnp.zeros(slot_row.shape, values.dtype), values), slot_row)
    picked = rows_at(values, jnp.maximum(slot_row, 0))
    return jnp.where(slot_row >= 0, picked, jnp.zeros((), values.dtype))


def summed(
    rows: jax.Array, arrays: PermutationArrays, weights: jax.Array | None = None
) -> jax.Array:
    """Adds every token's rows [rows, H], times weights [T, S], in slot order: [T, H].

    Sums in f32 (f64 for f64 rows), rounded once to the dtype of the rows.
    """

    def kernel(rows: jax.Array, arrays: PermutationArrays, weights: jax.Array | None) -> jax.Array:
        return kernels.summed(rows, arrays.slot_row, weights)

    served = kernels.supports(rows, arrays.slot_row)
    return either(served, kernel, _summed, rows, arrays, weights)


def _summed(rows: jax.Array, arrays: PermutationArrays, weights: jax.Array | None) -> jax.Array:
    tokens, slots = arrays.slot_row.shape
    wide = sum_dtype(rows.dtype)
    total = jnp.zeros((tokens, rows.shape[1]), wide)
    for other in (rows, arrays.slot_row, weights):
        total = total if other is None else like(total, other)
    if not rows.size or not total.size:
        return total.astype(rows.dtype)
    first = None if arrays.row_count is None else exclusive_sum(arrays.row_count)

    def add(number: Any, total: jax.Array) -> jax.Array:
        entry = _entry(arrays, first, number)
        part = rows_at(rows, entry.row).astype(wide)
        if weights is not None:
            part = part * _weights_of(weights, entry.slot).astype(wide)[:, None]
        return total + jnp.where(entry.used[:, None], part, jnp.zeros((), wide))

    if arrays.row_count is not None:
        total = lax.fori_loop(0, arrays.row_count.max(), add, total)
    elif slots > _WRITTEN_OUT:
        total = lax.fori_loop(0, slots, add, total)
    else:
        for slot in range(slots):
            total = add(slot, total)
    return total.astype(rows.dtype)


class _Entry(NamedTuple):
    """One row of every token."""

    row: jax.Array  # [T]
    used: jax.Array  # [T] bool; if False, the row is arbitrary
    slot: Any  # one slot for all tokens, or [T]


def _entry(arrays: PermutationArrays, first: jax.Array | None, number: Any) -> _Entry:
    if first is None or arrays.listed is None or arrays.row_count is None:
        row = lax.dynamic_index_in_dim(arrays.slot_row, number, axis=1, keepdims=False)
        return _Entry(jnp.maximum(row, 0), row >= 0, number)
    at = jnp.minimum(first + number, arrays.listed.shape[0] - 1)
    row = rows_at(arrays.listed, at)
    source = jnp.maximum(rows_at(arrays.source, row), 0)
    return _Entry(row, number < arrays.row_count, source % arrays.slot_row.shape[1])


def _weights_of(weights: jax.Array, slot: Any) -> jax.Array:
    """Returns weights [T, S] at a slot that is a scalar or [T]: [T]."""
    if jnp.ndim(slot) == 0:
        return lax.dynamic_index_in_dim(weights, slot, axis=1, keepdims=False)
    return jnp.take_along_axis(weights, slot[:, None], axis=1)[:, 0]


def weighed(
    grads: jax.Array, source: jax.Array, weights: jax.Array | None, slots: int
) -> jax.Array:
    """Returns the gradient of `summed` for rows: each row's token's grads [T, H] times its weight.

    Zero for a row without a token; in the dtype of grads, which is the rows' dtype.
    """
    if weights is None or not weights.size:
        return copied(grads, source, slots)
    kernel, plain = (functools.partial(way, slots) for way in (kernels.weighed, _weighed))
    return either(kernels.supports(grads, source), kernel, plain, grads, source, weights)


def _weighed(slots: int, grads: jax.Array, source: jax.Array, weights: jax.Array) -> jax.Array:
    wide = sum_dtype(grads.dtype)
    at = jnp.maximum(source, 0)
    of_row = rows_at(weights.reshape(-1), at).astype(wide)
    rows = rows_at(grads, at // slots).astype(wide) * of_row[:, None]
    return jnp.where((source >= 0)[:, None], rows, jnp.zeros((), wide)).astype(grads.dtype)


def weighed_with_products(
    rows: jax.Array, grads: jax.Array, arrays: PermutationArrays, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns `weighed` and `products` of rows and grads; undefined for rows without a token."""
    slots = arrays.slot_row.shape[1]
    by_token = slots <= kernels.MAX_COMPARED_SLOTS

    def plain(
        rows: jax.Array, grads: jax.Array, arrays: PermutationArrays, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        d_rows = weighed(grads, arrays.source, weights, slots)
        return d_rows, products(rows, grads, arrays.source, slots)

    def kernel(
        rows: jax.Array, grads: jax.Array, arrays: PermutationArrays, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if by_token:
            return kernels.spread(grads, arrays.source, arrays.slot_row, weights, rows)
        return kernels.weighed_with_products(slots, rows, grads, arrays.source, weights)

    places = arrays.slot_row if by_token else arrays.source
    served = weights.size > 0 and rows.size > 0 and rows.dtype == grads.dtype
    served = served and kernels.supports(grads, places)
    return either(served, kernel, plain, rows, grads, arrays, weights)


def products(rows: jax.Array, grads: jax.Array, source: jax.Array, slots: int) -> jax.Array:
    """Sums each row times its token's grads [T, H] over H in f32: [rows]."""
    wide = sum_dtype(rows.dtype)
    of_row = copied(grads, source, slots).astype(wide)
    return (rows.astype(wide) * of_row).sum(1)
