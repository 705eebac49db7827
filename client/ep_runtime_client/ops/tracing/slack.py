"""Clears rows past the last group only if JAX checks everything that programs return."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def checked() -> bool:
    """Whether jax_debug_nans or jax_debug_infs is on while a program is traced.

    An undefined row that nobody reads would then end a step, although its values are right.
    """
    options: Any = jax.config  # typed without them
    return bool(options.jax_debug_nans or options.jax_debug_infs)


def cleared(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Rows [C, ...] of groups [L], or [S, C, ...] of [S, L]; zeros past the last, if `checked`."""
    return zeroed(rows, group_sizes) if checked() else rows


def zeroed(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """As `cleared`, always."""
    lead = group_sizes.ndim
    used = group_sizes.sum(-1, keepdims=True, dtype=jnp.int32)
    row = lax.broadcasted_iota(jnp.int32, rows.shape[:lead], lead - 1)
    inside = (row < used).reshape(*rows.shape[:lead], *([1] * (rows.ndim - lead)))
    return jnp.where(inside, rows, jnp.zeros((), rows.dtype))
