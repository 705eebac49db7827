"""Quantization on one device, in plain JAX. The arithmetic is that of `ep.recipes`.

Letters: C rows of a slab, S slabs on this device, L groups of a slab, G experts of the kernels on
this device. Rows are [C, *mid, K'] with group_sizes [L], or [S, C, *mid, K'] with [S, L].

Rows past sum(group_sizes) are never read: they reach no amax and come out as zeros with scales
of 1. Nothing here is differentiable; `grouped_quantize` is, straight through.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops import row_blocks
from ep_runtime_client.ops.row_blocks import Block
from ep_runtime_client.quantized import (
    QuantizedTensor,
    bits,
    from_bits,
    num_tiles,
    spread_tiles,
)
from ep_runtime_client.recipes import (
    MX_TILE,
    MXFP8,
    TILE,
    BlockScaling,
    Recipe,
    TensorScaling,
)

Axes = tuple[str, ...]

SMALLEST = 2.0**-126  # the smallest normal f32; CPUs flush what is below to zero
SCALE_DTYPE = jnp.float8_e8m0fnu
_MANTISSA = 0x7FFFFF
_THREE_QUARTERS = 0x600000  # mantissa of 1.75: both 448 and 57344 are 1.75 times a power of two


def quantize_rows(
    recipe: Recipe,
    x: jax.Array,
    group_sizes: jax.Array,
    reduce_axes: Axes = (),
    *,
    gradient: bool = False,
    num_experts: int | None = None,
) -> QuantizedTensor:
    """Quantizes the rows of every group.

    Args:
        recipe: how.
        x: [C, *mid, K'] any float dtype.
        group_sizes: [L] int32, on the device, any counts.
        reduce_axes: manual mesh axes that split rows of one group; TensorScaling takes each amax
            over them.
        gradient: x are gradients: the recipe's gradient dtype.
        num_experts: TensorScaling alone: groups whose number is the same modulo this many are the
            same expert and share an amax; None keeps all groups apart.

    Returns:
        A QuantizedTensor without `origin`.

    Raises:
        InvalidArgumentError: MXFP8, and K' or C is no multiple of 32.

    Cost: follows sum(group_sizes) but for zeros and ones of the results' sizes; one pass over the
        rows, two for TensorScaling.
    """
    dtype = recipe.data_dtype(gradient)
    if isinstance(recipe, TensorScaling):
        amax = over(group_amax(x, group_sizes, num_experts), reduce_axes)
        return scale_rows(recipe, x, group_sizes, scale_of(amax, dtype), amax, gradient=gradient)
    slabs = _Slabs.of(x, group_sizes)
    if isinstance(recipe, BlockScaling):
        data, scale = _tiled_rows(slabs, dtype, TILE, recipe.power_of_two_scales)
        return QuantizedTensor(data, scale, None, None, None, group_sizes, None, recipe)
    if isinstance(recipe, MXFP8):
        _check_multiple("the last dim of x", x.shape[-1], x.shape)
        _check_multiple("the rows of x", slabs.capacity, x.shape)
        data, scale, columns, column_scale = _mx_rows(slabs, dtype)
        return QuantizedTensor(data, scale, None, columns, column_scale, group_sizes, None, recipe)
    data = _cast_rows(slabs, dtype)
    return QuantizedTensor(data, None, None, None, None, group_sizes, None, recipe)


def scale_rows(
    recipe: TensorScaling,
    x: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array,
    amax: jax.Array | None = None,
    *,
    gradient: bool = False,
) -> QuantizedTensor:
    """Quantizes rows [C, *mid, K'] by the given scales, f32 like group_sizes; saturates."""
    dtype = recipe.data_dtype(gradient)
    slabs = _Slabs.of(x, group_sizes)
    flat = scale.reshape(-1)

    def step(block: Block, data: jax.Array) -> jax.Array:
        values = block.read(slabs.rows).astype(jnp.float32)
        return block.write(
            data, bits(round_scaled(values, row_blocks.pick(flat, block.group), dtype))
        )

    blocks = row_blocks.cut(slabs.capacity, group_sizes)
    start = jnp.zeros(slabs.rows.shape, jnp.uint8)
    data = from_bits(row_blocks.loop(blocks, step, start, slabs.rows, flat), dtype)
    data = data.reshape(x.shape)
    return QuantizedTensor(data, scale, amax, None, None, group_sizes, None, recipe)


def quantize_kernel(recipe: Recipe, w: jax.Array, reduce_axes: Axes = ()) -> QuantizedTensor:
    """Quantizes kernels.

    Args:
        recipe: how.
        w: [G, K', *mid, N'] any float dtype; tiles run over dim 1 and the last dim.
        reduce_axes: manual mesh axes that split dims other than 0; TensorScaling takes each amax
            over them. Other recipes need local dims that are multiples of their tiles instead.

    Returns:
        A QuantizedTensor without `origin`.

    Raises:
        InvalidArgumentError: MXFP8, and K' or N' is no multiple of 32.
    """
    dtype = recipe.data_dtype()
    if isinstance(recipe, TensorScaling):
        amax = over(kernel_amax(w), reduce_axes)
        return scale_kernel(recipe, w, scale_of(amax, dtype), amax)
    values, last = w.astype(jnp.float32), w.ndim - 1
    if isinstance(recipe, BlockScaling):
        two = recipe.power_of_two_scales
        data, scale = quantize_tiles(values, {1: TILE, last: TILE}, dtype, two)
        return QuantizedTensor(data, scale, None, None, None, None, None, recipe)
    if isinstance(recipe, MXFP8):
        _check_multiple("dim 1 of the kernel", w.shape[1], w.shape)
        _check_multiple("the last dim of the kernel", w.shape[last], w.shape)
        data, scale = quantize_tiles(values, {1: MX_TILE}, dtype, True)
        columns, column_scale = quantize_tiles(values, {last: MX_TILE}, dtype, True)
        scale, column_scale = to_e8m0(scale), to_e8m0(column_scale)
        return QuantizedTensor(data, scale, None, columns, column_scale, None, None, recipe)
    return QuantizedTensor(w.astype(dtype), None, None, None, None, None, None, recipe)


def scale_kernel(
    recipe: TensorScaling, w: jax.Array, scale: jax.Array, amax: jax.Array | None = None
) -> QuantizedTensor:
    """Quantizes kernels [G, K', *mid, N'] by the given scales, f32 [G]; saturates."""
    spread = scale.reshape(-1, *([1] * (w.ndim - 1)))
    data = round_scaled(w.astype(jnp.float32), spread, recipe.data_dtype())
    return QuantizedTensor(data, scale, amax, None, None, None, None, recipe)


def kernel_amax(w: jax.Array) -> jax.Array:
    """[G, ...] -> f32 [G]: the largest finite absolute value of each expert's kernel."""
    return finite_max(w.astype(jnp.float32), tuple(range(1, w.ndim)))


def finite_max(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The largest finite absolute value of f32 `x` over `axes`, 0 where there is none."""
    size = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    return jnp.max(size, axis=axes, initial=0)


def scale_of(amax: jax.Array, dtype: Any, power_of_two: bool = False) -> jax.Array:
    """f32 scales of f32 `amax` for data of `dtype`; as `ep.recipes` says."""
    if power_of_two:
        return _power_of_two(amax, dtype)
    # XLA turns a division by a constant into a multiplication, which rounds differently.
    largest = lax.optimization_barrier(jnp.full(amax.shape, jnp.finfo(dtype).max, jnp.float32))
    scale = jnp.maximum(amax / largest, jnp.float32(SMALLEST))
    return jnp.where(amax < SMALLEST, jnp.float32(1), scale)


def _power_of_two(amax: jax.Array, dtype: Any) -> jax.Array:
    """2^ceil(log2(amax / max)), from the bits: max is 1.75 * 2^exponent for both dtypes."""
    exponent = math.frexp(float(jnp.finfo(dtype).max))[1] - 1
    raw = lax.bitcast_convert_type(amax, jnp.int32)
    biased = (raw >> 23) - exponent + ((raw & _MANTISSA) > _THREE_QUARTERS).astype(jnp.int32)
    scale = lax.bitcast_convert_type(jnp.clip(biased, 1, 254) << 23, jnp.float32)
    return jnp.where(amax < SMALLEST, jnp.float32(1), scale)


def to_e8m0(scale: jax.Array) -> jax.Array:
    """Powers of two in f32 as e8m0, exactly."""
    raw = (lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)
    stored: jax.Array = lax.bitcast_convert_type(raw, SCALE_DTYPE)
    return stored


def round_scaled(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """f32 x * (1 / scale) in `dtype`: nearest even, saturating, non-finite values as they are."""
    limit = float(jnp.finfo(dtype).max)
    scaled = jnp.clip(x * (1 / scale), -limit, limit)
    rounded: jax.Array = jnp.where(jnp.isfinite(x), scaled, x).astype(dtype)
    return rounded


def quantize_tiles(
    x: jax.Array, tiles: dict[int, int], dtype: Any, power_of_two: bool
) -> tuple[jax.Array, jax.Array]:
    """f32 x -> data like x, and f32 scales with ceil(dim / tile) along each axis of `tiles`."""
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


def group_amax(x: jax.Array, group_sizes: jax.Array, num_experts: int | None = None) -> jax.Array:
    """Rows [C, ...] -> f32 like group_sizes: the largest finite absolute value of each group.

    With `num_experts` groups whose number is the same modulo it share theirs.
    """
    slabs = _Slabs.of(x, group_sizes)
    groups = math.prod(group_sizes.shape)
    experts = groups if num_experts is None else num_experts

    blocks = row_blocks.cut(slabs.capacity, group_sizes)

    def step(block: Block, amax: jax.Array) -> jax.Array:
        values = block.read(slabs.rows).astype(jnp.float32)
        largest = finite_max(values, tuple(range(values.ndim)))
        return row_blocks.max_at(amax, blocks.expert(block, experts), largest)

    amax = row_blocks.loop(blocks, step, jnp.zeros((experts,), jnp.float32), slabs.rows)
    return jnp.tile(amax, groups // max(experts, 1)).reshape(group_sizes.shape)


@dataclasses.dataclass(frozen=True)
class _Slabs:
    """Rows of all slabs as one dim.

    Attributes:
        rows: [S * C, *mid, K'].
        lead: (C,) or (S, C).
        totals: [1] or [S, 1] int32, rows of all groups of a slab: what knows no groups, as scales
            of single rows do, takes a slab's rows as one.
    """

    rows: jax.Array
    lead: tuple[int, ...]
    totals: jax.Array

    @classmethod
    def of(cls, x: jax.Array, group_sizes: jax.Array) -> _Slabs:
        lead = tuple(x.shape[: group_sizes.ndim])
        totals = group_sizes.sum(-1, keepdims=True, dtype=jnp.int32)
        return cls(x.reshape(math.prod(lead), *x.shape[len(lead) :]), lead, totals)

    @property
    def capacity(self) -> int:
        return self.lead[-1]


def _cast_rows(slabs: _Slabs, dtype: Any) -> jax.Array:
    """Data [C, *mid, K'] of a recipe without scales."""
    start = jnp.zeros(slabs.rows.shape, dtype)

    def step(block: Block, data: jax.Array) -> jax.Array:
        return block.write(data, block.read(slabs.rows))

    blocks = row_blocks.cut(slabs.capacity, slabs.totals, TILE)
    data = row_blocks.loop(blocks, step, start, slabs.rows)
    return data.reshape(*slabs.lead, *slabs.rows.shape[1:])


def _tiled_rows(slabs: _Slabs, dtype: Any, tile: int, two: bool) -> tuple[jax.Array, jax.Array]:
    """Data [C, *mid, K'] and f32 scales [C, *mid, ceil(K' / tile)]."""
    rows = slabs.rows
    last = rows.ndim - 1
    tiles = num_tiles(rows.shape[last], tile)
    start = (
        jnp.zeros(rows.shape, jnp.uint8),
        jnp.ones((*rows.shape[:-1], tiles), jnp.float32),
    )

    def step(block: Block, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        values = block.read(rows).astype(jnp.float32)
        data, scale = quantize_tiles(values, {last: tile}, dtype, two)
        return block.write(carry[0], bits(data)), block.write(carry[1], scale)

    blocks = row_blocks.cut(slabs.capacity, slabs.totals, TILE)
    data, scales = row_blocks.loop(blocks, step, start, rows)
    lead = (*slabs.lead, *rows.shape[1:-1])
    return from_bits(data, dtype).reshape(*lead, rows.shape[last]), scales.reshape(*lead, tiles)


def _mx_rows(slabs: _Slabs, dtype: Any) -> tuple[jax.Array, ...]:
    """Data, scales [C, *mid, K' / 32], and the same along the rows, scales [C / 32, *mid, K']."""
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

    def step(block: Block, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values = block.read(rows).astype(jnp.float32)
        data, scale = quantize_tiles(values, {last: MX_TILE}, dtype, True)
        columns, column_scale = quantize_tiles(values, {0: MX_TILE}, dtype, True)
        # C is a multiple of 32 and so are a block's rows: tiles straddle no block and no slab.
        tile = Block(block.group, lax.div(block.start, jnp.int32(MX_TILE)), block.valid[::MX_TILE])
        return (
            block.write(carry[0], bits(data)),
            block.write(carry[1], bits(to_e8m0(scale))),
            block.write(carry[2], bits(columns)),
            tile.write(carry[3], bits(to_e8m0(column_scale))),
        )

    blocks = row_blocks.cut(slabs.capacity, slabs.totals, TILE)
    data, scale, columns, column_scale = row_blocks.loop(blocks, step, start, rows)
    lead = (*slabs.lead[:-1], slabs.capacity // MX_TILE)
    return (
        from_bits(data, dtype).reshape(*slabs.lead, *trailing),
        from_bits(scale, SCALE_DTYPE).reshape(*slabs.lead, *tiles),
        from_bits(columns, dtype).reshape(*slabs.lead, *trailing),
        from_bits(column_scale, SCALE_DTYPE).reshape(*lead, *trailing),
    )


def over(amax: jax.Array, axes: Axes) -> jax.Array:
    """The largest over manual mesh axes."""
    return lax.pmax(amax, axes) if axes else amax


def _check_multiple(what: str, length: int, shape: tuple[int, ...]) -> None:
    if length % MX_TILE:
        raise InvalidArgumentError(
            f"{what} must be a multiple of {MX_TILE} for MXFP8, got {length} of {tuple(shape)}",
            argument="recipe",
        )
