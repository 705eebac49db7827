"""Widens 8-bit data, spreads the scales of its tiles, and casts data to bytes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def widen(data: jax.Array) -> jax.Array:
    """Casts 8-bit or bf16 data to f32, exactly."""
    return data.astype(jnp.float32)


def spread_tiles(scale: jax.Array, axis: int, tile: int, length: int) -> jax.Array:
    """Repeats each scale `tile` times along `axis`, cut to `length`."""
    shape = scale.shape
    wide = jnp.broadcast_to(
        jnp.expand_dims(scale, axis + 1), (*shape[: axis + 1], tile, *shape[axis + 1 :])
    )
    wide = wide.reshape(*shape[:axis], shape[axis] * tile, *shape[axis + 1 :])
    return jax.lax.slice_in_dim(wide, 0, length, axis=axis)


def row_scales(capacity: int, group_sizes: jax.Array, scale: jax.Array) -> jax.Array:
    """Spreads sizes and scales [..., L] of groups to a scale per row [..., capacity], else 0."""
    ends = jnp.cumsum(group_sizes, axis=-1, dtype=jnp.int32)[..., None, :]
    sizes, scale = group_sizes[..., None, :], scale[..., None, :]
    rows = jnp.arange(capacity, dtype=jnp.int32)[:, None]
    # Compare and sum rather than gather, because JAX finds no sharding for a gather whose indices
    # are sharded over slabs.
    inside = (rows >= ends - sizes) & (rows < ends)
    return jnp.where(inside, scale, 0).sum(-1)


def bits(data: jax.Array) -> jax.Array:
    """Casts 1-byte floats to uint8, which every collective and slice moves as bytes."""
    if data.dtype.itemsize != 1 or data.dtype == jnp.uint8:
        return data
    return jax.lax.bitcast_convert_type(data, jnp.uint8)


def from_bits(raw: jax.Array, dtype: Any) -> jax.Array:
    """Casts back; the inverse of `bits`."""
    if raw.dtype == dtype:
        return raw
    return jax.lax.bitcast_convert_type(raw, dtype)


def num_tiles(length: int, tile: int) -> int:
    """Returns the number of scales along a dim of `length` values."""
    return math.ceil(length / tile)
