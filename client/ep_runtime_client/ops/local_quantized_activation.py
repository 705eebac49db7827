"""The experts' activation, quantized for the matmul behind it, on one device.

On a GPU one pass reads hidden and writes 8-bit data with scales (`quantized_activation_kernels.py`)
where it can, after one that finds the amax of tensor scales; everywhere else, and bit for bit, this
is `local_activation.py` followed by `local_quantize.py`. Letters as in `local_activation.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from ep_runtime_client.ops import local_activation, local_quantize
from ep_runtime_client.ops import quantized_activation_kernels as kernels
from ep_runtime_client.ops.fp8_scaling import scale_of
from ep_runtime_client.ops.local_activation import Activation
from ep_runtime_client.ops.local_quantize import Axes
from ep_runtime_client.ops.quantized_activation_kernels import Source
from ep_runtime_client.ops.row_kernels import either
from ep_runtime_client.quantized import QuantizedTensor
from ep_runtime_client.recipes import Recipe, TensorScaling


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What is made of activated rows. Hashable.

    Attributes:
        activation: what is computed.
        recipe: how it is quantized.
        num_experts: those of this device: groups whose number is the same modulo this many share
            an amax; None keeps all groups apart.
        reduce_axes: manual mesh axes that split rows of one group.
    """

    activation: Activation
    recipe: Recipe
    num_experts: int | None = None
    reduce_axes: Axes = ()

    def experts(self, group_sizes: jax.Array) -> int:
        return math.prod(group_sizes.shape) if self.num_experts is None else self.num_experts


def forward(
    static: Quantized,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
) -> QuantizedTensor:
    """Activated rows [S, C, M], times their weights, rounded to their dtype and quantized.

    Args:
        static: what is computed.
        hidden, row_weights, group_sizes: as `local_activation.forward` takes them.

    Returns:
        A QuantizedTensor without `origin`; rows past the last zone are zeros with scales of 1, or
        undefined on a GPU.

    Cost: hidden is read once, twice for TensorScaling, and nothing of its size is written but the
        8-bit data.
    """
    operands = (hidden, row_weights, group_sizes)
    recipe = static.recipe
    if not kernels.serve(static.activation, recipe, hidden, group_sizes):
        return _plain(static, *operands)
    amax, scale = None, None
    if isinstance(recipe, TensorScaling):
        ways = (functools.partial(way, static) for way in (_amax_by_kernel, _amax))
        amax = either(True, *ways, *operands)
        amax = local_quantize.over(
            local_quantize.amax_of_groups(amax, group_sizes), static.reduce_axes
        )
        scale = scale_of(amax, recipe.data_dtype())
    ways = (functools.partial(way, static) for way in (_data_by_kernel, _data))
    data, scale = either(True, *ways, *operands, scale)
    return QuantizedTensor(data, scale, amax, None, None, group_sizes, None, recipe)


def _plain(static: Quantized, *operands: Any) -> QuantizedTensor:
    rows, sizes = local_activation.forward(static.activation, *operands), operands[-1]
    return local_quantize.quantize_rows(
        static.recipe,
        rows,
        sizes,
        static.reduce_axes,
        num_experts=static.num_experts,
        clear_slack=False,
    )


def _amax_by_kernel(static: Quantized, *operands: Any) -> jax.Array:
    return kernels.group_amax(static.experts(operands[-1]), Source(static.activation, *operands))


def _amax(static: Quantized, *operands: Any) -> jax.Array:
    experts, sizes = static.experts(operands[-1]), operands[-1]
    rows = local_activation.forward(static.activation, *operands)
    return local_quantize.group_amax(rows, sizes, experts).reshape(-1)[:experts]


def _data_by_kernel(static: Quantized, *operands: Any) -> Any:
    *given, scale = operands
    return kernels.quantize(static.recipe, Source(static.activation, *given), scale)[:2]


def _data(static: Quantized, *operands: Any) -> Any:
    *given, scale = operands
    if not isinstance(static.recipe, TensorScaling):
        q = _plain(static, *given)
        return q.data, q.scale
    rows = local_activation.forward(static.activation, *given)
    q = local_quantize.scale_rows(static.recipe, rows, given[-1], scale, clear_slack=False)
    return q.data, scale
