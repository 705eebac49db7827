"""Views the rows of all slabs as one dim, which loops over row blocks read and write."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

BLOCK_ROWS = 128  # of loops that do not use groups


@dataclasses.dataclass(frozen=True)
class Slabs:
    """The rows of all slabs as one dim.

    Attributes:
        rows: [S * C, *mid, K'].
        lead: (C,) or (S, C).
        totals: [1] or [S, 1] int32, rows of all groups of a slab: recipes that do not use groups,
            such as those with scales per row, take a slab's rows as one group.
    """

    rows: jax.Array
    lead: tuple[int, ...]
    totals: jax.Array

    @classmethod
    def of(cls, x: jax.Array, group_sizes: jax.Array) -> Slabs:
        lead = tuple(x.shape[: group_sizes.ndim])
        totals = group_sizes.sum(-1, keepdims=True, dtype=jnp.int32)
        return cls(x.reshape(math.prod(lead), *x.shape[len(lead) :]), lead, totals)

    @property
    def capacity(self) -> int:
        return self.lead[-1]
