"""Finds the largest finite absolute values of groups of rows and of kernels, to compute scales."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.kernels.serve import either
from ep_runtime_client.ops.quantize import kernels
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.rounding import finite_max
from ep_runtime_client.ops.quantize.slabs import Slabs


def kernel_amax(w: jax.Array | Pair) -> jax.Array:
    """Returns the largest finite absolute value of each expert's kernel: [G, ...] -> f32 [G]."""
    if isinstance(w, Pair):
        return jnp.maximum(kernel_amax(w.gate), kernel_amax(w.up))

    def plain(w: jax.Array) -> jax.Array:
        return finite_max(w.astype(jnp.float32), tuple(range(1, w.ndim)))

    return either(kernels.supports(w, None), kernels.kernel_amax, plain, w)


def group_amax(x: jax.Array, group_sizes: jax.Array, num_experts: int | None = None) -> jax.Array:
    """Returns the largest finite absolute value of each group of rows [C, ...]: f32 like
    group_sizes.

    With `num_experts`, groups whose numbers are equal modulo `num_experts` share one value.
    """
    groups = math.prod(group_sizes.shape)
    experts = groups if num_experts is None else num_experts
    kernel = functools.partial(kernels.group_amax, experts)
    plain = functools.partial(_group_amax, experts)
    served = experts > 0 and kernels.supports(x, group_sizes)
    return amax_of_groups(either(served, kernel, plain, x, group_sizes), group_sizes)


def amax_of_groups(amax: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Spreads amax [experts] to the groups of each expert: like group_sizes."""
    groups = math.prod(group_sizes.shape)
    return jnp.tile(amax, groups // max(amax.shape[0], 1)).reshape(group_sizes.shape)


def _group_amax(experts: int, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Computes `group_amax` per expert in plain JAX: f32 [experts]."""
    slabs = Slabs.of(x, group_sizes)
    blocks = row_blocks.cut(slabs.capacity, group_sizes)

    def step(block: row_blocks.RowBlock, amax: jax.Array) -> jax.Array:
        values = block.read(slabs.rows).astype(jnp.float32)
        largest = finite_max(values, tuple(range(values.ndim)))
        return row_blocks.max_at(amax, blocks.expert(block, experts), largest)

    return row_blocks.loop(blocks, step, jnp.zeros((experts,), jnp.float32), slabs.rows)


def over(amax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the largest value over manual mesh axes."""
    return lax.pmax(amax, axes) if axes else amax
