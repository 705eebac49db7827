"""Copies experts for one call of `ep.moe`: rows of overfull ranks go to slots of other ranks.

Every rank computes the same plan from the rows that each expert keeps. Over windows of GPUs the
kernel of prepare does so (`spread_rows.cuh`), with the same integers as the functions here. Rows of
an expert, in order of (source rank, token, slot), stay at its home rank up to some position; later
rows go to copies.
The physical experts of a rank are its L own ones, followed by its slots. Movement and matmuls see
only physical experts: drops, loads and statistics were decided before, from the logical experts.

Letters: N ranks of the EP group, E experts, L of a rank, S slots of a rank, T, K as elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.device_layout import maps_windows
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays, arrays_type
from ep_runtime_client.ops.kernels.slots import _up, as_int32, exclusive_sum, rows_at
from ep_runtime_client.ops.movement import per_device
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits
from ep_runtime_client.ops.tracing import again, eager
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.transports import between_xla, windows
from ep_runtime_client.ops.transports.choice import per_device_ops
from ep_runtime_client.ops.transports.protocol import DeviceCall

Tree = TypeVar("Tree")


class Copies(NamedTuple):
    """The expert of each slot of each rank, and its number of rows; int32 [N, S] each.

    The expert of a slot without rows is undefined.
    """

    expert: jax.Array
    rows: jax.Array


def balanced(demand: jax.Array, ranks: int, spare: int) -> Copies:
    """Returns the copies that even out rows over ranks; demand int32 [E] is the same on every rank.

    Ranks above 1.03 of the even share give away their surplus over it; other ranks take up to it.
    Each rank takes from one giver only: if a giver's last grant exceeds its surplus, it becomes a
    taker of the next giver (the alias method). So L slots suffice for any demand. With fewer slots,
    a taker gets its largest pieces, and the other rows stay at home.
    """
    local = demand.shape[0] // ranks
    own = demand.reshape(ranks, local)
    load = own.sum(1, dtype=jnp.int32)
    total = load.sum(dtype=jnp.int32)
    even = lax.div(total + (ranks - 1), jnp.full_like(total, ranks))  # rounded up
    gives = load > even + lax.div(even * 3, jnp.int32(100))
    surplus = jnp.where(gives, load - even, 0)
    lack = jnp.where(gives, 0, jnp.maximum(even - load, 0))
    # Put givers and takers, sorted by size, on one line; grants are overlaps of their intervals.
    giver, taker = (jnp.argsort(-x, stable=True).astype(jnp.int32) for x in (surplus, lack))
    given = jnp.cumsum(rows_at(surplus, giver), dtype=jnp.int32)
    taken = jnp.minimum(jnp.cumsum(rows_at(lack, taker), dtype=jnp.int32), given[-1])
    before_giver, before_taker = (
        jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]]) for x in (given, taken)
    )
    last = ranks - 1
    of_taker = jnp.minimum((given <= before_taker[:, None]).sum(1, dtype=jnp.int32), last)
    # A taker that spans the end of a giver's surplus takes all from it; the next giver compensates.
    across = jnp.minimum((taken <= given[:, None]).sum(1, dtype=jnp.int32), last)
    over = rows_at(taken, across) - given
    over = jnp.where((over > 0) & (rows_at(before_taker, across) < given), over, 0)
    # 2N grants, for takers and then for givers: the giver, and the part of its rows it grants.
    numbers = jnp.arange(ranks, dtype=jnp.int32)
    place = jnp.concatenate([of_taker, jnp.minimum(numbers + 1, last)])
    offset = before_taker - rows_at(before_giver, of_taker)
    start = jnp.concatenate([offset, jnp.zeros_like(over)])
    size = jnp.concatenate([taken - before_taker, over])
    # A giver gives its largest experts first.
    source = rows_at(giver, place)
    order = jnp.argsort(-own, 1, stable=True).astype(jnp.int32)
    end_of = jnp.cumsum(jnp.take_along_axis(own, order, 1), 1, dtype=jnp.int32)
    end_of, order = rows_at(end_of, source), rows_at(order, source)
    start_of = jnp.concatenate([jnp.zeros_like(end_of[:, :1]), end_of[:, :-1]], 1)
    pieces = jnp.minimum((start + size)[:, None], end_of) - jnp.maximum(start[:, None], start_of)
    rows, expert = jnp.maximum(pieces, 0), source[:, None] * local + order
    largest = jnp.argsort(-rows, 1, stable=True)[:, :spare]
    rows, expert = (jnp.take_along_axis(x, largest, 1) for x in (rows, expert))
    # A giver whose grants exceed its surplus takes rows from the next giver, which may then do the
    # same. A giver of such a chain takes nothing if any grant by it, or by a giver before it in the
    # chain, was cut for lack of slots: the rows that were not given away still fill it.
    short = jnp.zeros(ranks, bool).at[place].max(rows.sum(1, dtype=jnp.int32) < size)
    first = jnp.concatenate([jnp.zeros_like(over[:1]), over[:-1]]) == 0
    chain = lax.cummax(jnp.where(first, numbers, 0))
    whole = lax.cummax(jnp.where(short, numbers, -1)) < chain
    # Back to the order of ranks; each rank is either a taker or a giver.
    places = [jnp.zeros(ranks, jnp.int32).at[x].set(numbers) for x in (taker, giver)]
    as_giver = rows_at(over, places[1]) > 0
    grant = jnp.where(as_giver, ranks + places[1], places[0])
    kept = rows_at(jnp.concatenate([size[:ranks] > 0, whole]), grant)
    found = jnp.where(kept[:, None], rows_at(rows, grant), 0)
    missing = ((0, 0), (0, spare - found.shape[1]))
    return Copies(*(jnp.pad(x, missing) for x in (rows_at(expert, grant), found)))


def physical_experts(
    expert: jax.Array, position: jax.Array, demand: jax.Array, copies: Copies
) -> jax.Array:
    """Returns the physical expert of each slot [X], whose row is `position` of its expert's."""
    ranks, spare = copies.rows.shape
    local = demand.shape[0] // ranks
    # All rows are on one line, expert by expert: the rows at home, then those of each copy.
    flat, rows = copies.expert.reshape(-1), copies.rows.reshape(-1)
    away = jnp.zeros_like(demand).at[flat].add(rows)
    base = exclusive_sum(demand)
    order = jnp.argsort(flat, stable=True)
    among = exclusive_sum(rows_at(rows, order)) - rows_at(exclusive_sum(away), rows_at(flat, order))
    among = jnp.zeros_like(rows).at[order].set(among)
    start = rows_at(base + demand - away, flat) + among
    starts = jnp.concatenate([base, jnp.where(rows > 0, start, jnp.iinfo(jnp.int32).max)])
    ids = jnp.arange(ranks * (local + spare), dtype=jnp.int32).reshape(ranks, local + spare)
    ids = jnp.concatenate([ids[:, :local].reshape(-1), ids[:, local:].reshape(-1)])
    by_start = jnp.argsort(starts, stable=True)  # empty runs sort first
    # Newer versions of JAX have a searchsorted that no primitive of another package can hold.
    begun = rows_at(starts, by_start) <= (rows_at(base, expert) + position)[:, None]
    found = begun.sum(1, dtype=jnp.int32) - 1
    return rows_at(rows_at(ids, by_start), jnp.maximum(found, 0))


def spread(
    call: Call, index: jax.Array, topk_idx: jax.Array
) -> tuple[Call, AnyArrays, jax.Array, jax.Array]:
    """Plans the rows that a call keeps, spread over copies of their experts.

    Returns:
        The call on physical experts; its plan, with `num_recv` as without copies; the most rows in
        the zones of any rank, int32 [R, 1]; and the expert of each slot of the ranks, int32 [R, N,
        S], -1 in empty slots.
    """
    with scope("prepare", call.layer):
        call = dataclasses.replace(call, spread=True).varied(topk_idx, index)
        idx = per_device.place(call, "topk_idx", topk_idx)
        made = eager.settled(_spread, call, again.told(index, idx), idx)
    *arrays, most, experts = (checkpoint_name(x, "ep_plan") for x in made)
    return call, arrays_type(call.group)(*arrays), most, experts


def _spread(call: Call, index: jax.Array, topk_idx: jax.Array) -> tuple[jax.Array, ...]:
    results = len(arrays_type(call.group)._fields) + 2
    body = windows.prepare_spread if maps_windows(call.group) else _planned
    tokens = (as_int32(topk_idx),)
    return per_device.run(call, "prepare", body, index, tokens, (), results, variant="spread")


def _planned(at: DeviceCall, topk_idx: jax.Array) -> tuple[AnyArrays, jax.Array, jax.Array]:
    """Does in JAX, on any transport, what `windows.prepare_spread` does in one call."""
    call, group, ops = at.call, at.call.layer.group_spec, per_device_ops(at.call.group)
    at_home = at._replace(call=dataclasses.replace(call, spread=False))
    first: AnyArrays = ops.prepare(at_home, topk_idx)[0]
    of_rank = between_xla.all_gather(call, first.kept)  # [N, L]
    demand = of_rank.reshape(-1)
    copies = balanced(demand, group.ep_size, group.spare_experts)
    base = exclusive_sum(_up(of_rank, call.row_alignment)).reshape(-1)
    has_row = (first.dst_row >= 0).reshape(-1)
    expert = jnp.where(has_row, topk_idx.reshape(-1), 0)
    position = first.dst_row.reshape(-1) - rows_at(base, expert)
    physical = physical_experts(expert, position, demand, copies)
    physical = jnp.where(has_row, physical, -1).reshape(topk_idx.shape)
    plan: AnyArrays = ops.prepare(at, physical)[0]
    # Dropped slots are counted in the first plan.
    counts = plan.recv_count.at[0, 3].set(first.recv_count[0, 3])
    found = plan._replace(recv_count=counts, num_recv=first.num_recv)
    return found, plan.num_recv, jnp.where(copies.rows > 0, copies.expert, -1)


def with_copies(at: DeviceCall, experts: jax.Array | None, tree: Tree) -> Tree:
    """Appends to arrays [L, ...] of this rank's experts the arrays of its slots: [L + S, ...].

    `experts`: int32 [N, S], as `spread` returns it for one device; None returns `tree` unchanged.
    """
    if experts is None:
        return tree
    call = at.call
    group = call.layer.group_spec
    mine, local = _mine(call, experts)
    slots = rows_at(experts, between_xla.ep_rank(call))
    home = lax.div(jnp.maximum(slots, 0), jnp.full_like(slots, group.experts_per_rank))

    def moved(x: jax.Array) -> jax.Array:
        raw = bits(x)
        dims = [1] * (raw.ndim - 1)
        if windows.carries_copies(call, raw):
            room = jnp.pad(raw, [(0, group.spare_experts), *[(0, 0)] * (raw.ndim - 1)])
            return from_bits(windows.push_copies(at, experts, room), x.dtype)
        sent = jnp.where(mine.reshape(*mine.shape, *dims), rows_at(raw, local), 0)
        came = between_xla.exchange(call, sent.astype(raw.dtype))
        taken = came.at[home, jnp.arange(group.spare_experts)].get(mode="promise_in_bounds")
        taken = jnp.where((slots >= 0).reshape(-1, *dims), taken, 0).astype(raw.dtype)
        return from_bits(jnp.concatenate([raw, taken]), x.dtype)

    made: Tree = jax.tree.map(moved, tree)
    return made


def at_home(
    at: DeviceCall,
    experts: jax.Array | None,
    tree: Tree,
    join: Callable[[jax.Array, jax.Array], jax.Array],
) -> Tree:
    """Joins arrays [L + S, ...] of physical experts to [L, ...]: `join` combines the home's value
    and each copy's, in rank order, in f32 or wider. Without `experts` returns `tree` unchanged."""
    if experts is None:
        return tree
    call = at.call
    group = call.layer.group_spec
    mine, local = _mine(call, experts)
    slots = rows_at(experts, between_xla.ep_rank(call))
    ranks = jnp.arange(group.ep_size, dtype=jnp.int32)[:, None] * group.experts_per_rank
    goes = (slots >= ranks) & (slots < ranks + group.experts_per_rank)  # [N, S]
    # Each rank has at most one copy of an expert; find its slot, for [N, L].
    is_copy = mine[:, None] & (local[:, None] == jnp.arange(group.experts_per_rank)[:, None])
    there, slot = is_copy.any(-1), jnp.argmax(is_copy, -1).astype(jnp.int32)

    def joined(x: jax.Array) -> jax.Array:
        own, copied = x[: group.experts_per_rank], x[group.experts_per_rank :]
        if join is jnp.add and windows.carries_copies(call, x):
            return windows.return_copies(at, experts, x)[: group.experts_per_rank]
        dims = [1] * (x.ndim - 1)
        sent = jnp.where(goes.reshape(*goes.shape, *dims), copied, 0)
        came = between_xla.exchange(call, sent)
        total = own.astype(jnp.promote_types(x.dtype, jnp.float32))
        for rank in range(group.ep_size):
            value = rows_at(came[rank], slot[rank]).astype(total.dtype)
            total = jnp.where(there[rank].reshape(-1, *dims), join(total, value), total)
        return total.astype(x.dtype)

    made: Tree = jax.tree.map(joined, tree)
    return made


def _mine(call: Call, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which slots of all ranks, bool [N, S], have an expert of this rank, and which."""
    size = call.layer.group_spec.experts_per_rank
    local = experts - between_xla.ep_rank(call) * size
    mine = (experts >= 0) & (local >= 0) & (local < size)
    return mine, jnp.where(mine, local, 0)
