"""Computes scales and 8-bit values in plain JAX, with the arithmetic of `ep.recipes`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops.quantize.formats.tiles import num_tiles, spread_tiles

SMALLEST = 2.0**-126  # the smallest normal f32; CPUs flush smaller values to zero
SCALE_DTYPE = jnp.float8_e8m0fnu
_MANTISSA = 0x7FFFFF
_IMPLICIT = 0x800000  # the bit of a normal f32's mantissa that is not stored
_THREE_QUARTERS = 0x600000  # mantissa of 1.75: both 448 and 57344 are 1.75 times a power of two


def finite_max(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the largest finite absolute value of f32 `x` over `axes`, 0 if there is none."""
    size = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    return jnp.max(size, axis=axes, initial=0)


def scale_of(amax: jax.Array, dtype: Any, power_of_two: bool = False) -> jax.Array:
    """Returns f32 scales for f32 `amax` and data of `dtype`, as `ep.recipes` defines them."""
    if power_of_two:
        return _power_of_two(amax, dtype)
    return jnp.where(amax < SMALLEST, jnp.float32(1), _over_max(amax, dtype))


def _over_max(amax: jax.Array, dtype: Any) -> jax.Array:
    """Divides amax by max to the nearest f32, at least SMALLEST, in integers.

    max is 7 * 2^shift for both dtypes. Not a division, because XLA would multiply by the constant's
    inverse, and its division on GPUs may be wrong in the last two bits.
    """
    shift = math.frexp(float(jnp.finfo(dtype).max))[1] - 3
    raw = lax.bitcast_convert_type(amax, jnp.int32)
    mantissa = (raw & _MANTISSA) | _IMPLICIT
    up = jnp.where(mantissa >= 7 << 21, 2, 3)  # so that the quotient has 24 bits
    quotient = ((mantissa << up) + 3) // 7  # to nearest; a seventh is never a tie
    biased = (raw >> 23) - up - shift
    scale = lax.bitcast_convert_type((biased << 23) | (quotient & _MANTISSA), jnp.float32)
    return jnp.where(biased < 1, jnp.float32(SMALLEST), scale)


def _power_of_two(amax: jax.Array, dtype: Any) -> jax.Array:
    """Returns 2^ceil(log2(amax / max)) from the bits: max is 1.75 * 2^exponent for both dtypes."""
    exponent = math.frexp(float(jnp.finfo(dtype).max))[1] - 1
    raw = lax.bitcast_convert_type(amax, jnp.int32)
    biased = (raw >> 23) - exponent + ((raw & _MANTISSA) > _THREE_QUARTERS).astype(jnp.int32)
    scale = lax.bitcast_convert_type(jnp.clip(biased, 1, 254) << 23, jnp.float32)
    return jnp.where(amax < SMALLEST, jnp.float32(1), scale)


def to_e8m0(scale: jax.Array) -> jax.Array:
    """Casts powers of two in f32 to e8m0, exactly."""
    raw = (lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)
    return lax.bitcast_convert_type(raw, SCALE_DTYPE)


def round_scaled(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns f32 x * (1 / scale) in `dtype`: to nearest even, saturating; inf and NaN kept."""
    limit = float(jnp.finfo(dtype).max)
    finite = jnp.isfinite(x)
    # Select before multiplying. If x is y * 0.1 or y / 3, XLA would otherwise fold it into y * (0.1
    # / scale), which rounds differently.
    scaled = jnp.clip(jnp.where(finite, x, 0) * (1 / scale), -limit, limit)
    return jnp.where(finite, scaled, x).astype(dtype)


def quantize_tiles(
    x: jax.Array, tiles: dict[int, int], dtype: Any, power_of_two: bool
) -> tuple[jax.Array, jax.Array]:
    """Quantizes f32 x; returns data and f32 scales, ceil(dim / tile) along each axis of `tiles`."""
    padding = [(0, 0)] * x.ndim
    split: list[int] = []
    inner: list[int] = []
    for axis, length in enumerate(x.shape):
        tile = tiles.get(axis)
        if tile is None:
            split.append(length)
            continue
        count = num_tiles(length, tile)
        padding[axis] = (0, count * tile - length)
        split += [count, tile]
        inner.append(len(split) - 1)
    padded = jnp.pad(x, padding) if any(after for _, after in padding) else x
    scale = scale_of(finite_max(padded.reshape(split), tuple(inner)), dtype, power_of_two)
    spread = scale
    for axis, tile in tiles.items():
        spread = spread_tiles(spread, axis, tile, x.shape[axis])
    return round_scaled(x, spread, dtype), scale
