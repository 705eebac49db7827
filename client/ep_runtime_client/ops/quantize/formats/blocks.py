"""`BlockScaling`: f32 scales of 1 x 128 values of rows and of 128 x 128 values of a kernel.

A kernel's gradient sums over rows, for which scales along a row's values cannot be used. So the
8-bit rows are quantized again, with one scale for 128 rows of a group times 128 values. 8-bit
floats keep their relative precision for values down to 2^-14 of the largest one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.kernels.row_blocks import RowBlock
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.quantize import kernels
from ep_runtime_client.ops.quantize.formats.format import (
    Axes,
    Format,
    Leaves,
    OnGpu,
    Part,
    RowOptions,
    matrix,
)
from ep_runtime_client.ops.quantize.formats.recipes import TILE, Recipe
from ep_runtime_client.ops.quantize.formats.tiles import (
    bits,
    from_bits,
    num_tiles,
    spread_tiles,
    widen,
)
from ep_runtime_client.ops.quantize.rounding import quantize_tiles
from ep_runtime_client.ops.quantize.slabs import BLOCK_ROWS, Slabs


class BlockFormat(Format):
    tile = TILE
    by_row = True
    contracted_rows = TILE
    on_gpu = OnGpu(rows=True, columns=True, activation=True)

    def leaves(self, recipe: Recipe) -> dict[str, Any]:
        return {"data": recipe.data_dtype(), "scale": jnp.dtype(jnp.float32)}

    def tiles(self, ndim: int, lead: int | None, *, columns: bool = False) -> dict[int, int]:
        return {axis: self.tile for axis in ((1, ndim - 1) if lead is None else (ndim - 1,))}

    def power_of_two(self, recipe: Recipe) -> bool:
        return bool(getattr(recipe, "power_of_two_scales", False))

    def row_reader(
        self, operand: Any, lead: int, *, columns: bool = False
    ) -> Callable[[RowBlock], Part]:
        """Returns a reader of rows; if rows are contracted, it quantizes each block once more."""
        read = super().row_reader(operand, lead, columns=columns)
        if not columns:
            return read
        two, shape = self.power_of_two(operand.recipe), operand.shape[lead:]

        def again(block: RowBlock) -> Part:
            values = read(block).values.reshape(-1, *shape)
            rows, last = len(values), values.ndim - 1
            tiles = {0: rows, last: TILE}
            data, scale = quantize_tiles(values, tiles, operand.dtype, two)
            return Part(matrix(widen(data) * spread_tiles(scale, last, TILE, shape[-1])))

        return again

    def quantize_rows(
        self, recipe: Recipe, x: jax.Array, group_sizes: jax.Array, options: RowOptions
    ) -> Leaves:
        dtype, two = recipe.data_dtype(options.gradient), self.power_of_two(recipe)
        kernel = functools.partial(kernels.tile_rows, dtype, two, options.clear_slack)
        plain = functools.partial(_tiled_rows, dtype, two)
        served = kernels.supports(x, group_sizes)
        data, scale = either(served, kernel, plain, x, group_sizes)
        return {"data": data, "scale": scale}

    def quantize_kernel(
        self, recipe: Recipe, w: jax.Array, reduce_axes: Axes, *, transposed: bool
    ) -> Leaves:
        static = (recipe.data_dtype(), self.power_of_two(recipe))
        plain = functools.partial(_tiled_kernel, *static)
        if transposed:
            data, copy, scale = kernels.both_layouts(*static, plain, w, None)
            return {"data": data, "scale": scale, "transposed": copy}
        kernel = functools.partial(kernels.tile_kernel, *static)
        data, scale = either(kernels.supports(w, None), kernel, plain, w)
        return {"data": data, "scale": scale}


def _tiled_kernel(
    dtype: Any, two: bool, w: jax.Array, scale: None = None
) -> tuple[jax.Array, jax.Array]:
    return quantize_tiles(w.astype(jnp.float32), {1: TILE, w.ndim - 1: TILE}, dtype, two)


def _tiled_rows(
    dtype: Any, two: bool, x: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, ...]:
    """Quantizes rows to data [C, *mid, K'] and f32 scales [C, *mid, ceil(K' / 128)]."""
    slabs = Slabs.of(x, group_sizes)
    rows = slabs.rows
    last = rows.ndim - 1
    tiles = num_tiles(rows.shape[last], TILE)
    start = (
        jnp.zeros(rows.shape, jnp.uint8),
        jnp.ones((*rows.shape[:-1], tiles), jnp.float32),
    )

    def step(block: RowBlock, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        values = block.read(rows).astype(jnp.float32)
        data, scale = quantize_tiles(values, {last: TILE}, dtype, two)
        return block.write(carry[0], bits(data)), block.write(carry[1], scale)

    blocks = row_blocks.cut(slabs.capacity, slabs.totals, BLOCK_ROWS)
    data, scales = row_blocks.loop(blocks, step, start, rows)
    lead = (*slabs.lead, *rows.shape[1:-1])
    return from_bits(data, dtype).reshape(*lead, rows.shape[last]), scales.reshape(*lead, tiles)
