"""Quantization on one device, in plain JAX. The arithmetic is that of `ep.recipes`.

On a GPU the kernels of `kernels.py` stand in for what they take, bit for bit.

Letters: C rows of a slab, S slabs on this device, L groups of a slab, G experts of the kernels on
this device. Rows are [C, *mid, K'] with group_sizes [L], or [S, C, *mid, K'] with [S, L].

Rows past sum(group_sizes) are never read: they reach no amax and come out as zeros with scales
of 1. Nothing here is differentiable; `grouped_quantize` is, straight through.
"""

from __future__ import annotations

import functools

import jax

from ep_runtime_client.ops.quantize.amax import group_amax, kernel_amax, over
from ep_runtime_client.ops.quantize.formats.format import Axes, RowOptions
from ep_runtime_client.ops.quantize.formats.layouts import of_halves
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tensor import scaled_kernel, scaled_rows
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
        scale: f32 like group_sizes, of delayed scaling: what is larger saturates.

    Returns:
        A QuantizedTensor without `origin`.

    Raises:
        InvalidArgumentError: MXFP8, and K' or C is no multiple of 32.

    Cost: follows sum(group_sizes) but for zeros and ones of the results' sizes; one pass over the
        rows, two for TensorScaling.
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
    """Quantizes rows [C, *mid, K'] by the given scales, f32 like group_sizes; saturates."""
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
        recipe: how.
        w: [G, K', *mid, N'] any float dtype, or a Pair of [G, K', M], which comes out as one
            [G, K', 2, M]; tiles run over dim 1 and the last dim.
        reduce_axes: manual mesh axes that split dims other than 0; TensorScaling takes each amax
            over them. Other recipes need local dims that are multiples of their tiles instead.
        transposed: TensorScaling and BlockScaling alone: make a copy with K' along memory too.
        scale: f32 [G], of delayed scaling: what is larger saturates.

    Returns:
        A QuantizedTensor without `origin`.

    Raises:
        InvalidArgumentError: MXFP8, and K' or N' is no multiple of 32.
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
