"""The MoE layer in plain JAX, as a user without this package writes it.

Both layers take one device's tokens under manual axes: x [T, H], router [H, E], and wi [L, H, 2M]
and wo [L, M, H] of this device's experts. "padded" gives every expert room for `CAPACITY_FACTOR`
times its even share from every source and drops the excess; it uses one all_to_all each way and
batched matmuls. "dropless" sorts by expert and uses ragged_all_to_all and ragged_dot, in buffers
for `ROOM` times a rank's even share. XLA on CPU has no ragged_all_to_all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_bench.base.device_bench import AXIS
from ep_runtime_bench.base.moe_cases import PADDED, Case

CAPACITY_FACTOR = 1.25
ROOM = 2
_ROW_TILE = 8

Layer = Callable[..., jax.Array]


def make_layer(subject: str, case: Case) -> Layer:
    """Returns f(x, router, wi, wo) -> y [T, H]; PADDED's also takes experts [T, K]."""
    return _padded(case) if subject == PADDED else _dropless(case)


def routed(
    x: jax.Array, router: jax.Array, top_k: int, experts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns experts [T, K], the given or the router's, and their weights, which sum to 1."""
    shares = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    if experts is None:
        experts = lax.top_k(shares, top_k)[1]
    weights = jnp.take_along_axis(shares, experts, axis=-1)
    return experts, weights / weights.sum(-1, keepdims=True)


def _gated(hidden: jax.Array) -> jax.Array:
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _summed(rows: jax.Array, weights: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Sums rows [T, K, H] times weights [T, K] over K."""
    return (rows.astype(jnp.float32) * weights[..., None]).sum(1).astype(dtype)


def _sorted_places(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns (order, place): slots sorted by expert, and each slot's index among its expert's."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=num_experts)
    first = jnp.cumsum(counts) - counts
    return order, jnp.arange(flat.size) - first[flat[order]]


def _padded(case: Case) -> Layer:
    even = case.tokens * case.top_k / case.num_experts
    room = math.ceil(even * CAPACITY_FACTOR / _ROW_TILE) * _ROW_TILE
    rows = case.num_experts * room

    def layer(
        x: jax.Array,
        router: jax.Array,
        wi: jax.Array,
        wo: jax.Array,
        given: jax.Array | None = None,
    ) -> jax.Array:
        experts, weights = routed(x, router, case.top_k, given)
        order, place = _sorted_places(experts, case.num_experts)
        row = experts.reshape(-1)[order] * room + place
        row = jnp.where(place < room, row, rows)  # past the end: dropped
        sent = jnp.zeros((rows + 1, x.shape[1]), x.dtype)
        sent = sent.at[row].set(x[order // case.top_k])[:rows].reshape(-1, room, x.shape[1])
        slab = lax.all_to_all(sent, AXIS, 0, 1, tiled=True)  # [L, N * room, H]
        hidden = jnp.einsum("lch,lhm->lcm", slab, wi)
        out = jnp.einsum("lcm,lmh->lch", _gated(hidden), wo)
        back = lax.all_to_all(out, AXIS, 1, 0, tiled=True).reshape(rows, -1)
        back = jnp.pad(back, ((0, 1), (0, 0)))  # dropped slots add nothing
        of_slot = jnp.zeros(order.shape, row.dtype).at[order].set(row)
        return _summed(back[of_slot].reshape(*experts.shape, -1), weights, x.dtype)

    return layer


def _dropless(case: Case) -> Layer:
    make_plan = _planner(case.num_experts)
    slots, top_k = case.tokens * case.top_k, case.top_k
    room = ROOM * slots

    def layer(x: jax.Array, router: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
        experts, weights = routed(x, router, top_k)
        p = make_plan(experts)
        there = (p["sent_from"], p["sent"], p["sent_to"], p["received"])
        home = (p["received_from"], p["received"], p["received_to"], p["sent"])
        blank = jnp.zeros((room, x.shape[1]), x.dtype)
        rows = lax.ragged_all_to_all(x[p["order"] // top_k], blank, *there, axis_name=AXIS)
        sizes, by_expert = _local_groups(experts, case.num_experts, wi.shape[0], room)
        hidden = lax.ragged_dot(rows[by_expert], wi, sizes)
        out = lax.ragged_dot(_gated(hidden), wo, sizes)
        out = jnp.zeros_like(out).at[by_expert].set(out)
        blank = jnp.zeros((slots, x.shape[1]), x.dtype)
        back = lax.ragged_all_to_all(out, blank, *home, axis_name=AXIS)
        of_slot = jnp.zeros(slots, jnp.int32).at[p["order"]].set(jnp.arange(slots))
        return _summed(back[of_slot].reshape(*experts.shape, -1), weights, x.dtype)

    return layer


def _local_groups(
    experts: jax.Array, num_experts: int, local: int, room: int
) -> tuple[jax.Array, jax.Array]:
    """Returns rows of each local expert [L], and the order that sorts received rows by expert
    [room].

    Rows arrive by source, and by expert within a source.
    """
    counts = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.int32)
    every = lax.all_gather(counts, AXIS)  # [N, E]
    mine = lax.dynamic_slice_in_dim(every, lax.axis_index(AXIS) * local, local, axis=1)
    number = jnp.tile(jnp.arange(local), mine.shape[0])
    expert = jnp.repeat(number, mine.reshape(-1), total_repeat_length=room)
    expert = jnp.where(jnp.arange(room) < mine.sum(), expert, local)
    return mine.sum(0), jnp.argsort(expert, stable=True)


def _planner(num_experts: int) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Returns a function of idx [T, K] -> the sizes and offsets for dispatch and combine.

    Needs manual axes. order [T * K] sorts the slots by expert; the other arrays [N] are rows to and
    from each rank, and their offsets here and there.
    """

    def plan(idx: jax.Array) -> dict[str, jax.Array]:
        ranks = lax.axis_size(AXIS)
        flat = idx.reshape(-1)
        sent = jnp.bincount(flat, length=num_experts).reshape(ranks, -1).sum(1).astype(jnp.int32)
        every = lax.all_gather(sent, AXIS)  # [source, rank]
        me = lax.axis_index(AXIS)
        received = every[:, me]
        return {
            "order": jnp.argsort(flat, stable=True).astype(jnp.int32),
            "sent": sent,
            "sent_from": jnp.cumsum(sent) - sent,
            "sent_to": (jnp.cumsum(every, axis=0) - every)[me],
            "received": received,
            "received_from": jnp.cumsum(received) - received,
            "received_to": (jnp.cumsum(every, axis=1) - every)[:, me],
        }

    return plan
