"""`Format`: everything that ops need from a recipe.

A new recipe needs one file here, with its format class, and one line in `table.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits, spread_tiles, widen

Axes = tuple[str, ...]
Leaves = dict[str, jax.Array]  # by field names of QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Part:
    """Values of a row block or kernel for a dot, and their scale.

    Attributes:
        values: [rows or K', all other dims].
        scale: f32 [] that multiplies the dot's result, or None.
    """

    values: jax.Array
    scale: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """Options of quantizing rows, as `plain.quantize_rows` takes them."""

    reduce_axes: Axes = ()
    gradient: bool = False
    num_experts: int | None = None
    clear_slack: bool = True


@dataclasses.dataclass(frozen=True)
class OnGpu:
    """How the kernels of the CUDA library compute with a format.

    Attributes:
        rows: the tensor cores multiply the 8-bit data directly, in forward and for the rows'
            gradient, with K' of kernels contiguous in memory; if False, values are dequantized to
            bf16.
        columns: the same for the weight's gradient, which contracts rows.
        activation: one pass activates and quantizes rows.
    """

    rows: bool
    columns: bool
    activation: bool


class Format(abc.ABC):
    """Stores, makes, reads and multiplies the operands of one kind of recipe. Stateless.

    Attributes:
        tile: number of values that share a scale along a blocked dim; 1 without blocks.
        per_group: whether each group of rows, and each kernel, has one scale and an amax.
        columns: whether there is a second copy, with its tiles along the other dim.
        contracted_rows: rows of a group that share a scale in a matmul that contracts rows; 0 if it
            may read any number of rows at once.
        by_row: whether every row is quantized on its own, so that it can be before it is sent.
        on_gpu: how GPUs compute with it; None if they run plain JAX.
    """

    tile: ClassVar[int] = 1
    per_group: ClassVar[bool] = False
    columns: ClassVar[bool] = False
    contracted_rows: ClassVar[int] = 0
    by_row: ClassVar[bool] = False
    on_gpu: ClassVar[OnGpu | None] = None

    @abc.abstractmethod
    def leaves(self, recipe: Recipe) -> dict[str, Any]:
        """Returns the dtype of every field that quantization makes, `data` first."""

    @abc.abstractmethod
    def quantize_rows(
        self, recipe: Recipe, x: jax.Array, group_sizes: jax.Array, options: RowOptions
    ) -> Leaves:
        """Quantizes rows; see `plain.quantize_rows`."""

    @abc.abstractmethod
    def quantize_kernel(
        self, recipe: Recipe, w: Any, reduce_axes: Axes, *, transposed: bool
    ) -> Leaves:
        """Like `plain.quantize_kernel`. Formats with one scale per kernel also take a Pair."""

    def tiles(self, ndim: int, lead: int | None, *, columns: bool = False) -> dict[int, int]:
        """Returns how many values share a scale, for each axis on which several do.

        Args:
            ndim: dims of the values.
            lead: number of dims for the rows; None for kernels.
            columns: whether for the column-wise copy.
        """
        return {}

    def power_of_two(self, recipe: Recipe) -> bool:
        """Whether scales are rounded up to powers of two."""
        return False

    def row_reader(
        self, operand: Any, lead: int, *, columns: bool = False
    ) -> Callable[[row_blocks.RowBlock], Part]:
        """Returns a reader of a block's rows of a QuantizedTensor; rows of other groups are zeros.

        Args:
            operand: [C, ...] or [S, C, ...].
            lead: number of dims for the rows, 1 or 2.
            columns: the GEMM contracts the rows: the column-wise copy is read, if there is one.
        """
        data, scale = flat(bits(operand.data), lead), operand.scale
        if scale is not None:
            scale = scale.reshape(-1) if self.per_group else flat(bits(scale), lead)

        def read(block: row_blocks.RowBlock) -> Part:
            values = from_bits(block.read(data), operand.dtype)
            if scale is None:
                return Part(matrix(values))
            if self.per_group:
                return Part(matrix(widen(values)), row_blocks.pick(scale, block.group))
            factors = from_bits(block.read(scale), operand.scale.dtype)
            return _multiplied(values, factors, self.tiles(values.ndim, 1))

        return read

    def kernel_reader(self, operand: Any, *, columns: bool = False) -> Callable[[jax.Array], Part]:
        """Returns a reader of one expert's kernel [K', all other dims] of a QuantizedTensor [G, K',
        *N'].

        `columns`: the GEMM contracts N': the column-wise copy is read, if there is one.
        """
        columns = columns and self.columns
        data = bits(operand.data_columns if columns else operand.data)
        scale = operand.scale_columns if columns else operand.scale
        scales = None if scale is None else bits(scale)
        tiles = self.tiles(operand.ndim, None, columns=columns)

        def read(expert: jax.Array) -> Part:
            values = from_bits(row_blocks.pick(data, expert), operand.dtype)
            if scales is None:
                return Part(matrix(values))
            factors = row_blocks.pick(scales, expert)
            if self.per_group:
                return Part(matrix(widen(values)), factors)
            factors = from_bits(factors, scale.dtype)
            return _multiplied(values, factors, {axis - 1: tile for axis, tile in tiles.items()})

        return read


def _multiplied(values: jax.Array, factors: jax.Array, tiles: dict[int, int]) -> Part:
    """Widens values, and multiplies them by their scales, which `tiles` of them share per axis."""
    values, factors = widen(values), factors.astype(jnp.float32)
    for axis, tile in tiles.items():
        factors = spread_tiles(factors, axis, tile, values.shape[axis])
    return Part(matrix(values * factors))


def flat(array: jax.Array, lead: int) -> jax.Array:
    """Joins the rows of all slabs in dim 0."""
    return array.reshape(math.prod(array.shape[:lead]), *array.shape[lead:])


def matrix(part: jax.Array) -> jax.Array:
    """Reshapes to [rows or K', all other dims]."""
    return part.reshape(part.shape[0], math.prod(part.shape[1:]))
