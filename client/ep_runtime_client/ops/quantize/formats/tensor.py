"""`TensorScaling`: one f32 scale per expert, computed from its amax or given."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.quantize import kernels
from ep_runtime_client.ops.quantize.amax import group_amax, kernel_amax, over
from ep_runtime_client.ops.quantize.formats.format import (
    Axes,
    Format,
    Leaves,
    OnGpu,
    RowOptions,
)
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits
from ep_runtime_client.ops.quantize.kernels import both_layouts, of_halves
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.rounding import round_scaled, scale_of
from ep_runtime_client.ops.quantize.slabs import Slabs


class TensorFormat(Format):
    per_group = True
    on_gpu = OnGpu(rows=True, columns=True, activation=True)

    def leaves(self, recipe: Recipe) -> dict[str, Any]:
        f32 = jnp.dtype(jnp.float32)
        return {"data": recipe.data_dtype(), "scale": f32, "amax": f32}

    def quantize_rows(
        self, recipe: Recipe, x: jax.Array, group_sizes: jax.Array, options: RowOptions
    ) -> Leaves:
        dtype = recipe.data_dtype(options.gradient)
        amax = over(group_amax(x, group_sizes, options.num_experts), options.reduce_axes)
        scale = scale_of(amax, dtype)
        data = scaled_rows(dtype, x, group_sizes, scale, options.clear_slack)
        return {"data": data, "scale": scale, "amax": amax}

    def quantize_kernel(
        self, recipe: Recipe, w: jax.Array | Pair, reduce_axes: Axes, *, transposed: bool
    ) -> Leaves:
        dtype = recipe.data_dtype()
        amax = over(kernel_amax(w), reduce_axes)
        scale = scale_of(amax, dtype)
        return {
            **scaled_kernel(dtype, w, scale, transposed=transposed),
            "scale": scale,
            "amax": amax,
        }


def scaled_rows(
    dtype: Any, x: jax.Array, group_sizes: jax.Array, scale: jax.Array, clear_slack: bool
) -> jax.Array:
    """Quantizes rows [C, *mid, K'] with the given scales, f32 like group_sizes; saturates."""
    kernel = functools.partial(kernels.scale_rows, dtype, clear_slack)
    plain = functools.partial(_scaled_rows, dtype)
    served = kernels.supports(x, group_sizes)
    return either(served, kernel, plain, x, group_sizes, scale)


def _scaled_rows(dtype: Any, x: jax.Array, group_sizes: jax.Array, scale: jax.Array) -> jax.Array:
    slabs = Slabs.of(x, group_sizes)
    flat = scale.reshape(-1)

    def step(block: row_blocks.RowBlock, data: jax.Array) -> jax.Array:
        values = block.read(slabs.rows).astype(jnp.float32)
        return block.write(
            data, bits(round_scaled(values, row_blocks.pick(flat, block.group), dtype))
        )

    blocks = row_blocks.cut(slabs.capacity, group_sizes)
    start = jnp.zeros(slabs.rows.shape, jnp.uint8)
    data = from_bits(row_blocks.loop(blocks, step, start, slabs.rows, flat), dtype)
    return data.reshape(x.shape)


def scaled_kernel(dtype: Any, w: jax.Array | Pair, scale: jax.Array, *, transposed: bool) -> Leaves:
    """Quantizes kernels [G, K', *mid, N'] with the given scales, f32 [G]; saturates."""
    if isinstance(w, Pair):
        return of_halves(lambda half: scaled_kernel(dtype, half, scale, transposed=transposed), w)
    if transposed:

        def made(w: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _scaled_kernel(dtype, w, scale), scale

        data, copy, _ = both_layouts(dtype, False, made, w, scale)
        return {"data": data, "transposed": copy}
    kernel = functools.partial(kernels.scale_kernel, dtype)
    plain = functools.partial(_scaled_kernel, dtype)
    return {"data": either(kernels.supports(w, None), kernel, plain, w, scale)}


def _scaled_kernel(dtype: Any, w: jax.Array, scale: jax.Array) -> jax.Array:
    return round_scaled(w.astype(jnp.float32), scale.reshape(-1, *([1] * (w.ndim - 1))), dtype)
