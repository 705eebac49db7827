"""Defines permute, unpermute and sort_chunks on one shard, as the oracle of the tests.

Places come from plain Python loops over NumPy arrays, values from one jnp gather, so that
`jax.grad` of these functions is the meaning of the gradients. Nothing is shared with the ops.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ep_runtime.layout import align_up, kept_rows

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class ReferencePermutation:
    """The destination of every row of one shard.

    Attributes:
        row: [T, S] row of each slot, -1 where it has none.
        source: [rows] flat slot t * S + s of each row, -1 where it has none.
        group_sizes: [E] aligned rows per expert.
        dropped: slots without a row for want of room.
    """

    row: Ints
    source: Ints
    group_sizes: Ints
    dropped: int


def permutation(
    choice: Any, *, num_experts: int, rows: int, alignment: int = 1
) -> ReferencePermutation:
    """Plans a permutation for choice [T, K] int, or for a bool routing map [T, E]."""
    choice = np.asarray(choice)
    if choice.dtype == bool:
        choice = np.where(choice, np.arange(num_experts), -1)
    slots: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
    for (token, slot), expert in np.ndenumerate(choice):
        if 0 <= expert < num_experts:
            slots[expert].append((token, slot))
    demand = [len(each) for each in slots]
    kept = kept_rows(demand, rows, alignment)
    row = np.full(choice.shape, -1, np.int32)
    source = np.full(rows, -1, np.int32)
    base = 0
    for expert, count in enumerate(kept):
        for place, (token, slot) in enumerate(slots[expert][:count]):
            row[token, slot] = base + place
            source[base + place] = token * choice.shape[1] + slot
        base += align_up(count, alignment)
    sizes = np.array([align_up(count, alignment) for count in kept], np.int32)
    return ReferencePermutation(row, source, sizes, sum(demand) - sum(kept))


def permute(
    plan: ReferencePermutation, tokens: jax.Array, probs: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """tokens [T, H], probs [T, S] or None -> rows [rows, H], probs [rows] or None."""
    filled = plan.source >= 0
    at = jnp.maximum(plan.source, 0)
    if not plan.row.size:
        empty = jnp.zeros((plan.source.size, tokens.shape[1]), tokens.dtype)
        return empty, None if probs is None else jnp.zeros(plan.source.size, probs.dtype)
    rows = jnp.where(filled[:, None], tokens[at // plan.row.shape[1]], 0).astype(tokens.dtype)
    if probs is None:
        return rows, None
    return rows, jnp.where(filled, probs.reshape(-1)[at], 0).astype(probs.dtype)


def unpermute(
    plan: ReferencePermutation, rows: jax.Array, merging_probs: jax.Array | None = None
) -> jax.Array:
    """rows [rows, H], merging_probs [T, S] or None -> tokens [T, H] in the dtype of the rows."""
    if not rows.shape[0]:
        return jnp.zeros((plan.row.shape[0], rows.shape[1]), rows.dtype)
    parts = rows[jnp.maximum(plan.row, 0)]
    if merging_probs is not None:
        parts = parts * merging_probs[:, :, None]
    return jnp.where((plan.row >= 0)[:, :, None], parts, 0).sum(1)


def sort_chunks(x: jax.Array, split_sizes: Any, order: Any) -> jax.Array:
    """x [rows, ...] with its chunks in that order; zero past the last chunk."""
    ends = np.cumsum(split_sizes)
    chunks = [np.arange(end - size, end) for end, size in zip(ends, split_sizes, strict=True)]
    source = np.concatenate([chunks[each] for each in order]).astype(np.int32)[: x.shape[0]]
    filled = source < x.shape[0]
    rows = x[np.where(filled, source, 0)]
    rows = jnp.where(filled.reshape(-1, *[1] * (x.ndim - 1)), rows, 0).astype(x.dtype)
    tail = jnp.zeros((x.shape[0] - len(source), *x.shape[1:]), x.dtype)
    return jnp.concatenate([rows, tail])
