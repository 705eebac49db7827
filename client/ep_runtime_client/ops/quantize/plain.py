"""Quantization on one device, in plain JAX. `ep.recipes` describes the arithmetic.

On a GPU the kernels of `kernels.py` run instead, with the same bits, if they support the arrays.

Letters: C rows of a slab, S slabs on this device, L groups of a slab, G experts of the kernels on
this device. Rows are [C, *mid, K'] with group_sizes [L], or [S, C, *mid, K'] with [S, L].

Rows past sum(group_sizes) are never read: they do not count for an amax and become zeros with
scales of 1. Nothing here is differentiable; `grouped_quantize` is, straight through.
"""

from __future__ import annotations

import functools

import jax

from ep_runtime_client.ops.quantize.amax import group_amax, kernel_amax, over
from ep_runtime_client.ops.quantize.formats.format import Axes, RowOptions
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tensor import scaled_kernel, scaled_rows
from ep_runtime_client.ops.quantize.kernels import of_halves
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor


def quantize_rows(
    recipe: Recipe,
    x: jax.Array,
    group_sizes: jax.Array,
    reduce_axes: Axes = (),
    *,
    gradient: bool = False,
    num_experts: int | None = None,
    clear_slack: bool = True,
    scale: jax.Array | None = None,
) -> QuantizedTensor:
    """Quantizes the rows of every group.

    Args:
        recipe: how to quantize.
        x: [C, *mid, K'] any float dtype.
        group_sizes: [L] int32, on the device, any counts.
        reduce_axes: manual mesh axes that split rows of one group; each amax of TensorScaling is
            taken over them.
        gradient: whether x are gradients, for which the recipe has its own dtype.
        num_experts: only for TensorScaling: groups whose numbers are equal modulo this belong to
            the same expert and share an amax; None gives every group its own.
        clear_slack: a caller may read rows past the last group. If False, a GPU leaves them
            undefined; on other platforms they are zeros with scales of 1 anyway.
        scale: f32 like group_sizes, for delayed scaling: larger values saturate.

    Returns:
        A QuantizedTensor without `origin`.

    Raises:
        InvalidArgumentError: the recipe is MXFP8, and K' or C is not a multiple of 32.

    Cost: follows sum(group_sizes), except for fills of the results with zeros and ones; one pass
        over the rows, two for TensorScaling.
    """
    options = RowOptions(reduce_axes, gradient, num_experts, clear_slack)
    if scale is not None:
        amax = over(group_amax(x, group_sizes, num_experts), reduce_axes)
        return scale_rows(
            recipe, x, group_sizes, scale, amax, gradient=gradient, clear_slack=clear_slack
        )
    leaves = format_of(recipe).quantize_rows(recipe, x, group_sizes, options)
    return _tensor(recipe, group_sizes, **leaves)


def scale_rows(
    recipe: Recipe,
    x: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array,
    amax: jax.Array | None = None,
    *,
    gradient: bool = False,
    clear_slack: bool = True,
) -> QuantizedTensor:
    """Quantizes rows [C, *mid, K'] with the given scales, f32 like group_sizes; saturates."""
    dtype = recipe.data_dtype(gradient)
    data = scaled_rows(dtype, x, group_sizes, scale, clear_slack)
    return _tensor(recipe, group_sizes, data=data, scale=scale, amax=amax)


def quantize_kernel(
    recipe: Recipe,
    w: jax.Array | Pair,
    reduce_axes: Axes = (),
    *,
    transposed: bool = False,
    scale: jax.Array | None = None,
) -> QuantizedTensor:
    """Quantizes kernels.

    Args:
        recipe: how to quantize.
        w: [G, K', *mid, N'] any float dtype, or a Pair of [G, K', M], which becomes one array [G,
            K', 2, M]; tiles run over dim 1 and the last dim.
        reduce_axes: manual mesh axes that split dims other than 0; each amax of TensorScaling is
            taken over them. Other recipes need local dims that are multiples of their tiles
            instead.
        transposed: TensorScaling and BlockScaling only: also make a copy with K' contiguous in
            memory.
        scale: f32 [G], for delayed scaling: larger values saturate.

    Returns:
        A QuantizedTensor without `origin`.

    Raises:
        InvalidArgumentError: the recipe is MXFP8, and K' or N' is not a multiple of 32.
    """
    form = format_of(recipe)
    if scale is not None:
        amax = over(kernel_amax(w), reduce_axes)
        leaves = scaled_kernel(recipe.data_dtype(), w, scale, transposed=transposed)
        return _tensor(recipe, None, scale=scale, amax=amax, **leaves)
    make = functools.partial(
        form.quantize_kernel, recipe, reduce_axes=reduce_axes, transposed=transposed
    )
    leaves = of_halves(make, w) if isinstance(w, Pair) and not form.per_group else make(w)
    return _tensor(recipe, None, **leaves)


def _tensor(
    recipe: Recipe,
    group_sizes: jax.Array | None,
    *,
    data: jax.Array,
    scale: jax.Array | None = None,
    amax: jax.Array | None = None,
    data_columns: jax.Array | None = None,
    scale_columns: jax.Array | None = None,
    transposed: jax.Array | None = None,
) -> QuantizedTensor:
    columns = (data_columns, scale_columns)
    return QuantizedTensor(data, scale, amax, *columns, group_sizes, None, recipe, transposed)
