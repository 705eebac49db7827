"""`BF16`: casts, without scales. Also reads plain arrays, which have no recipe."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.quantize.formats.format import Axes, Format, Leaves, RowOptions
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.slabs import BLOCK_ROWS, Slabs


class UnscaledFormat(Format):
    def leaves(self, recipe: Recipe) -> dict[str, Any]:
        return {"data": recipe.data_dtype()}

    def quantize_rows(
        self, recipe: Recipe, x: jax.Array, group_sizes: jax.Array, options: RowOptions
    ) -> Leaves:
        slabs = Slabs.of(x, group_sizes)
        start = jnp.zeros(slabs.rows.shape, recipe.data_dtype(options.gradient))

        def step(block: row_blocks.RowBlock, data: jax.Array) -> jax.Array:
            return block.write(data, block.read(slabs.rows))

        blocks = row_blocks.cut(slabs.capacity, slabs.totals, BLOCK_ROWS)
        data = row_blocks.loop(blocks, step, start, slabs.rows)
        return {"data": data.reshape(*slabs.lead, *slabs.rows.shape[1:])}

    def quantize_kernel(
        self, recipe: Recipe, w: jax.Array, reduce_axes: Axes, *, transposed: bool
    ) -> Leaves:
        return {"data": w.astype(recipe.data_dtype())}
