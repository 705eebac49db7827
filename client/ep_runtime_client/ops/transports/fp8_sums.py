"""Packs partial sums for combine_precision="fp8": e4m3 data and an f32 scale per 128 values.

Rounding is as in `ep.recipes`. A scale is the largest finite magnitude / 448. Values are rounded to
nearest even, and those that are not finite become NaN. So the error of a sum is at most 2^-4 of
each value, or 2^-10 of its scale if that is larger.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep_runtime.layout import FP8_BLOCK
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.quantize import kernels
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits, spread_tiles, widen
from ep_runtime_client.ops.quantize.rounding import quantize_tiles
from ep_runtime_client.ops.quantize.row_bytes import from_bytes, to_bytes

_DTYPE = jnp.float8_e4m3fn


class ScaledRows(NamedTuple):
    """Sums quantized to 8 bits.

    Attributes:
        data: uint8 [..., H], e4m3.
        scale: f32 [..., ceil(H / 128)].
    """

    data: jax.Array
    scale: jax.Array


def supports(sums: jax.Array) -> bool:
    """Whether kernels can quantize sums [R, H], lowered for a GPU."""
    return kernels.supports(sums[None], _one_group(sums))


def scaled(sums: jax.Array) -> ScaledRows:
    """Quantizes sums [R, H] to data [R, H] and scales, with GPU kernels if supported."""
    made = either(supports(sums), _by_kernel, _plain, sums)
    return ScaledRows(*made)


def _one_group(sums: jax.Array) -> jax.Array:
    return jnp.full((1, 1), sums.shape[0], jnp.int32)


def _by_kernel(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    data, scale = kernels.tile_rows(_DTYPE, False, False, sums[None], _one_group(sums))
    return bits(data[0]), scale[0]


def _plain(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    data, scale = quantize_tiles(sums.astype(jnp.float32), {1: FP8_BLOCK}, _DTYPE, False)
    return bits(data), scale


def values(rows: ScaledRows) -> jax.Array:
    """Dequantizes to f32 [R, H]."""
    spread = spread_tiles(rows.scale, 1, FP8_BLOCK, rows.data.shape[1])
    return widen(from_bits(rows.data, _DTYPE)) * spread


def packed(sums: jax.Array) -> jax.Array:
    """Packs sums [R, H] into uint8 [R, bytes], so that one collective moves data and scales."""
    return to_bytes(*_plain(sums), FP8_BLOCK)


def unpacked(raw: jax.Array, hidden: int) -> jax.Array:
    """Unpacks uint8 [R, bytes] into f32 [R, hidden]."""
    return values(ScaledRows(*from_bytes(raw, hidden, FP8_BLOCK)))
