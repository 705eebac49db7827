"""The public op that quantizes rows of groups, or kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.layers import EpLayer
from ep_runtime_client.ops import local_quantize
from ep_runtime_client.quantized import QuantizedTensor
from ep_runtime_client.recipes import Recipe, TensorScaling


def grouped_quantize(
    x: jax.Array,
    group_sizes: jax.Array | None,
    recipe: Recipe,
    *,
    layer: EpLayer | None = None,
) -> QuantizedTensor:
    """Quantizes the rows of every group, or every expert's kernel; moves nothing.

    Args:
        x: rows [R, C, K'] or [rows, K'], or kernels [E, K', N'], in any float dtype. Dims between
            the first of a row or kernel and the last stay apart: wi may be [E, H, 2, M].
        group_sizes: int32 [R, L] or [E], rows of each group, on the device; None for kernels.
        recipe: one of `ep.recipes`, which say how values are rounded.
        layer: the layer whose rows or kernels these are; None is one device.

    Returns:
        QuantizedTensor whose data has the shape of x. Rows past sum(group_sizes) are not read:
        they reach no amax and come out as zeros with scales of 1. Gradients go straight through
        to x: rounding is the identity to them.

    Raises:
        InvalidArgumentError: dims or dtypes that do not fit, sizes that MXFP8 cannot tile, or
            delayed scaling, which needs the state that grouped_gemm takes.

    Cost: follows sum(group_sizes); no host synchronisation.
    """
    check_quantize(x, group_sizes, recipe)
    values = jax.lax.stop_gradient(x)
    if group_sizes is None:
        quantized: QuantizedTensor = _kernel(recipe, values)
    else:
        quantized = _rows(recipe, values, group_sizes.astype(jnp.int32))
    tracked: QuantizedTensor = dataclasses.replace(quantized, origin=x)
    return tracked


def check_quantize(x: Any, group_sizes: Any, recipe: Any) -> None:
    """Raises InvalidArgumentError for what cannot be quantized."""
    if not isinstance(recipe, Recipe):
        raise InvalidArgumentError(
            f"recipe must be one of ep.recipes, got {recipe!r}", argument="recipe"
        )
    if isinstance(recipe, TensorScaling) and recipe.delayed:
        raise InvalidArgumentError(
            "recipe must be TensorScaling() here, got one with delayed=True: its scales come from "
            "the state that grouped_gemm takes",
            argument="recipe",
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InvalidArgumentError(f"x must be floating, got {x.dtype}", argument="x")
    if group_sizes is None:
        if x.ndim < 3:
            raise InvalidArgumentError(
                f"x must be [E, K', N'] without group_sizes, got {tuple(x.shape)}", argument="x"
            )
        return
    check_rows("x", x, group_sizes)


def check_rows(name: str, x: Any, group_sizes: Any) -> None:
    """Raises InvalidArgumentError unless `x` [R, C, ...] or [rows, ...] fits group_sizes."""
    if group_sizes.ndim not in (1, 2) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise InvalidArgumentError(
            "group_sizes must be integers [R, L] or [E], got "
            f"{group_sizes.dtype}{list(group_sizes.shape)}",
            argument="group_sizes",
        )
    lead = group_sizes.ndim
    if x.ndim <= lead or x.shape[: lead - 1] != group_sizes.shape[: lead - 1]:
        wanted = "[R, C, K'] beside group_sizes [R, L]" if lead == 2 else "[rows, K']"
        raise InvalidArgumentError(
            f"{name} must be {wanted}, got {tuple(x.shape)} beside {tuple(group_sizes.shape)}",
            argument=name,
        )


_rows = jax.jit(local_quantize.quantize_rows, static_argnums=0)
_kernel = jax.jit(local_quantize.quantize_kernel, static_argnums=0)
