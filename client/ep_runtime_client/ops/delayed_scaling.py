"""Delayed scaling on one device: scales from the amax of earlier calls, and histories of them.

Histories are [history, G], newest first, of the G experts on this device. Nothing here is
differentiable; the ops around it give histories a zero cotangent.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops import local_quantize
from ep_runtime_client.ops.local_quantize import Axes
from ep_runtime_client.quantized import QuantizedTensor
from ep_runtime_client.recipes import TensorScaling


def scales(history: jax.Array, dtype: Any) -> jax.Array:
    """[history, G] -> f32 [G] by each expert's largest amax; 1 where all of them are 0."""
    return local_quantize.scale_of(history.max(0), dtype)


def pushed(history: jax.Array, amax: jax.Array) -> jax.Array:
    """`history` [history, G] with `amax` [G] in front and its oldest row gone."""
    return jnp.concatenate([amax[None].astype(history.dtype), history[:-1]])


def quantize_rows(
    recipe: TensorScaling,
    x: jax.Array,
    group_sizes: jax.Array,
    history: jax.Array,
    reduce_axes: Axes = (),
) -> tuple[QuantizedTensor, jax.Array]:
    """Rows by the scales of earlier calls, and the history with this call's amax in front.

    Args:
        recipe: with delayed=True.
        x: [C, *mid, K'] with group_sizes [L], or [S, C, *mid, K'] with [S, L].
        group_sizes: int32; group l of slab s is expert (s * L + l) % G.
        history: f32 [history, G].
        reduce_axes: manual mesh axes that split rows of one expert, all outer axes.

    Returns:
        The rows, saturated where they exceed what earlier calls had, and the new history.
    """
    experts = history.shape[1]
    scale = scales(history, recipe.data_dtype())
    amax = local_quantize.group_amax(x, group_sizes, experts)
    amax = local_quantize.over(amax, reduce_axes)
    repeats = math.prod(group_sizes.shape) // experts
    spread = jnp.tile(scale, repeats).reshape(group_sizes.shape)
    quantized = local_quantize.scale_rows(recipe, x, group_sizes, spread, amax)
    return quantized, pushed(history, amax.reshape(-1)[:experts])


def quantize_kernel(
    recipe: TensorScaling, w: jax.Array, history: jax.Array, reduce_axes: Axes = ()
) -> tuple[QuantizedTensor, jax.Array]:
    """Kernels [G, K', *mid, N'] likewise; reduce_axes are those that split dims other than 0."""
    scale = scales(history, recipe.data_dtype())
    amax = local_quantize.over(local_quantize.kernel_amax(w), reduce_axes)
    return local_quantize.scale_kernel(recipe, w, scale, amax), pushed(history, amax)
