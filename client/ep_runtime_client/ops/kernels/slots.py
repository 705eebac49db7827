"""Counts and places rows and slots in arrays of static shapes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops.tracing.varying import like


def as_int32(index: jax.Array) -> jax.Array:
    """Casts integers of any width to int32, before comparing them with sizes.

    A value outside int32's range becomes int32's minimum or maximum; it does not wrap.
    """
    if index.dtype == jnp.int32:
        return index
    own, held = jnp.iinfo(index.dtype), jnp.iinfo(jnp.int32)
    return jnp.clip(index, max(own.min, held.min), min(own.max, held.max)).astype(jnp.int32)


def exclusive_sum(counts: jax.Array) -> jax.Array:
    """Returns the exclusive prefix sums along the last dim."""
    return jnp.cumsum(counts, -1, dtype=counts.dtype) - counts


def rows_at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Returns array[index] along dim 0, without code for indices out of range."""
    return array.at[index].get(mode="promise_in_bounds")


class Packed(NamedTuple):
    """Lists the tokens that go to each of X places, in order.

    Attributes:
        has: bool [X, T], whether the token goes to the place.
        position: int32 [X, T] of each token in a place; undefined if it does not go there.
        token: int32 [X, T] at each position; any token past the last one.
    """

    has: jax.Array
    position: jax.Array
    token: jax.Array


def packed(has: jax.Array) -> Packed:
    """Packs the tokens of each of X places, bool [X, T], in token order."""
    places, tokens = has.shape
    position = exclusive_sum(has.astype(jnp.int32))
    where = jnp.where(has, position, tokens)
    numbers = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), has.shape)
    blank = jnp.zeros((places, tokens), jnp.int32)
    token = blank.at[jnp.arange(places)[:, None], where].set(numbers, mode="drop")
    return Packed(has, position, token)


def _blocks(rows: jax.Array, alignment: int) -> jax.Array:
    """Returns rows // alignment for numbers >= 0."""
    return lax.div(rows, like(jnp.int32(alignment), rows))


def _up(rows: jax.Array, alignment: int) -> jax.Array:
    return _blocks(rows + (alignment - 1), alignment) * alignment


def kept_rows(
    demand: jax.Array, capacity: int, alignment: int, most_asked: int = 2**31 - 1
) -> jax.Array:
    """Computes `layout.kept_rows` for all ranks: demand [N, L] int32 -> rows kept [N, L].

    `most_asked`: upper bound of the demand. On a GPU each halving of it launches kernels.
    """

    def zones(level: jax.Array) -> jax.Array:
        return _up(jnp.minimum(demand, level[:, None]), alignment).sum(1, dtype=jnp.int32)

    most = demand.max(1)
    fits = zones(most) <= capacity

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) >> 1
        ok = zones(middle * alignment) <= capacity
        moving = high - low > 1
        return jnp.where(moving & ok, middle, low), jnp.where(moving & ~ok, middle, high)

    low, _ = lax.fori_loop(
        0,
        (most_asked // alignment).bit_length(),
        halve,
        (like(jnp.zeros_like(most), most), _blocks(most, alignment) + 1),
    )
    level = low * alignment
    blocks_left = _blocks(capacity - zones(level), alignment)
    wants = demand > level[:, None]
    extra = wants & (exclusive_sum(wants.astype(jnp.int32)) < blocks_left[:, None])
    cut = jnp.minimum(demand, level[:, None] + jnp.where(extra, alignment, 0))
    return jnp.where(fits[:, None], demand, cut)
