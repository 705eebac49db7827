"""Loops over the row blocks of every group, skipping all other rows.

Groups follow each other from row 0 of a slab; rows after the last group are slack. Each group is
cut into ceil(size / block) blocks, and one loop with a dynamic trip count runs over all blocks of
all groups. Nothing is computed for empty groups or for the slack. Rows of other groups are masked
on every read. The traced program is the same for any number of groups.

Group sizes are on the device and need no alignment. Several slabs on one device share one loop.

The loop carries the first row of its next block. XLA compiles every loop of a program separately,
and a table of blocks made before each would take most of the compile time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops.tracing.varying import spread_over, varied_axes

MIN_BLOCK_ROWS = 64  # smaller dots take less time than the loop's own steps
MAX_BLOCK_ROWS = 256

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """One row block inside the loop.

    Attributes:
        group: int32 number of the block's group; slab-major if there are several slabs.
        start: int32 first row of the slice that is read and written. A slice never leaves the
            array, so it may begin before the block's own first row.
        valid: [rows] which rows of the slice belong to the block.
    """

    group: jax.Array
    start: jax.Array
    valid: jax.Array

    @property
    def row(self) -> jax.Array:
        """Row numbers of the slice, [rows] int32."""
        return self.start + jnp.arange(self.valid.shape[0], dtype=jnp.int32)

    def mask(self, part: jax.Array) -> jax.Array:
        """Returns `part` [rows, ...] with zeros in rows outside the block."""
        return self._chosen(part, lax.full_like(part, 0))

    def read(self, array: jax.Array) -> jax.Array:
        """Returns the slice of `array` [all rows, ...], with zeros in rows outside the block."""
        return self.mask(self._slice(array))

    def write(self, array: jax.Array, values: jax.Array) -> jax.Array:
        """Returns `array` with the block's rows replaced by `values`; every other row stays."""
        merged = self._chosen(values.astype(array.dtype), self._slice(array))
        return lax.dynamic_update_slice_in_dim(
            array, merged, self.start, 0, allow_negative_indices=False
        )

    def _chosen(self, here: jax.Array, elsewhere: jax.Array) -> jax.Array:
        # Avoid jnp.where, which adds a function to the program that is lowered and inlined per
        # call.
        valid = lax.broadcast_in_dim(self.valid, here.shape, (0,))
        return lax.select(valid, here, elsewhere)

    def _slice(self, array: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(
            array, self.start, self.valid.shape[0], allow_negative_indices=False
        )


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Every row block of every group.

    Attributes:
        rows: rows of a block, static.
        capacity: rows of a slab, static.
        num_rows: rows of the arrays that the blocks are slices of, over all slabs; static.
        end: [G] int32 row after each group's last one, never falling; slab-major.
    """

    rows: int
    capacity: int
    num_rows: int
    end: jax.Array

    def expert(self, block: RowBlock, num_experts: int) -> jax.Array:
        """Returns the expert of a block's group: the group's number modulo the experts."""
        if self.end.shape[0] == num_experts:
            return block.group
        return lax.rem(block.group, jnp.int32(num_experts))

    def at(self, place: jax.Array) -> tuple[RowBlock, jax.Array]:
        """Returns the first block at or after row `place`, and the row after the block.

        `place` is the first row of a block, or slack.
        """
        group, end = jnp.int32(0), self.end[0]
        if self.end.shape[0] > 1:
            group = (place >= self.end).sum(dtype=jnp.int32)
            end = pick(self.end, group)
        first = place
        if self.num_rows > self.capacity:  # skip the slack of an earlier slab
            per_slab = jnp.int32(self.end.shape[0] * self.capacity // self.num_rows)
            first = jnp.maximum(place, lax.div(group, per_slab) * self.capacity)
        start = jnp.minimum(first, self.num_rows - self.rows)
        end = jnp.minimum(end, first + self.rows)
        row = start + jnp.arange(self.rows, dtype=jnp.int32)
        return RowBlock(group, start, (row >= first) & (row < end)), end


def cut(
    capacity: int, group_sizes: jax.Array, alignment: int = 1, most: int = MAX_BLOCK_ROWS
) -> Blocks:
    """Cuts the groups of slabs of `capacity` rows into blocks.

    Args:
        capacity: rows C of one slab.
        group_sizes: [G] int32 of one slab, or [S, L] of S slabs that follow each other in arrays of
            S * C rows. Rows past a slab's end are left out.
        alignment: known divisor of the group sizes: blocks of so many rows, within 64 and `most`,
            have no tail. It affects speed only, so any value is correct.
        most: the most rows of a block.
    """
    slabs = (group_sizes if group_sizes.ndim == 2 else group_sizes[None]).astype(jnp.int32)
    num_rows = capacity * slabs.shape[0]
    rows = min(num_rows, max(MIN_BLOCK_ROWS, min(alignment, most)))
    end = jnp.minimum(jnp.cumsum(slabs, axis=-1, dtype=jnp.int32), capacity)
    if slabs.shape[0] > 1:
        base = capacity * jnp.arange(slabs.shape[0], dtype=jnp.int32)[:, None]
        # An empty group before a slab's first row ends where the previous slab ends; no loop reads
        # it.
        end = lax.cummax(jnp.where(end > 0, base + end, 0).reshape(-1))
    return Blocks(rows, capacity, num_rows, end.reshape(-1))


def loop(
    blocks: Blocks, step: Callable[[RowBlock, Carry], Carry], carry: Carry, *reads: Any
) -> Carry:
    """Runs `step(block, carry) -> carry` for every block, in order.

    Args:
        blocks: from `cut`.
        step: reads and writes rows through the block.
        carry: initial value.
        reads: arrays that `step` reads in addition to its carry. Inside a shard_map that tracks
            varying manual axes, the carry varies over the axes of all these arrays.

    Cost: sum(ceil(group_size / rows)) steps; each is serial.
    """
    if blocks.num_rows == 0 or blocks.end.shape[0] == 0:
        return carry
    axes = tuple(sorted(varied_axes(carry, reads, blocks.end)))
    started = jax.tree.map(lambda x: spread_over(x, axes), (jnp.int32(0), carry))

    def body(walked: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        block, after = blocks.at(walked[0])
        return spread_over(after, axes), step(block, walked[1])

    return lax.while_loop(lambda walked: walked[0] < blocks.end[-1], body, started)[1]


def pick(array: jax.Array, group: jax.Array) -> jax.Array:
    """Returns `array[group]` for a group number that is known to be in range."""
    sizes = (1, *array.shape[1:])
    start = (group, *([jnp.int32(0)] * (array.ndim - 1)))
    row = lax.dynamic_slice(array, start, sizes, allow_negative_indices=False)
    return row.reshape(array.shape[1:])


def add_at(array: jax.Array, group: jax.Array, values: jax.Array) -> jax.Array:
    """Returns `array` with `values` added at `group`."""
    total = pick(array, group) + values.astype(array.dtype)
    return _put(array, group, total)


def max_at(array: jax.Array, group: jax.Array, values: jax.Array) -> jax.Array:
    """Returns `array` with the larger of its values and `values` at `group`."""
    larger = jnp.maximum(pick(array, group), values.astype(array.dtype))
    return _put(array, group, larger)


def _put(array: jax.Array, group: jax.Array, values: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(array, values, group, 0, allow_negative_indices=False)
