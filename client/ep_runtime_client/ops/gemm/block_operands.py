"""Operands of a grouped GEMM, arrays or quantized tensors, read block by block inside its loop.

A block of a quantized operand is widened to f32 and multiplied by its scales there. Scales that
are the same for a whole group are not applied but returned: they multiply the dot's result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.kernels.row_blocks import RowBlock
from ep_runtime_client.quantized import QuantizedTensor, bits, from_bits, spread_tiles, widen
from ep_runtime_client.recipes import MX_TILE, MXFP8, TILE, BlockScaling, TensorScaling


@dataclasses.dataclass(frozen=True)
class Part:
    """What a block multiplies.

    Attributes:
        values: [rows or K', everything else].
        scale: f32 [] that multiplies the result, or None.
    """

    values: jax.Array
    scale: jax.Array | None = None


def row_reader(
    operand: Any, lead: int, *, columns: bool = False, dtype: Any = None
) -> Callable[[RowBlock], Part]:
    """Reads a block's rows; rows of other groups are zeros.

    Args:
        operand: [C, ...] or [S, C, ...] array or QuantizedTensor.
        lead: how many dims the rows take, 1 or 2.
        columns: the GEMM contracts the rows: MXFP8 reads its column-wise copy.
        dtype: what an array is cast to; None leaves it.
    """
    if not isinstance(operand, QuantizedTensor):
        rows = _flat(operand, lead)
        return lambda block: Part(_matrix(_cast(block.read(rows), dtype)))
    recipe, scale = operand.recipe, operand.scale
    if isinstance(recipe, MXFP8) and columns:
        return _column_reader(operand, lead)
    data = _flat(bits(operand.data), lead)

    def read(block: RowBlock) -> jax.Array:
        return from_bits(block.read(data), operand.dtype)

    if scale is None:
        return lambda block: Part(_matrix(read(block)))
    if isinstance(recipe, TensorScaling):
        flat = scale.reshape(-1)
        return lambda block: Part(_matrix(widen(read(block))), row_blocks.pick(flat, block.group))
    tile = TILE if isinstance(recipe, BlockScaling) else MX_TILE
    scales = _flat(bits(scale), lead)

    def scaled(block: RowBlock) -> Part:
        values = widen(read(block))
        factors = from_bits(block.read(scales), scale.dtype).astype(jnp.float32)
        last = values.ndim - 1
        return Part(_matrix(values * spread_tiles(factors, last, tile, values.shape[last])))

    return scaled


def _column_reader(operand: QuantizedTensor, lead: int) -> Callable[[RowBlock], Part]:
    """MXFP8 with one scale per 32 rows; blocks need not begin where such a tile does."""
    assert operand.data_columns is not None
    assert operand.scale_columns is not None
    data = _flat(bits(operand.data_columns), lead)
    scales = _flat(bits(operand.scale_columns), lead)
    scale_dtype = operand.scale_columns.dtype

    def scaled(block: RowBlock) -> Part:
        values = widen(from_bits(block.read(data), operand.dtype))
        factors = from_bits(scales[lax.div(block.row, jnp.int32(MX_TILE))], scale_dtype).astype(
            jnp.float32
        )
        return Part(_matrix(block.mask(values * factors)))

    return scaled


def kernel_reader(
    operand: Any, *, columns: bool = False, dtype: Any = None
) -> Callable[[jax.Array], Part]:
    """Reads one expert's kernel [K', everything else].

    Args:
        operand: [G, K', *N'] array or QuantizedTensor.
        columns: the GEMM contracts N': MXFP8 reads its column-wise copy.
        dtype: what an array is cast to; None leaves it.
    """
    if not isinstance(operand, QuantizedTensor):
        return lambda expert: Part(_matrix(_cast(row_blocks.pick(operand, expert), dtype)))
    recipe = operand.recipe
    columns = columns and isinstance(recipe, MXFP8)
    stored = operand.data_columns if columns else operand.data
    scale = operand.scale_columns if columns else operand.scale
    assert stored is not None
    data = bits(stored)

    def read(expert: jax.Array) -> jax.Array:
        return from_bits(row_blocks.pick(data, expert), operand.dtype)

    if scale is None:
        return lambda expert: Part(_matrix(read(expert)))
    if isinstance(recipe, TensorScaling):
        return lambda expert: Part(_matrix(widen(read(expert))), row_blocks.pick(scale, expert))
    last = operand.ndim - 2
    tiles = {0: TILE, last: TILE}
    if isinstance(recipe, MXFP8):
        tiles = {last if columns else 0: MX_TILE}
    scales = bits(scale)

    def scaled(expert: jax.Array) -> Part:
        values = widen(read(expert))
        factors = from_bits(row_blocks.pick(scales, expert), scale.dtype).astype(jnp.float32)
        for axis, tile in tiles.items():
            factors = spread_tiles(factors, axis, tile, values.shape[axis])
        return Part(_matrix(values * factors))

    return scaled


def _flat(array: jax.Array, lead: int) -> jax.Array:
    """All slabs' rows as one dim 0."""
    return array.reshape(math.prod(array.shape[:lead]), *array.shape[lead:])


def _matrix(part: jax.Array) -> jax.Array:
    return part.reshape(part.shape[0], math.prod(part.shape[1:]))


def _cast(part: jax.Array, dtype: Any) -> jax.Array:
    return part if dtype is None else part.astype(dtype)
