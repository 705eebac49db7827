"""Checks which tokens a recipe can quantize before `dispatch` sends them, and quantizes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import DTYPE_BYTES, GroupSpec
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.quantize import kernels, plain
from ep_runtime_client.ops.quantize.formats.recipes import Recipe, check_recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import bits, num_tiles
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.quantize.row_bytes import row_bytes


def unsupported_reason(recipe: Recipe, group: GroupSpec) -> str:
    """Returns why rows of a group cannot be quantized before they are sent; "" if they can."""
    form = format_of(recipe)
    if not recipe.quantizes:
        return "it quantizes nothing: cast the tokens instead"
    if form.columns:
        return "the weights' gradient wants a copy that is quantized along the rows as received"
    if not form.by_row:
        return (
            "it has one scale per expert, of the rows that the expert receives (scales of earlier "
            "steps, as delayed scaling has them, would do, and are not there yet)"
        )
    wanted = row_bytes(group.hidden_size, form.tile)
    fits = group.hidden_size * DTYPE_BYTES[group.max_token_dtype]
    if wanted > fits:
        return (
            f"a row of hidden_size={group.hidden_size} takes {wanted} bytes with its scales, a "
            f"staged row of group {group.name!r} has {fits}"
        )
    return ""


def check(group: GroupSpec, recipe: Any, tokens: Any) -> None:
    """Raises InvalidArgumentError unless `recipe` can quantize `tokens` before they are sent."""
    check_recipe(recipe, " or None")
    why = unsupported_reason(recipe, group)
    if why:
        raise InvalidArgumentError(
            f"recipe {recipe} cannot quantize rows before they are sent: {why}", argument="recipe"
        )
    if isinstance(tokens, QuantizedTensor):
        _check_quantized(tokens)
    elif not jnp.issubdtype(tokens.dtype, jnp.floating) or tokens.dtype.itemsize == 1:
        raise InvalidArgumentError(
            f"tokens must have a float dtype of 2 bytes or more to be quantized, "
            f"got {tokens.dtype}",
            argument="tokens",
        )


def _check_quantized(tokens: QuantizedTensor) -> None:
    wanted = (*tokens.shape[:-1], num_tiles(tokens.shape[-1], format_of(tokens.recipe).tile))
    found = None if tokens.scale is None else tuple(tokens.scale.shape)
    if found != wanted or tokens.dtype.itemsize != 1 or not tokens.is_rows:
        raise InvalidArgumentError(
            f"tokens must be rows of 1-byte data [..., H] with scales {list(wanted)}, as "
            f"grouped_quantize makes with group_sizes; got {tokens.dtype} "
            f"{list(tokens.shape)} with scales {'none' if found is None else list(found)}",
            argument="tokens",
        )


def quantized(
    recipe: Recipe, tokens: jax.Array, plan: Any, *, gradient: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Quantizes this device's tokens [T, H]; returns data and scales.

    The number of rows is a value that no compiler knows, so the loop over rows stays a loop.
    Otherwise XLA would fuse parts of the model into it and round the tokens differently.
    """
    hidden_zero = plan.num_recv >> 31
    sizes = hidden_zero + jnp.int32(tokens.shape[0])
    q = plain.quantize_rows(recipe, tokens, sizes, gradient=gradient)
    assert q.scale is not None
    return q.data, q.scale


def packed(recipe: Recipe, rows: jax.Array, plan: Any, *, gradient: bool) -> jax.Array:
    """Quantizes rows [T, H] by `BlockScaling` to the bytes a block call sends: data, f32 scales."""
    dtype, two = recipe.data_dtype(gradient), format_of(recipe).power_of_two(recipe)

    def plain_bytes(rows: jax.Array, plan: Any) -> jax.Array:
        data, scale = quantized(recipe, rows, plan, gradient=gradient)
        scale_bytes = lax.bitcast_convert_type(scale, jnp.uint8).reshape(len(rows), -1)
        return jnp.concatenate([bits(data), scale_bytes], 1)

    def by_kernel(rows: jax.Array, plan: Any) -> jax.Array:
        return kernels.packed_rows(dtype, two, rows)

    served = kernels.supports(rows[None], jnp.zeros((1, 1), jnp.int32))
    return either(served, by_kernel, plain_bytes, rows, plan)
