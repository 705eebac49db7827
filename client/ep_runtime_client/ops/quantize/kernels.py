"""Quantization on a GPU: custom calls of the CUDA library, with the same bits as `plain.py`.

They support f32, bf16 and f16 whose last dim is a multiple of 8. 8-bit data and scales are returned
as uint8, which is also how they are moved and saved. Kernels also get a transposed layout, in which
K' is contiguous in memory; GPUs multiply it forward.

Letters as in `plain.py`. Rows [S * C, W], W all dims of a row, have sizes [S, L], or [S, 0] if
every slab is one group, as each kernel of [G, K', *mid, N'] is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.kernels import serve as kernels_serve
from ep_runtime_client.ops.kernels.ffi import targets
from ep_runtime_client.ops.quantize import kernels
from ep_runtime_client.ops.quantize.formats.format import Leaves
from ep_runtime_client.ops.quantize.formats.recipes import DATA_DTYPES, MX_TILE, TILE
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits, num_tiles
from ep_runtime_client.ops.quantize.pair import DIM, Pair

TARGETS = targets(
    "ep_group_amax_v1",
    "ep_scale_rows_v1",
    "ep_quantize_tiles_v1",
    "ep_quantize_blocks_v1",
    "ep_quantize_weights_v1",
    "ep_quantize_mx_v1",
)
_AMAX, _SCALE_ROWS, _TILES, _BLOCKS, _WEIGHTS, _MX = TARGETS
# K' and N' of 8-bit matmuls are multiples of it, because tensor copies move 16 bytes at a time.
PRODUCT_MULTIPLE = 16
_TRANSPOSED_MULTIPLE = 16  # of K': a thread stores 16 values along it
_F32 = jnp.dtype(jnp.float32)
Quantized = tuple[jax.Array, ...]


def supports(x: jax.Array, group_sizes: jax.Array | None, *, transposed: bool = False) -> bool:
    """Whether the custom calls of this module support `x` in a program lowered for a GPU.

    Args:
        x: rows; if group_sizes is None, weights of experts.
        group_sizes: as in `plain.py`, or None.
        transposed: also require that `transposed_kernel` supports the weights.
    """
    if transposed and x.shape[1] % _TRANSPOSED_MULTIPLE:
        return False
    if x.dtype not in kernels_serve.FLOATS or not kernels_serve.available():
        return False
    if group_sizes is not None:
        groups: tuple[int, ...] = group_sizes.shape
        middle = math.prod(x.shape[len(groups) : -1])
    else:
        groups, middle = (x.shape[0], 1), math.prod(x.shape[2:-1])
    few = middle * math.prod(x.shape[: len(groups)]) < 2**31
    few = few and middle * math.prod(groups[:-1]) <= kernels_serve.MAX_SLABS
    return (
        few
        and x.shape[-1] % kernels_serve.CONVERTED_MULTIPLE == 0
        and kernels_serve.supports(groups, x)
    )


def group_amax(experts: int, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Like `plain.group_amax`, but per expert: f32 [experts]."""
    return _amax(experts, *_rows(x, group_sizes))


def kernel_amax(w: jax.Array) -> jax.Array:
    """Like `plain.kernel_amax`."""
    return _amax(w.shape[0], *_kernels(w))


def _amax(experts: int, x: jax.Array, sizes: jax.Array) -> jax.Array:
    (amax,) = kernels_serve.call(_AMAX, (_struct((experts,), _F32),), (sizes, x))
    return amax


def scale_rows(
    dtype: Any, clear_slack: bool, x: jax.Array, group_sizes: jax.Array, scale: jax.Array
) -> jax.Array:
    """Returns the data of `plain.scale_rows`."""
    return _scaled(dtype, clear_slack, *_rows(x, group_sizes), scale).reshape(x.shape)


def scale_kernel(dtype: Any, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the data of `plain.quantize_kernel` for a given scale."""
    return _scaled(dtype, True, *_kernels(w), scale).reshape(w.shape)


def _scaled(
    dtype: Any, clear_slack: bool, x: jax.Array, sizes: jax.Array, scale: jax.Array
) -> jax.Array:
    operands = (sizes, x, scale.astype(_F32).reshape(-1))
    way = _way(dtype, False, clear_slack)
    (data,) = kernels_serve.call(_SCALE_ROWS, (_struct(x.shape),), operands, way)
    return from_bits(data, dtype)


def tile_rows(
    dtype: Any, power_of_two: bool, clear_slack: bool, x: jax.Array, group_sizes: jax.Array
) -> Quantized:
    """Quantizes by `BlockScaling`: data like x, and f32 scales [..., ceil(K' / 128)]."""
    lead = x.shape[:-1]
    middle = math.prod(lead[group_sizes.ndim :])
    # Tiles end with the last dim: each index of the middle dims is a row of its own.
    sizes = kernels_serve.sizes_of(group_sizes)
    sizes = sizes if middle == 1 else sizes * jnp.int32(middle)
    results = (
        _struct((math.prod(lead), x.shape[-1])),
        _struct((math.prod(lead), num_tiles(x.shape[-1], TILE)), _F32),
    )
    operands = (sizes, x.reshape(-1, x.shape[-1]))
    way = _way(dtype, power_of_two, clear_slack)
    data, scale = kernels_serve.call(_TILES, results, operands, way)
    return from_bits(data, dtype).reshape(x.shape), scale.reshape(*lead, -1)


def packed_rows(dtype: Any, power_of_two: bool, x: jax.Array) -> jax.Array:
    """Quantizes rows [R, H] as `tile_rows` does, into uint8: a row's data, then its scales."""
    rows, width = x.shape
    results = (_struct((rows, width + _F32.itemsize * num_tiles(width, TILE))),)
    operands = (jnp.zeros((1, 0), jnp.int32), x)
    (packed,) = kernels_serve.call(_TILES, results, operands, _way(dtype, power_of_two, False))
    return packed


def tile_kernel(dtype: Any, power_of_two: bool, w: jax.Array) -> Quantized:
    """Quantizes by `BlockScaling`: data like w, f32 scales in blocks of dim 1 and the last."""
    shape, middle = w.shape, w.shape[2:-1]
    flat = w.reshape(*shape[:2], math.prod(middle), shape[-1])
    tiles = [num_tiles(shape[dim], TILE) for dim in (1, -1)]
    results = (_struct(flat.shape), _struct((shape[0], tiles[0], flat.shape[2], tiles[1]), _F32))
    data, scale = kernels_serve.call(_BLOCKS, results, (flat,), _way(dtype, power_of_two, True))
    scale = scale.reshape(shape[0], tiles[0], *middle, tiles[1])
    return from_bits(data, dtype).reshape(shape), scale


def transposed_kernel(
    dtype: Any, power_of_two: bool, w: jax.Array, scale: jax.Array | None
) -> Quantized:
    """Returns data like w, transposed data [G, *mid, N', K'], and f32 scales.

    Quantizes with the given scale [G], which it returns, or with scales of blocks like
    `tile_kernel`.
    """
    shape, middle = w.shape, w.shape[2:-1]
    flat = w.reshape(*shape[:2], math.prod(middle), shape[-1])
    tiles = [num_tiles(shape[dim], TILE) for dim in (1, -1)]
    blocks = (shape[0], tiles[0], flat.shape[2], tiles[1])
    results = (
        _struct(flat.shape),
        _struct((shape[0], *flat.shape[2:], shape[1])),
        _struct(blocks if scale is None else (0,), _F32),
    )
    given = jnp.zeros(0, _F32) if scale is None else scale.astype(_F32)
    way = _way(dtype, power_of_two, True)
    # Forward matmuls read only `transposed`; the data are for the backward pass.
    found = kernels_serve.call(_WEIGHTS, results, (flat, given), way, stacked=1)
    data, transposed, made = found
    if scale is None:
        scale = made.reshape(shape[0], tiles[0], *middle, tiles[1])
    transposed = from_bits(transposed, dtype).reshape(shape[0], *shape[2:], shape[1])
    return from_bits(data, dtype).reshape(shape), transposed, scale


def mx_rows(dtype: Any, clear_slack: bool, x: jax.Array, group_sizes: jax.Array) -> Quantized:
    """Returns data and e8m0 scales along the last dim, then data and scales along the rows."""
    along, across = _mx(dtype, clear_slack, *_rows(x, group_sizes))
    lead = group_sizes.ndim
    tiles = (*x.shape[:-1], x.shape[-1] // MX_TILE)
    rows = (*x.shape[: lead - 1], x.shape[lead - 1] // MX_TILE, *x.shape[lead:])
    return (
        along[0].reshape(x.shape),
        along[1].reshape(tiles),
        across[0].reshape(x.shape),
        across[1].reshape(rows),
    )


def mx_kernel(dtype: Any, w: jax.Array) -> Quantized:
    """Returns data and e8m0 scales along dim 1, then data and scales along the last dim."""
    along, across = _mx(dtype, True, *_kernels(w))
    return (
        across[0].reshape(w.shape),
        across[1].reshape(w.shape[0], w.shape[1] // MX_TILE, *w.shape[2:]),
        along[0].reshape(w.shape),
        along[1].reshape(*w.shape[:-1], w.shape[-1] // MX_TILE),
    )


def _mx(
    dtype: Any, clear_slack: bool, x: jax.Array, sizes: jax.Array
) -> tuple[Quantized, Quantized]:
    """Returns (data, scales) of tiles along rows [rows, W], and of tiles across them."""
    rows, width = x.shape
    results = (
        _struct(x.shape),
        _struct((rows, width // MX_TILE)),
        _struct(x.shape),
        _struct((rows // MX_TILE, width)),
    )
    found = kernels_serve.call(_MX, results, (sizes, x), _way(dtype, True, clear_slack))
    scales = jnp.float8_e8m0fnu
    dtypes = (dtype, scales, dtype, scales)
    made = tuple(from_bits(x, kind) for x, kind in zip(found, dtypes, strict=True))
    return made[:2], made[2:]


def _rows(x: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = math.prod(x.shape[: group_sizes.ndim])
    return x.reshape(rows, -1), kernels_serve.sizes_of(group_sizes)


def _kernels(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = math.prod(w.shape[:2])
    return w.reshape(rows, -1), jnp.zeros((w.shape[0], 0), jnp.int32)


def _struct(shape: tuple[int, ...], dtype: Any = jnp.uint8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _way(dtype: Any, power_of_two: bool, clear_slack: bool) -> dict[str, int]:
    return {
        "format": DATA_DTYPES.index(jnp.dtype(dtype).name),
        "power_of_two": int(power_of_two),
        "clear_slack": int(clear_slack),
    }


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
    return kernels_serve.either(kernels.supports(w, None, transposed=True), kernel, plain, w, scale)


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
