"""`MXFP8`: e8m0 scales of 32 values along the dim that a GEMM contracts, in two copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.quantize import kernels
from ep_runtime_client.ops.quantize.formats.format import (
    Axes,
    Format,
    Leaves,
    OnGpu,
    Part,
    RowOptions,
    flat,
    matrix,
)
from ep_runtime_client.ops.quantize.formats.recipes import MX_TILE, Recipe
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits, widen
from ep_runtime_client.ops.quantize.rounding import SCALE_DTYPE, quantize_tiles, to_e8m0
from ep_runtime_client.ops.quantize.slabs import BLOCK_ROWS, Slabs

_FIELDS = ("data", "scale", "data_columns", "scale_columns")


class MxFormat(Format):
    tile = MX_TILE
    columns = True
    # Hopper's tensor cores do not support such scales.
    on_gpu = OnGpu(rows=False, columns=False, activation=False)

    def leaves(self, recipe: Recipe) -> dict[str, Any]:
        data, e8m0 = recipe.data_dtype(), jnp.dtype(SCALE_DTYPE)
        return dict(zip(_FIELDS, (data, e8m0, data, e8m0), strict=True))

    def tiles(self, ndim: int, lead: int | None, *, columns: bool = False) -> dict[int, int]:
        if lead is None:
            return {ndim - 1 if columns else 1: self.tile}
        return {lead - 1 if columns else ndim - 1: self.tile}

    def power_of_two(self, recipe: Recipe) -> bool:
        return True

    def quantize_rows(
        self, recipe: Recipe, x: jax.Array, group_sizes: jax.Array, options: RowOptions
    ) -> Leaves:
        _check_multiple("the last dim of x", x.shape[-1], x.shape)
        _check_multiple("the rows of x", x.shape[group_sizes.ndim - 1], x.shape)
        dtype = recipe.data_dtype(options.gradient)
        kernel = functools.partial(kernels.mx_rows, dtype, options.clear_slack)
        plain = functools.partial(_mx_rows, dtype)
        made = either(kernels.supports(x, group_sizes), kernel, plain, x, group_sizes)
        return dict(zip(_FIELDS, made, strict=True))

    def quantize_kernel(
        self, recipe: Recipe, w: jax.Array, reduce_axes: Axes, *, transposed: bool
    ) -> Leaves:
        _check_multiple("dim 1 of the kernel", w.shape[1], w.shape)
        _check_multiple("the last dim of the kernel", w.shape[-1], w.shape)
        dtype = recipe.data_dtype()
        kernel = functools.partial(kernels.mx_kernel, dtype)
        plain = functools.partial(_mx_kernel, dtype)
        made = either(kernels.supports(w, None), kernel, plain, w)
        return dict(zip(_FIELDS, made, strict=True))

    def row_reader(
        self, operand: Any, lead: int, *, columns: bool = False
    ) -> Callable[[row_blocks.RowBlock], Part]:
        if not columns:
            return super().row_reader(operand, lead)
        # One scale per 32 rows; a block may begin inside 32 such rows.
        data = flat(bits(operand.data_columns), lead)
        scales = flat(bits(operand.scale_columns), lead)
        scale_dtype = operand.scale_columns.dtype

        def scaled(block: row_blocks.RowBlock) -> Part:
            values = widen(from_bits(block.read(data), operand.dtype))
            factors = from_bits(scales[lax.div(block.row, jnp.int32(MX_TILE))], scale_dtype)
            return Part(matrix(block.mask(values * factors.astype(jnp.float32))))

        return scaled


def _mx_kernel(dtype: Any, w: jax.Array) -> tuple[jax.Array, ...]:
    values = w.astype(jnp.float32)
    data, scale = quantize_tiles(values, {1: MX_TILE}, dtype, True)
    columns, column_scale = quantize_tiles(values, {w.ndim - 1: MX_TILE}, dtype, True)
    return data, to_e8m0(scale), columns, to_e8m0(column_scale)


def _mx_rows(dtype: Any, x: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, ...]:
    """Returns data and scales along K' [C, *mid, K' / 32], then along rows [C / 32, *mid, K']."""
    slabs = Slabs.of(x, group_sizes)
    rows = slabs.rows
    last, trailing = rows.ndim - 1, rows.shape[1:]
    tiles = (*trailing[:-1], trailing[-1] // MX_TILE)
    one = jnp.uint8(127)  # a scale of 1
    start: tuple[jax.Array, ...] = (
        jnp.zeros(rows.shape, jnp.uint8),
        jnp.full((rows.shape[0], *tiles), one),
        jnp.zeros(rows.shape, jnp.uint8),
        jnp.full((rows.shape[0] // MX_TILE, *trailing), one),
    )

    def step(block: row_blocks.RowBlock, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values = block.read(rows).astype(jnp.float32)
        data, scale = quantize_tiles(values, {last: MX_TILE}, dtype, True)
        columns, column_scale = quantize_tiles(values, {0: MX_TILE}, dtype, True)
        # C and a block's rows are multiples of 32, so a tile is in one block and one slab.
        tile = row_blocks.RowBlock(
            block.group, lax.div(block.start, jnp.int32(MX_TILE)), block.valid[::MX_TILE]
        )
        return (
            block.write(carry[0], bits(data)),
            block.write(carry[1], bits(to_e8m0(scale))),
            block.write(carry[2], bits(columns)),
            tile.write(carry[3], bits(to_e8m0(column_scale))),
        )

    blocks = row_blocks.cut(slabs.capacity, slabs.totals, BLOCK_ROWS)
    data, scale, columns, column_scale = row_blocks.loop(blocks, step, start, rows)
    lead = (*slabs.lead[:-1], slabs.capacity // MX_TILE)
    return (
        from_bits(data, dtype).reshape(*slabs.lead, *trailing),
        from_bits(scale, SCALE_DTYPE).reshape(*slabs.lead, *tiles),
        from_bits(columns, dtype).reshape(*slabs.lead, *trailing),
        from_bits(column_scale, SCALE_DTYPE).reshape(*lead, *trailing),
    )


def _check_multiple(what: str, length: int, shape: tuple[int, ...]) -> None:
    if length % MX_TILE:
        raise InvalidArgumentError(
            f"{what} must be a multiple of {MX_TILE} for MXFP8, got {length} of {tuple(shape)}",
            argument="recipe",
        )
