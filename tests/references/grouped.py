"""Defines grouped math in NumPy, as the oracle of the tests.

Written from the contract, with Python loops over groups; sums in f64, rounding by ml_dtypes.
Rows are [C, ...] with group_sizes [L]; rows past sum(group_sizes) are never looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ep_runtime_client.ops.quantize.formats.recipes import (
    MX_TILE,
    MXFP8,
    TILE,
    BlockScaling,
    Recipe,
    TensorScaling,
)

Array = npt.NDArray[Any]

F32_SMALLEST = np.float32(2.0**-126)


def zones(group_sizes: Any) -> Iterator[tuple[int, slice]]:
    """Yields (group, its rows) of every group."""
    start = 0
    for group, size in enumerate(np.asarray(group_sizes)):
        yield group, slice(start, start + int(size))
        start += int(size)


def grouped_gemm(lhs: Any, rhs: Any, bias: Any, group_sizes: Any) -> Array:
    """lhs [C, K'], rhs [L, K', *N'], bias [L, *N'] or None -> f64 [C, *N']; 0 past
    the last group.
    """
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out = np.zeros((lhs.shape[0], *rhs.shape[2:]))
    for group, rows in zones(group_sizes):
        out[rows] = np.tensordot(lhs[rows], rhs[group], axes=1)
        if bias is not None:
            out[rows] += np.asarray(bias, np.float64)[group]
    return out


def data_grad(grad: Any, rhs: Any, group_sizes: Any) -> Array:
    """grad [C, *N'], rhs [L, K', *N'] -> f64 [C, K']."""
    grad, rhs = np.asarray(grad, np.float64), np.asarray(rhs, np.float64)
    out = np.zeros((grad.shape[0], rhs.shape[1]))
    for group, rows in zones(group_sizes):
        flat = rhs[group].reshape(rhs.shape[1], -1)
        out[rows] = grad[rows].reshape(-1, flat.shape[1]) @ flat.T
    return out


def weight_grad(lhs: Any, grad: Any, group_sizes: Any) -> Array:
    """lhs [C, K'], grad [C, *N'] -> f64 [L, K', *N'], zeros for groups without rows."""
    lhs, grad = np.asarray(lhs, np.float64), np.asarray(grad, np.float64)
    out = np.zeros((len(group_sizes), lhs.shape[1], *grad.shape[1:]))
    for group, rows in zones(group_sizes):
        out[group] = np.tensordot(lhs[rows].T, grad[rows], axes=1)
    return out


def bias_grad(grad: Any, group_sizes: Any) -> Array:
    """grad [C, *N'] -> f64 [L, *N']."""
    grad = np.asarray(grad, np.float64)
    return np.stack([grad[rows].sum(0) for _, rows in zones(group_sizes)])


class Quantized(NamedTuple):
    """Data and f32 scales; MXFP8 has the column-wise copy too."""

    data: Array
    scale: Array | None
    data_columns: Array | None = None
    scale_columns: Array | None = None


def quantize_rows(recipe: Recipe, x: Any, group_sizes: Any, *, gradient: bool = False) -> Quantized:
    """x [C, *mid, K'] -> the result of grouped_quantize; zeros and scales of 1 past
    the last group.
    """
    dtype = recipe.data_dtype(gradient)
    x = np.asarray(x, np.float32).copy()
    x[int(np.sum(group_sizes)) :] = 0
    if isinstance(recipe, TensorScaling):
        data = np.zeros(x.shape, dtype)
        scale = np.ones(len(group_sizes), np.float32)
        for group, rows in zones(group_sizes):
            scale[group] = scale_of(x[rows], dtype)
            data[rows] = rounded(x[rows], scale[group], dtype)
        return Quantized(data, scale)
    last = x.ndim - 1
    if isinstance(recipe, BlockScaling):
        return Quantized(*tiled(x, {last: TILE}, dtype, recipe.power_of_two_scales))
    if isinstance(recipe, MXFP8):
        data, scales = tiled(x, {last: MX_TILE}, dtype, True)
        return Quantized(data, scales, *tiled(x, {0: MX_TILE}, dtype, True))
    return Quantized(x.astype(dtype), None)


def quantize_kernel(recipe: Recipe, w: Any) -> Quantized:
    """w [E, K', *mid, N'] -> the result of grouped_quantize."""
    dtype = recipe.data_dtype()
    w = np.asarray(w, np.float32)
    last = w.ndim - 1
    if isinstance(recipe, TensorScaling):
        scale = np.array([scale_of(kernel, dtype) for kernel in w], np.float32)
        pairs = zip(w, scale, strict=True)
        return Quantized(np.stack([rounded(kernel, one, dtype) for kernel, one in pairs]), scale)
    if isinstance(recipe, BlockScaling):
        two = recipe.power_of_two_scales
        return Quantized(*tiled(w, {1: TILE, last: TILE}, dtype, two))
    if isinstance(recipe, MXFP8):
        columns = tiled(w, {last: MX_TILE}, dtype, True)
        return Quantized(*tiled(w, {1: MX_TILE}, dtype, True), *columns)
    return Quantized(w.astype(dtype), None)


def tiled(x: Array, tiles: dict[int, int], dtype: Any, power_of_two: bool) -> tuple[Array, Array]:
    """Data shaped like x, and an f32 scale per tile of x; the last tile of a dim may be smaller."""
    counts = [-(-n // tiles.get(axis, 1)) for axis, n in enumerate(x.shape)]
    data, scale = np.zeros(x.shape, dtype), np.ones(counts, np.float32)
    for place in np.ndindex(*counts):
        steps = [(at, tiles.get(axis, 1)) for axis, at in enumerate(place)]
        tile = tuple(slice(at * step, (at + 1) * step) for at, step in steps)
        scale[place] = scale_of(x[tile], dtype, power_of_two)
        data[tile] = rounded(x[tile], scale[place], dtype)
    return data, scale


def scale_of(values: Array, dtype: Any, power_of_two: bool = False) -> np.float32:
    """Returns the scale of f32 values that share one."""
    finite = np.abs(values[np.isfinite(values)])
    amax = finite.max() if finite.size else np.float32(0)
    if amax < F32_SMALLEST:
        return np.float32(1)
    largest = np.float32(jnp.finfo(dtype).max)
    if not power_of_two:
        return np.float32(max(np.float32(amax) / largest, F32_SMALLEST))
    # In f64 a quotient that is a power of two is exact, and others round to the right side.
    mantissa, exponent = np.frexp(np.float64(amax) / np.float64(largest))
    return np.float32(max(2.0 ** (exponent - (mantissa == 0.5)), F32_SMALLEST))


def rounded(values: Array, scale: Any, dtype: Any) -> Array:
    """Rounds f32 values times 1 / scale to `dtype`: to nearest even, saturating."""
    with np.errstate(over="ignore", invalid="ignore"):
        limit = np.float32(jnp.finfo(dtype).max)
        scaled = np.clip(values * (np.float32(1) / scale), -limit, limit)
        result: Array = np.where(np.isfinite(values), scaled, values).astype(dtype)
    return result
