"""Packs partial sums to send with combine_precision="fp8": e4m3, an f32 scale per 128 values.

Rounding is that of `ep.recipes`: scales are largest finite magnitude / 448, values to nearest even;
what is not finite comes out as NaN. So a sum is off by 2^-4 of each value at most, or by 2^-10 of
its scale where that is more.
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
    """Sums of 8 bits.

    Attributes:
        data: uint8 [..., H], e4m3.
        scale: f32 [..., ceil(H / 128)].
    """

    data: jax.Array
    scale: jax.Array


def takes(sums: jax.Array) -> bool:
    """Whether kernels make such rows of sums [R, H], lowered for a GPU."""
    return kernels.supports(sums[None], _one_group(sums))


def scaled(sums: jax.Array) -> ScaledRows:
    """Sums [R, H] as data [R, H] and scales. Kernels do it where they take them."""
    made = either(takes(sums), _by_kernel, _plain, sums)
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
    """f32 [R, H]."""
    spread = spread_tiles(rows.scale, 1, FP8_BLOCK, rows.data.shape[1])
    return widen(from_bits(rows.data, _DTYPE)) * spread


def packed(sums: jax.Array) -> jax.Array:
    """Sums [R, H] -> uint8 [R, bytes], so that one collective moves data and scales."""
    return to_bytes(*_plain(sums), FP8_BLOCK)


def unpacked(raw: jax.Array, hidden: int) -> jax.Array:
    """uint8 [R, bytes] -> f32 [R, hidden]."""
    return values(ScaledRows(*from_bytes(raw, hidden, FP8_BLOCK)))
