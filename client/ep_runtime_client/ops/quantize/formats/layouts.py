"""Quantizes kernels to 8 bits in both layouts: as given, and transposed.

In the transposed layout K' is contiguous in memory; GPUs multiply it forward. Gate and up become
one array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.quantize import kernels
from ep_runtime_client.ops.quantize.formats.format import Leaves
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits
from ep_runtime_client.ops.quantize.pair import DIM, Pair


def both_layouts(
    dtype: Any,
    power_of_two: bool,
    made: Callable[..., tuple[jax.Array, jax.Array]],
    w: jax.Array,
    scale: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns data, transposed data (K' contiguous in memory), and scales.

    `made(w, scale)`: computes data and scales in plain JAX; without `scale`, scales of blocks.
    """

    def plain(w: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, ...]:
        data, scales = made(w, scale)
        return data, from_bits(jnp.moveaxis(bits(data), 1, -1), dtype), scales

    kernel = functools.partial(kernels.transposed_kernel, dtype, power_of_two)
    return either(kernels.supports(w, None, transposed=True), kernel, plain, w, scale)


def of_halves(made: Callable[[jax.Array], Leaves], w: Pair) -> Leaves:
    """Joins gate and up, which `made` quantizes separately, to leaves of kernels [G, K', 2, M].

    Matmuls of 8-bit kernels read one array, and quantization writes a new array anyway; the
    unquantized weights stay two arrays.
    """
    gate, up = made(w.gate), made(w.up)

    def stacked(name: str) -> jax.Array:
        axis = 1 if name == "transposed" else DIM
        both = jnp.stack([bits(gate[name]), bits(up[name])], axis)
        return from_bits(both, gate[name].dtype)

    return {name: stacked(name) for name in gate}
