"""Quantization on one device, in plain JAX. The arithmetic is that of `ep.recipes`.

On a GPU the kernels of `kernels.py` stand in for what they take, bit for bit.

Letters: C rows of a slab, S slabs on this device, L groups of a slab, G experts of the kernels on
this device. Rows are [C, *mid, K'] with group_sizes [L], or [S, C, *mid, K'] with [S, L].

Rows past sum(group_sizes) are never read: they reach no amax and come out as zeros with scales
of 1. Nothing here is differentiable; `grouped_quantize` is, straight through.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.kernels.row_blocks import RowBlock
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.quantize import kernels
from ep_runtime_client.ops.quantize.rounding import (
    SCALE_DTYPE,
    finite_max,
    quantize_tiles,
    round_scaled,
    scale_of,
    to_e8m0,
)
from ep_runtime_client.quantized import (
    QuantizedTensor,
    bits,
    from_bits,
    num_tiles,
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


def quantize_rows(
    recipe: Recipe,
    x: jax.Array,
    group_sizes: jax.Array,
    reduce_axes: Axes = (),
    *,
    gradient: bool = False,
    num_experts: int | None = None,
    clear_slack: bool = True,
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
        clear_slack: somebody may look at rows past the last group. Without it a GPU leaves them
            undefined; elsewhere they are zeros with scales of 1 anyway.

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
        slack = {"gradient": gradient, "clear_slack": clear_slack}
        return scale_rows(recipe, x, group_sizes, scale_of(amax, dtype), amax, **slack)
    served = kernels.serve(x, group_sizes)
    if isinstance(recipe, BlockScaling):
        two = recipe.power_of_two_scales
        kernel = functools.partial(kernels.tile_rows, dtype, two, clear_slack)
        plain = functools.partial(_tiled_rows, dtype, two)
        data, scale = either(served, kernel, plain, x, group_sizes)
        return QuantizedTensor(data, scale, None, None, None, group_sizes, None, recipe)
    if isinstance(recipe, MXFP8):
        _check_multiple("the last dim of x", x.shape[-1], x.shape)
        _check_multiple("the rows of x", x.shape[group_sizes.ndim - 1], x.shape)
        kernel = functools.partial(kernels.mx_rows, dtype, clear_slack)
        made = either(served, kernel, functools.partial(_mx_rows, dtype), x, group_sizes)
        data, scale, columns, column_scale = made
        return QuantizedTensor(data, scale, None, columns, column_scale, group_sizes, None, recipe)
    data = _cast_rows(_Slabs.of(x, group_sizes), dtype)
    return QuantizedTensor(data, None, None, None, None, group_sizes, None, recipe)


def scale_rows(
    recipe: TensorScaling,
    x: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array,
    amax: jax.Array | None = None,
    *,
    gradient: bool = False,
    clear_slack: bool = True,
) -> QuantizedTensor:
    """Quantizes rows [C, *mid, K'] by the given scales, f32 like group_sizes; saturates."""
    dtype = recipe.data_dtype(gradient)
    kernel = functools.partial(kernels.scale_rows, dtype, clear_slack)
    plain = functools.partial(_scaled_rows, dtype)
    served = kernels.serve(x, group_sizes)
    data = either(served, kernel, plain, x, group_sizes, scale)
    return QuantizedTensor(data, scale, amax, None, None, group_sizes, None, recipe)


def _scaled_rows(dtype: Any, x: jax.Array, group_sizes: jax.Array, scale: jax.Array) -> jax.Array:
    slabs = _Slabs.of(x, group_sizes)
    flat = scale.reshape(-1)

    def step(block: RowBlock, data: jax.Array) -> jax.Array:
        values = block.read(slabs.rows).astype(jnp.float32)
        return block.write(
            data, bits(round_scaled(values, row_blocks.pick(flat, block.group), dtype))
        )

    blocks = row_blocks.cut(slabs.capacity, group_sizes)
    start = jnp.zeros(slabs.rows.shape, jnp.uint8)
    data = from_bits(row_blocks.loop(blocks, step, start, slabs.rows, flat), dtype)
    return data.reshape(x.shape)


def quantize_kernel(
    recipe: Recipe, w: jax.Array, reduce_axes: Axes = (), *, transposed: bool = False
) -> QuantizedTensor:
    """Quantizes kernels.

    Args:
        recipe: how.
        w: [G, K', *mid, N'] any float dtype; tiles run over dim 1 and the last dim.
        reduce_axes: manual mesh axes that split dims other than 0; TensorScaling takes each amax
            over them. Other recipes need local dims that are multiples of their tiles instead.
        transposed: TensorScaling and BlockScaling alone: make a copy with K' along memory too.

    Returns:
        A QuantizedTensor without `origin`.

    Raises:
        InvalidArgumentError: MXFP8, and K' or N' is no multiple of 32.
    """
    dtype = recipe.data_dtype()
    if isinstance(recipe, TensorScaling):
        amax = over(kernel_amax(w), reduce_axes)
        return scale_kernel(recipe, w, scale_of(amax, dtype), amax, transposed=transposed)
    served, last = kernels.serve(w, None), w.ndim - 1
    if isinstance(recipe, BlockScaling) and transposed:
        data, copy, scale = _transposed_kernel(recipe, w, None)
        return QuantizedTensor(data, scale, None, None, None, None, None, recipe, copy)
    if isinstance(recipe, BlockScaling):
        static = (dtype, recipe.power_of_two_scales)
        kernel = functools.partial(kernels.tile_kernel, *static)
        data, scale = either(served, kernel, functools.partial(_tiled_kernel, *static), w)
        return QuantizedTensor(data, scale, None, None, None, None, None, recipe)
    if isinstance(recipe, MXFP8):
        _check_multiple("dim 1 of the kernel", w.shape[1], w.shape)
        _check_multiple("the last dim of the kernel", w.shape[last], w.shape)
        kernel = functools.partial(kernels.mx_kernel, dtype)
        made = either(served, kernel, functools.partial(_mx_kernel, dtype), w)
        data, scale, columns, column_scale = made
        return QuantizedTensor(data, scale, None, columns, column_scale, None, None, recipe)
    return QuantizedTensor(w.astype(dtype), None, None, None, None, None, None, recipe)


def _tiled_kernel(dtype: Any, power_of_two: bool, w: jax.Array) -> tuple[jax.Array, ...]:
    tiles = {1: TILE, w.ndim - 1: TILE}
    return quantize_tiles(w.astype(jnp.float32), tiles, dtype, power_of_two)


def _mx_kernel(dtype: Any, w: jax.Array) -> tuple[jax.Array, ...]:
    values = w.astype(jnp.float32)
    data, scale = quantize_tiles(values, {1: MX_TILE}, dtype, True)
    columns, column_scale = quantize_tiles(values, {w.ndim - 1: MX_TILE}, dtype, True)
    return data, to_e8m0(scale), columns, to_e8m0(column_scale)


def scale_kernel(
    recipe: TensorScaling,
    w: jax.Array,
    scale: jax.Array,
    amax: jax.Array | None = None,
    *,
    transposed: bool = False,
) -> QuantizedTensor:
    """Quantizes kernels [G, K', *mid, N'] by the given scales, f32 [G]; saturates."""
    if transposed:
        data, copy, _ = _transposed_kernel(recipe, w, scale)
        return QuantizedTensor(data, scale, amax, None, None, None, None, recipe, copy)
    dtype = recipe.data_dtype()
    kernel = functools.partial(kernels.scale_kernel, dtype)
    plain = functools.partial(_scaled_kernel, dtype)
    data = either(kernels.serve(w, None), kernel, plain, w, scale)
    return QuantizedTensor(data, scale, amax, None, None, None, None, recipe)


def _scaled_kernel(dtype: Any, w: jax.Array, scale: jax.Array) -> jax.Array:
    return round_scaled(w.astype(jnp.float32), scale.reshape(-1, *([1] * (w.ndim - 1))), dtype)


def _transposed_kernel(
    recipe: TensorScaling | BlockScaling, w: jax.Array, scale: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Data, the same with K' along memory, and scales; BlockScaling makes them."""
    dtype = recipe.data_dtype()
    two = isinstance(recipe, BlockScaling) and recipe.power_of_two_scales

    def plain(w: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, ...]:
        if scale is None:
            data, made = _tiled_kernel(dtype, two, w)
        else:
            data, made = _scaled_kernel(dtype, w, scale), scale
        return data, from_bits(jnp.moveaxis(bits(data), 1, -1), dtype), made

    kernel = functools.partial(kernels.transposed_kernel, dtype, two)
    return either(kernels.serve_transposed(w), kernel, plain, w, scale)


def kernel_amax(w: jax.Array) -> jax.Array:
    """[G, ...] -> f32 [G]: the largest finite absolute value of each expert's kernel."""

    def plain(w: jax.Array) -> jax.Array:
        return finite_max(w.astype(jnp.float32), tuple(range(1, w.ndim)))

    return either(kernels.serve(w, None), kernels.kernel_amax, plain, w)


def group_amax(x: jax.Array, group_sizes: jax.Array, num_experts: int | None = None) -> jax.Array:
    """Rows [C, ...] -> f32 like group_sizes: the largest finite absolute value of each group.

    With `num_experts` groups whose number is the same modulo it share theirs.
    """
    groups = math.prod(group_sizes.shape)
    experts = groups if num_experts is None else num_experts
    kernel = functools.partial(kernels.group_amax, experts)
    plain = functools.partial(_group_amax, experts)
    served = experts > 0 and kernels.serve(x, group_sizes)
    return amax_of_groups(either(served, kernel, plain, x, group_sizes), group_sizes)


def amax_of_groups(amax: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """amax [experts] of the expert of every group: like group_sizes."""
    groups = math.prod(group_sizes.shape)
    return jnp.tile(amax, groups // max(amax.shape[0], 1)).reshape(group_sizes.shape)


def _group_amax(experts: int, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """f32 [experts]."""
    slabs = _Slabs.of(x, group_sizes)
    blocks = row_blocks.cut(slabs.capacity, group_sizes)

    def step(block: RowBlock, amax: jax.Array) -> jax.Array:
        values = block.read(slabs.rows).astype(jnp.float32)
        largest = finite_max(values, tuple(range(values.ndim)))
        return row_blocks.max_at(amax, blocks.expert(block, experts), largest)

    return row_blocks.loop(blocks, step, jnp.zeros((experts,), jnp.float32), slabs.rows)


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

    def step(block: RowBlock, data: jax.Array) -> jax.Array:
        return block.write(data, block.read(slabs.rows))

    blocks = row_blocks.cut(slabs.capacity, slabs.totals, TILE)
    data = row_blocks.loop(blocks, step, start, slabs.rows)
    return data.reshape(*slabs.lead, *slabs.rows.shape[1:])


def _tiled_rows(
    dtype: Any, two: bool, x: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, ...]:
    """Data [C, *mid, K'] and f32 scales [C, *mid, ceil(K' / 128)]."""
    slabs = _Slabs.of(x, group_sizes)
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

    blocks = row_blocks.cut(slabs.capacity, slabs.totals, TILE)
    data, scales = row_blocks.loop(blocks, step, start, rows)
    lead = (*slabs.lead, *rows.shape[1:-1])
    return from_bits(data, dtype).reshape(*lead, rows.shape[last]), scales.reshape(*lead, tiles)


def _mx_rows(dtype: Any, x: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, ...]:
    """Data, scales [C, *mid, K' / 32], and the same along the rows, scales [C / 32, *mid, K']."""
    slabs = _Slabs.of(x, group_sizes)
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

    def step(block: RowBlock, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values = block.read(rows).astype(jnp.float32)
        data, scale = quantize_tiles(values, {last: MX_TILE}, dtype, True)
        columns, column_scale = quantize_tiles(values, {0: MX_TILE}, dtype, True)
        # C is a multiple of 32 and so are a block's rows: tiles straddle no block and no slab.
        tile = RowBlock(
            block.group, lax.div(block.start, jnp.int32(MX_TILE)), block.valid[::MX_TILE]
        )
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
