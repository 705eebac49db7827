"""Plans the row of every slot when one shard's tokens are sorted by expert.

It uses sorts, binary searches and gathers over all slots at once: no loop over experts, and no
result that depends on the order of threads. Everything here works on one shard's block.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.layout import align_up
from ep_runtime_client.base import stored
from ep_runtime_client.ops.kernels.slots import as_int32, exclusive_sum, kept_rows, rows_at
from ep_runtime_client.ops.permutation.batch_shards import BatchShards
from ep_runtime_client.ops.tracing.varying import like


@dataclasses.dataclass(frozen=True)
class PermutationMeta:
    """The settings for which a permutation was made. Hashable; the static part of the plan.

    Attributes:
        shards: how the batch is sharded.
        num_experts: E.
        rows: number of rows of one shard.
        alignment: every expert's zone is a multiple of this many rows.
        from_map: slots are the experts of a routing map, and most slots are unused.
    """

    shards: BatchShards
    num_experts: int
    rows: int
    alignment: int
    from_map: bool

    def here(self, *operands: object) -> PermutationMeta:
        """Returns the meta as seen from this point."""
        return dataclasses.replace(self, shards=self.shards.here(*operands))


@stored.pytree()
class PermutationArrays(NamedTuple):
    """The arrays of a permutation of n shards; a token has S slots: K, or E with a routing map."""

    source: jax.Array  # [n * rows] int32 token * S + slot in the shard; -1 no token
    slot_row: jax.Array  # [..., S] int32 row in the shard; -1 unused or dropped
    dropped: jax.Array  # [n] int32 slots that got no row because rows ran out
    listed: jax.Array | None  # [n * rows] int32, from a map: rows by token, then slot; rest: any
    row_count: jax.Array | None  # [...] int32, from a map: rows of the token

    def flat(self) -> PermutationArrays:
        """Returns the arrays with one leading dim [T] of tokens."""
        return self.with_lead((-1,))

    def with_lead(self, lead: tuple[int, ...]) -> PermutationArrays:
        """Returns the arrays with these leading dims of tokens."""
        slots = self.slot_row.shape[-1]
        count = None if self.row_count is None else self.row_count.reshape(lead)
        return self._replace(slot_row=self.slot_row.reshape(*lead, slots), row_count=count)


@stored.pytree(PermutationMeta, BatchShards)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PermutationPlan:
    """A permutation as a pytree: safe under jit, remat, scan, donation and relocation.

    Attributes:
        arrays: where rows come from and go to.
        meta: static sizes and layout.
    """

    arrays: PermutationArrays
    meta: PermutationMeta = dataclasses.field(metadata={"static": True})

    @property
    def dropped(self) -> jax.Array:
        """Slots of each shard that got no row because num_out_tokens was too small, [n] int32."""
        return self.arrays.dropped

    @property
    def rows(self) -> int:
        """Rows of one shard."""
        return self.meta.rows


def row_bound(slots: int, num_experts: int, alignment: int, most: int) -> int:
    """Returns the most rows that `slots` slots, up to `most` per expert, need in aligned zones."""
    experts = min(slots, num_experts)
    blocks = experts + (slots - experts) // alignment
    return min(blocks * alignment, experts * align_up(most, alignment))


def make(meta: PermutationMeta, choice: jax.Array) -> tuple[PermutationArrays, jax.Array]:
    """Makes one shard's plan and group sizes [1, E] from choice [T, S]: experts, or a bool map."""
    tokens, slots = choice.shape
    if tokens * slots == 0:
        return _nothing(meta, choice)
    return _of_map(meta, choice) if meta.from_map else _of_indices(meta, choice)


def _nothing(meta: PermutationMeta, choice: jax.Array) -> tuple[PermutationArrays, jax.Array]:
    tokens, rows = choice.shape[0], meta.rows
    listed = jnp.zeros(rows, jnp.int32) if meta.from_map else None
    count = jnp.zeros(tokens, jnp.int32) if meta.from_map else None
    arrays = PermutationArrays(
        jnp.full(rows, -1, jnp.int32),
        jnp.full(choice.shape, -1, jnp.int32),
        jnp.zeros(1, jnp.int32),
        listed,
        count,
    )
    return arrays, jnp.zeros((1, meta.num_experts), jnp.int32)


class _Zones(NamedTuple):
    """Rows of every expert, each [E] int32."""

    kept: jax.Array
    sizes: jax.Array  # kept, aligned
    base: jax.Array  # first row
    dropped: jax.Array  # [1]


def _zones(meta: PermutationMeta, counts: jax.Array) -> _Zones:
    kept = kept_rows(counts[None], meta.rows, meta.alignment)[0]
    sizes = (kept + (meta.alignment - 1)) // meta.alignment * meta.alignment
    dropped = (counts.sum(dtype=jnp.int32) - kept.sum(dtype=jnp.int32)).reshape(1)
    return _Zones(kept, sizes, exclusive_sum(sizes), dropped)


def _places(meta: PermutationMeta, zones: _Zones) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds each row's expert, its index among the expert's rows, and whether a slot fills it."""
    row = like(jnp.arange(meta.rows, dtype=jnp.int32), zones.base)
    expert = jnp.searchsorted(zones.base + zones.sizes, row, side="right").astype(jnp.int32)
    expert = jnp.minimum(expert, meta.num_experts - 1)
    place = row - rows_at(zones.base, expert)
    return expert, place, place < rows_at(zones.kept, expert)


def _of_indices(meta: PermutationMeta, topk_idx: jax.Array) -> tuple[PermutationArrays, jax.Array]:
    flat = as_int32(topk_idx).reshape(-1)
    used = (flat >= 0) & (flat < meta.num_experts)
    expert = jnp.where(used, flat, meta.num_experts)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    bounds = like(jnp.arange(meta.num_experts + 1, dtype=jnp.int32), expert)
    first = jnp.searchsorted(rows_at(expert, order), bounds).astype(jnp.int32)
    zones = _zones(meta, first[1:] - first[:-1])

    safe = jnp.minimum(expert, meta.num_experts - 1)
    place = jnp.argsort(order).astype(jnp.int32) - rows_at(first, safe)
    keep = used & (place < rows_at(zones.kept, safe))
    slot_row = jnp.where(keep, rows_at(zones.base, safe) + place, -1)

    row_expert, place, filled = _places(meta, zones)
    at = jnp.where(filled, rows_at(first, row_expert) + place, 0)
    source = jnp.where(filled, rows_at(order, at), -1)
    arrays = PermutationArrays(source, slot_row.reshape(topk_idx.shape), zones.dropped, None, None)
    return arrays, zones.sizes[None]


def _of_map(meta: PermutationMeta, routing_map: jax.Array) -> tuple[PermutationArrays, jax.Array]:
    chosen = routing_map != 0
    seen = jnp.cumsum(chosen, axis=0, dtype=jnp.int32)
    zones = _zones(meta, seen[-1])
    keep = chosen & (seen <= zones.kept)
    slot_row = jnp.where(keep, zones.base + seen - 1, -1)

    expert, place, filled = _places(meta, zones)
    token = _first_that_has(seen, expert, place + 1)
    source = jnp.where(filled, token * meta.num_experts + expert, -1)
    last = jnp.where(filled, source, jnp.iinfo(jnp.int32).max)
    listed = jnp.argsort(last).astype(jnp.int32)
    count = keep.sum(1, dtype=jnp.int32)
    return PermutationArrays(source, slot_row, zones.dropped, listed, count), zones.sizes[None]


def _first_that_has(seen: jax.Array, expert: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns the first token t with seen[t, expert] >= wanted; the last token if there is none."""
    tokens = seen.shape[0]

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) >> 1
        enough = seen.at[middle, expert].get(mode="promise_in_bounds") >= wanted
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    low = jnp.zeros_like(expert)
    bounds = (low, jnp.full_like(expert, tokens - 1))
    # A step halves the range. A range of one token stays unchanged, unless that token has too few;
    # `low` then passes it.
    low, _ = lax.fori_loop(0, tokens.bit_length(), halve, bounds)
    return jnp.minimum(low, tokens - 1)
