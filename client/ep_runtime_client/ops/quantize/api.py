"""The public op that quantizes rows of groups, or kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer, TracedLayer, resolve
from ep_runtime_client.ops.partitioning import regions
from ep_runtime_client.ops.partitioning.roles import Roles, padded
from ep_runtime_client.ops.quantize import ops
from ep_runtime_client.ops.quantize.formats.recipes import Recipe, check_recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.quantize.rounding import quantize_tiles
from ep_runtime_client.ops.tracing import eager


def grouped_quantize(
    x: jax.Array,
    group_sizes: jax.Array | None,
    recipe: Recipe,
    *,
    layer: EpLayer | TracedLayer | None = None,
) -> QuantizedTensor:
    """Quantizes every expert's rows, or every expert's kernel, as a recipe says.

    Only amax values move between devices.

    Args:
        x: rows [R, C, K'] or [rows, K'], or kernels [E, K', N'], in any float dtype. More dims in
            the middle are allowed, such as [E, H, 2, M]. With BlockScaling also tokens [T, H] for
            `dispatch`, sharded in any way.
        group_sizes: int32 [R, L] or [E], rows of each group, on the device; None for kernels and
            for tokens, which are one group.
        recipe: one of `ep.recipes`.
        layer: the layer whose mesh and axes the sharding rules use. Without it they come from the
            sharding of x; an unsharded x means one device.

    Returns:
        QuantizedTensor whose data has the shape of x. Rows past sum(group_sizes) are not read, and
        become zeros with scales of 1. On Hopper GPUs kernels also have `transposed`, a byte more
        per value. Gradients go straight through to x, as if nothing had been rounded.

    Raises:
        InvalidArgumentError: dims or dtypes do not fit, MXFP8 cannot tile the sizes, or the recipe
            is delayed (its state goes to `grouped_gemm`).

    Cost: the work follows sum(group_sizes); no host sync.

    Source: as the recipe's.

    Examples:
        >>> q = ep.grouped_quantize(jnp.ones((2, 256, 128)), None, ep.recipes.BlockScaling())
        >>> q.data.dtype.name, q.scale.shape
        ('float8_e4m3fn', (2, 2, 1))
    """
    check_quantize(x, group_sizes, recipe)
    values = jax.lax.stop_gradient(x)
    if group_sizes is None and x.ndim == 2:
        quantized = eager.run(_run_tokens, recipe, values)
    elif group_sizes is None:
        quantized = _quantize_kernel(values, recipe, layer)
    else:
        quantized = _quantize_rows(values, group_sizes.astype(jnp.int32), recipe, layer)
    return dataclasses.replace(quantized, origin=x)


def _quantize_kernel(
    w: jax.Array, recipe: Recipe, layer: EpLayer | TracedLayer | None
) -> QuantizedTensor:
    known = regions.known_entries(w, w.ndim)
    where = regions.of_call(layer, [w], known=known is not None)
    entries = known or padded((), w.ndim)
    if layer is None and where.mode == "shard_map":
        assert where.roles is not None
        # Any axis on the experts' dim shards experts.
        where = dataclasses.replace(where, roles=Roles(where.roles.sizes, (), entries[0]))
    shape = tuple(w.shape)
    op = ops.QuantizeKernel(where, recipe, shape, transposed=ops.transposes(recipe, shape))
    return eager.run(ops.kernel, (op, entries), w)


def _quantize_rows(
    x: jax.Array, group_sizes: jax.Array, recipe: Recipe, layer: EpLayer | TracedLayer | None
) -> QuantizedTensor:
    one_slab = group_sizes.ndim == 1
    if one_slab:
        x, group_sizes = x[None], group_sizes[None]
    known = regions.known_entries(x, x.ndim)
    where = regions.of_call(layer, [x, group_sizes], known=known is not None, slabs=True)
    entries = known or padded((), x.ndim)
    if layer is None and where.mode == "shard_map":
        assert where.roles is not None
        roles = ops.rows_roles(where.roles.sizes, entries, group_sizes.shape, None)
        where = dataclasses.replace(where, roles=roles)
    experts = None
    if layer is not None:
        experts = resolve(layer)[0].group_spec.num_experts
        regions.check_slabs(where, "x", x.shape[0])
    op = ops.QuantizeRows(where, recipe, x.ndim, experts)
    quantized: QuantizedTensor = eager.run(ops.rows, (op, entries), x, group_sizes)
    return jax.tree.map(lambda leaf: leaf[0], quantized) if one_slab else quantized


def _run_tokens(recipe: Recipe, x: jax.Array) -> QuantizedTensor:
    """Quantizes tokens row by row, under any sharding and without moving rows."""
    form, kind = format_of(recipe), jnp.finfo(x.dtype)
    # XLA may skip a rounding that is followed by a cast back to f32.
    x = jax.lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)
    static = (recipe.data_dtype(), form.power_of_two(recipe))
    data, scale = quantize_tiles(x.astype(jnp.float32), {1: form.tile}, *static)
    sizes = jnp.full(1, x.shape[0], jnp.int32)
    return QuantizedTensor(data, scale, None, None, None, sizes, None, recipe)


def check_quantize(x: Any, group_sizes: Any, recipe: Any) -> None:
    """Raises InvalidArgumentError unless `recipe` can quantize `x`."""
    check_recipe(recipe)
    if recipe.delayed:
        raise InvalidArgumentError(
            "recipe must be TensorScaling() here, got one with delayed=True: its scales come from "
            "the state that grouped_gemm takes",
            argument="recipe",
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InvalidArgumentError(f"x must be floating, got {x.dtype}", argument="x")
    if group_sizes is None:
        by_row = format_of(recipe).by_row
        if x.ndim < (2 if by_row else 3):
            tokens = "" if by_row else "; tokens [T, H] are for BlockScaling"
            raise InvalidArgumentError(
                f"x must be [E, K', N'] without group_sizes, got {tuple(x.shape)}{tokens}",
                argument="x",
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
        wanted = "[R, C, K'] for group_sizes [R, L]" if lead == 2 else "[rows, K']"
        raise InvalidArgumentError(
            f"{name} must be {wanted}, got {tuple(x.shape)} for {tuple(group_sizes.shape)}",
            argument=name,
        )
