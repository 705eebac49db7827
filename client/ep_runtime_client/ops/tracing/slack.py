"""Clears rows past the last group, but only if JAX checks the values of programs for NaN or inf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def checked() -> bool:
    """Whether jax_debug_nans or jax_debug_infs is on while a program is traced.

    An undefined row that nothing reads could then raise an error, although all results are right.
    """
    options: Any = jax.config  # its type lacks these options
    return bool(options.jax_debug_nans or options.jax_debug_infs)


def cleared(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Zeros rows past the last group if `checked`: [C, ...] by [L], or [S, C, ...] by [S, L]."""
    return zeroed(rows, group_sizes) if checked() else rows


def zeroed(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Like `cleared`, but always clears."""
    lead = group_sizes.ndim
    used = group_sizes.sum(-1, keepdims=True, dtype=jnp.int32)
    row = lax.broadcasted_iota(jnp.int32, rows.shape[:lead], lead - 1)
    inside = (row < used).reshape(*rows.shape[:lead], *([1] * (rows.ndim - lead)))
    return jnp.where(inside, rows, jnp.zeros((), rows.dtype))
