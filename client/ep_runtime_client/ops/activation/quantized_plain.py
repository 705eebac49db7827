"""Computes the experts' activation, quantized for the matmul after it, on one device.

If the GPU kernels of `quantized_kernels.py` support the call, one pass reads hidden and writes
8-bit data with scales, after a pass that finds the amax for tensor scales. Otherwise this is
`plain.py` followed by `quantize/plain.py`, with the same bits. Letters as in `plain.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from ep_runtime_client.ops.activation import plain
from ep_runtime_client.ops.activation import quantized_kernels as kernels
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.amax import amax_of_groups, group_amax, over
from ep_runtime_client.ops.quantize.formats.format import Axes
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.quantize.rounding import scale_of
from ep_runtime_client.ops.tracing import slack


@dataclasses.dataclass(frozen=True)
class QuantizedActivation:
    """Describes an activation whose results are quantized. Hashable.

    Attributes:
        activation: the activation.
        recipe: how its results are quantized.
        num_experts: experts on this device: groups whose numbers are equal modulo this share an
            amax; None gives every group its own.
        reduce_axes: manual mesh axes that split rows of one group.
    """

    activation: Activation
    recipe: Recipe
    num_experts: int | None = None
    reduce_axes: Axes = ()

    def experts(self, group_sizes: jax.Array) -> int:
        return math.prod(group_sizes.shape) if self.num_experts is None else self.num_experts


def forward(
    static: QuantizedActivation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
) -> QuantizedTensor:
    """Returns activated rows [S, C, M], times their weights, rounded to their dtype and quantized.

    Args:
        static: the activation and its recipe.
        hidden, row_weights, group_sizes: as `plain.forward` takes them.

    Returns:
        A QuantizedTensor without `origin`; rows past the last zone are zeros with scales of 1, or
        undefined on a GPU.

    Cost: hidden is read once, twice for TensorScaling, and nothing of its size is written but the
        8-bit data.
    """
    return _quantized(static, hidden, row_weights, group_sizes, None)[0]


def pullback(
    static: QuantizedActivation,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    grad: jax.Array,
) -> tuple[QuantizedTensor, jax.Array | None]:
    """Returns quantized gradients of hidden, rounded to its dtype first, and those of row_weights.

    Both as `plain.pullback` makes them of `grad` [S, C, M]; a weight's gradient sums over the
    columns of M on this device.
    """
    return _quantized(static, hidden, row_weights, group_sizes, grad)


def _quantized(
    static: QuantizedActivation, *operands: Any
) -> tuple[QuantizedTensor, jax.Array | None]:
    hidden, _, sizes, grad = operands
    recipe, gradient = static.recipe, grad is not None
    if not kernels.supports(static.activation, recipe, hidden, sizes, gradient=gradient):
        return _plain(static, *operands)
    amax, scale = None, None
    if format_of(recipe).per_group:
        ways = (functools.partial(way, static) for way in (_amax_by_kernel, _amax))
        amax = amax_of_groups(either(True, *ways, *operands), sizes)
        amax = over(amax, static.reduce_axes)
        scale = scale_of(amax, recipe.data_dtype(gradient))
    ways = (functools.partial(way, static) for way in (_data_by_kernel, _data))
    data, scale, d_weights = either(True, *ways, *operands, scale)
    return QuantizedTensor(data, scale, amax, None, None, sizes, None, recipe), d_weights


def _rows(static: QuantizedActivation, *operands: Any) -> tuple[jax.Array, jax.Array | None]:
    """Computes the rows that are quantized, and the gradient of row_weights."""
    *given, grad = operands
    if grad is None:
        return plain.forward(static.activation, *given), None
    return plain.pullback(static.activation, *operands)


def _plain(static: QuantizedActivation, *operands: Any) -> tuple[QuantizedTensor, jax.Array | None]:
    rows, d_weights = _rows(static, *operands)
    q = quantize_plain.quantize_rows(
        static.recipe,
        rows,
        operands[2],
        static.reduce_axes,
        gradient=operands[3] is not None,
        num_experts=static.num_experts,
        clear_slack=slack.checked(),
    )
    return q, d_weights


def _amax_by_kernel(static: QuantizedActivation, *operands: Any) -> jax.Array:
    return kernels.group_amax(
        static.experts(operands[2]), kernels.ActivationOperands(static.activation, *operands)
    )


def _amax(static: QuantizedActivation, *operands: Any) -> jax.Array:
    experts, rows = static.experts(operands[2]), _rows(static, *operands)[0]
    return group_amax(rows, operands[2], experts).reshape(-1)[:experts]


def _data_by_kernel(static: QuantizedActivation, *operands: Any) -> Any:
    *given, scale = operands
    source = kernels.ActivationOperands(static.activation, *given)
    data, made_scale, d_weights = kernels.quantize(static.recipe, source, scale)
    if slack.checked():
        sizes = given[2]
        data = from_bits(slack.cleared(bits(data), sizes), data.dtype)
        if scale is None and made_scale is not None:
            made_scale = slack.cleared(made_scale, sizes)
    return data, made_scale, d_weights


def _data(static: QuantizedActivation, *operands: Any) -> Any:
    *given, scale = operands
    if not format_of(static.recipe).per_group:
        q, d_weights = _plain(static, *given)
        return q.data, q.scale, d_weights
    rows, d_weights = _rows(static, *given)
    sizes, gradient = given[2], given[3] is not None
    options: dict[str, Any] = {"gradient": gradient, "clear_slack": slack.checked()}
    q = quantize_plain.scale_rows(static.recipe, rows, sizes, scale, **options)
    return q.data, scale, d_weights
