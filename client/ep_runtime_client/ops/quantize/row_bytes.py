"""Packs rows of 8-bit values and their scales as bytes, so that one exchange moves both.

A row starts with its data. Its f32 scales follow at the next multiple of 4 bytes. Zeros fill it up
to a multiple of 16 bytes, because GPU windows and NCCL need that. Scales are xored with 1.0. So a
row of zero bytes, with which dispatch fills padding, means zeros with scales of 1, the same as
quantized padding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.layout import align_up, scaled_bytes
from ep_runtime_client.ops.quantize.formats.tiles import bits, num_tiles

_SCALE_BYTES = 4
_MULTIPLE = 16
_ONE = 0x3F800000  # 1.0


def row_bytes(hidden: int, tile: int) -> int:
    """Returns the bytes of a row of `hidden` values with one scale per `tile` values."""
    return align_up(scaled_bytes(hidden, tile), _MULTIPLE)


def to_bytes(data: jax.Array, scale: jax.Array, tile: int) -> jax.Array:
    """Packs 8-bit data [rows, H] and f32 scales [rows, ceil(H / tile)] as uint8 [rows, bytes]."""
    rows, hidden = data.shape
    xored = lax.bitcast_convert_type(scale, jnp.uint32) ^ jnp.uint32(_ONE)
    tail = lax.bitcast_convert_type(xored, jnp.uint8).reshape(rows, -1)
    first = align_up(hidden, _SCALE_BYTES)
    after = row_bytes(hidden, tile) - first - tail.shape[1]
    values = jnp.pad(bits(data), ((0, 0), (0, first - hidden)))
    return jnp.concatenate([values, jnp.pad(tail, ((0, 0), (0, after)))], 1)


def from_bytes(raw: jax.Array, hidden: int, tile: int) -> tuple[jax.Array, Any]:
    """Unpacks the bytes that `to_bytes` makes into uint8 data [rows, H] and f32 scales."""
    first, count = align_up(hidden, _SCALE_BYTES), num_tiles(hidden, tile)
    tail = lax.slice_in_dim(raw, first, first + count * _SCALE_BYTES, axis=1)
    xored = lax.bitcast_convert_type(tail.reshape(-1, count, _SCALE_BYTES), jnp.uint32)
    scale = lax.bitcast_convert_type(xored ^ jnp.uint32(_ONE), jnp.float32)
    return lax.slice_in_dim(raw, 0, hidden, axis=1), scale
