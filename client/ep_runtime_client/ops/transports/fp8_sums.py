"""Partial sums on their way where combine_precision is "fp8": e4m3, an f32 scale per 128 values.

Both travel as bytes, so that one exchange moves them. Rounding is that of `ep.recipes`: scales are
largest finite magnitude / 448, values to nearest even; what is not finite comes out as NaN. So a
sum is off by 2^-4 of each value at most, or by 2^-10 of its scale where that is more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ep_runtime.layout import FP8_BLOCK
from ep_runtime_client.ops.quantize.formats.tiles import from_bits, spread_tiles, widen
from ep_runtime_client.ops.quantize.rounding import quantize_tiles
from ep_runtime_client.ops.quantize.row_bytes import from_bytes, to_bytes

_DTYPE = jnp.float8_e4m3fn


def packed(sums: jax.Array) -> jax.Array:
    """Sums [R, H] -> uint8 [R, bytes]."""
    data, scale = quantize_tiles(sums.astype(jnp.float32), {1: FP8_BLOCK}, _DTYPE, False)
    return to_bytes(data, scale, FP8_BLOCK)


def unpacked(raw: jax.Array, hidden: int) -> jax.Array:
    """uint8 [R, bytes] -> f32 [R, hidden]."""
    data, scale = from_bytes(raw, hidden, FP8_BLOCK)
    return widen(from_bits(data, _DTYPE)) * spread_tiles(scale, 1, FP8_BLOCK, hidden)
