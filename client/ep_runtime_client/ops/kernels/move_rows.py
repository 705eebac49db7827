"""Moves rows of a permutation on a GPU: custom calls of the CUDA library.

Rows that only move may have any dtype; weighted or summed rows are f32, bf16 or f16. The width of a
row is a multiple of 16 bytes. Letters and meaning as in `permutation/rows.py`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels import serve as kernels_serve
from ep_runtime_client.ops.kernels.ffi import targets

TARGETS = targets(
    "ep_gather_rows_v1", "ep_sum_rows_v1", "ep_spread_rows_v1", "ep_sum_scaled_rows_v1"
)
MAX_COMPARED_SLOTS = 32  # of a token: slots past these are read even if they have no row
_BYTES = ("bool", "int8", "uint8", "float8")  # not int4 and the like, which share bytes


def supports(values: jax.Array, places: jax.Array, *, moves: bool = False) -> bool:
    """Whether the kernels support rows [rows, ...] and their indices, lowered for a GPU.

    `moves`: the rows are neither weighted nor summed.
    """
    if values.ndim < 2 or not kernels_serve.available():
        return False
    kind = values.dtype
    right = kind in kernels_serve.FLOATS
    if moves:
        right = kind.itemsize > 1 or kind.name.startswith(_BYTES)
    width = math.prod(values.shape[1:])
    limits = max(places.size, values.shape[0]) < 2**31
    return (
        right and limits and places.size > 0 and kernels_serve.supports((1,), values, width=width)
    )


def supports_scaled(dtype: Any, data: jax.Array, places: jax.Array) -> bool:
    """Whether `summed_scaled` supports data [rows, H] and their indices, lowered for a GPU."""
    limits = max(places.size, data.shape[0]) < 2**31 and data.size > 0 and places.size > 0
    multiple = kernels_serve.CONVERTED_MULTIPLE
    right = jnp.dtype(dtype) in kernels_serve.FLOATS and data.shape[1] % multiple == 0
    return limits and right and kernels_serve.available()


def copied(slots: int, values: jax.Array, source: jax.Array) -> jax.Array:
    """Like `permutation.rows.copied`."""
    return _gathered(slots, values, source, None, None)[0]


def weighed(slots: int, grads: jax.Array, source: jax.Array, weights: jax.Array) -> jax.Array:
    """Like `permutation.rows.weighed` with weights."""
    return _gathered(slots, grads, source, weights, None)[0]


def weighed_with_products(
    slots: int, rows: jax.Array, grads: jax.Array, source: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns `weighed`, and `permutation.rows.products`, which are 0 for rows without a token."""
    return _gathered(slots, grads, source, weights, rows)


def spread(
    values: jax.Array,
    source: jax.Array,
    slot_row: jax.Array,
    weights: jax.Array | None = None,
    others: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns `weighed`, and `products` if `others` are given. Reads each token only once."""
    flat = values.reshape(values.shape[0], -1)
    given = jnp.zeros((0, 0), jnp.float32) if weights is None else weights.astype(jnp.float32)
    beside = jnp.zeros((0, 0), values.dtype) if others is None else others
    results = (
        jax.ShapeDtypeStruct((source.shape[0], flat.shape[1]), values.dtype),
        jax.ShapeDtypeStruct((0 if others is None else source.shape[0],), jnp.float32),
    )
    operands = (source, slot_row, flat, given, beside)
    rows, products = kernels_serve.call(TARGETS[2], results, operands)
    return rows.reshape(source.shape[0], *values.shape[1:]), products


def summed(rows: jax.Array, slot_row: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Like `permutation.rows.summed`."""
    result = jax.ShapeDtypeStruct((slot_row.shape[0], rows.shape[1]), rows.dtype)
    given = jnp.zeros((0, 0), jnp.float32) if weights is None else weights.astype(jnp.float32)
    (total,) = kernels_serve.call(TARGETS[1], (result,), (slot_row, rows, given))
    return total


def summed_scaled(dtype: Any, data: jax.Array, scale: jax.Array, slot_row: jax.Array) -> jax.Array:
    """Sums e4m3 rows [R, H] (as uint8), with f32 scales [R, ceil(H / 128)], by slot_row [T, S] (-1:
    none) -> [T, H], summed in f32 and rounded to `dtype` once."""
    result = jax.ShapeDtypeStruct((slot_row.shape[0], data.shape[1]), dtype)
    (total,) = kernels_serve.call(TARGETS[3], (result,), (slot_row, data, scale))
    return total


def _gathered(
    slots: int,
    values: jax.Array,
    source: jax.Array,
    weights: jax.Array | None,
    others: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    flat = values.reshape(values.shape[0], -1)
    given = jnp.zeros(0, jnp.float32) if weights is None else weights.astype(jnp.float32)
    beside = jnp.zeros((0, 0), values.dtype) if others is None else others
    results = (
        jax.ShapeDtypeStruct((source.shape[0], flat.shape[1]), values.dtype),
        jax.ShapeDtypeStruct((0 if others is None else source.shape[0],), jnp.float32),
    )
    operands = (source, flat, given.reshape(-1), beside)
    rows, products = kernels_serve.call(TARGETS[0], results, operands, {"slots": slots})
    return rows.reshape(source.shape[0], *values.shape[1:]), products
