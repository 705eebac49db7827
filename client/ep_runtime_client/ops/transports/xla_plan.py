"""prepare of transport "xla": the nine plan arrays, with jax.lax collectives only.

The arrays have the same bits as the native library's; `ep_runtime.layout` has the drop rule in
plain Python.

With on_overflow="error" every device fails in the same prepare. The verdict is a collective over
all EP domains, so that no device continues to a later collective alone. A host callback raises the
error, because plain JAX has no other way to fail a program. JAX prints a failed callback once more
when the process ends, and does not cache such programs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ep_runtime.specs import GroupSpec
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays, PlanArrays
from ep_runtime_client.ops.kernels.slots import _blocks, _up, exclusive_sum, kept_rows, rows_at
from ep_runtime_client.ops.tracing import again
from ep_runtime_client.ops.tracing.varying import like
from ep_runtime_client.ops.transports import between_xla
from ep_runtime_client.ops.transports.protocol import DeviceCall

Gather = Callable[[Call, jax.Array], jax.Array]


def calls_host(group: GroupSpec) -> bool:
    """Whether a prepare of the group calls the host, which can raise an error."""
    plain = group.transport == "xla" or group.node_size > 0
    return plain and group.on_overflow == "error"


def ranks_in_expert(expert: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns (rows per expert [E], each slot's rank among this source's slots of its expert
    [T*K]).

    `expert` is [T*K] with E for an unused slot.
    """
    slots = expert.shape[0]
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)
    order = jnp.argsort(expert, stable=True)
    in_order = jnp.arange(slots, dtype=jnp.int32) - rows_at(
        exclusive_sum(counts), rows_at(expert, order)
    )
    return counts[:num_experts], jnp.zeros(slots, jnp.int32).at[order].set(in_order)


class Routed(NamedTuple):
    """The fields of PlanArrays that follow from the counts of all ranks.

    `dropped` is int32 []: slots that want a row of this rank and get none.
    """

    dst_rank: jax.Array
    dst_row: jax.Array
    kept: jax.Array
    group_sizes: jax.Array
    num_recv: jax.Array
    dropped: jax.Array


def route(at: DeviceCall, topk_idx: jax.Array, gather: Gather) -> Routed:
    """Finds where each slot's row goes, from topk_idx [T, K] int32; `gather` is the transport's
    all_gather."""
    call = at.call
    group, alignment = call.group, call.layer.alignment
    num_experts, ranks, local = group.num_experts, group.ep_size, group.experts_per_rank
    flat = topk_idx.reshape(-1)
    used = (flat >= 0) & (flat < num_experts)
    expert = jnp.where(used, flat, num_experts)
    counts, position = ranks_in_expert(expert, num_experts)
    matrix = gather(call, counts)
    demand = matrix.sum(0, dtype=jnp.int32).reshape(ranks, local)
    kept = kept_rows(demand, call.capacity, alignment, ranks * flat.shape[0])
    zones = _up(kept, call.row_alignment)
    base = exclusive_sum(zones).reshape(-1)

    me = between_xla.ep_rank(call)
    num_recv = rows_at(_up(demand, alignment), me).sum(dtype=jnp.int32)
    if group.on_overflow == "error":
        used = used & (_passed(at, num_recv) == 0)
    earlier = jnp.where(jnp.arange(ranks)[:, None] < me, matrix, 0).sum(0, dtype=jnp.int32)
    safe = jnp.minimum(expert, num_experts - 1)
    position = position + rows_at(earlier, safe)
    keep = used & (position < rows_at(kept.reshape(-1), safe))
    dst_rank = jnp.where(keep, _blocks(safe, local), -1).reshape(topk_idx.shape)
    dst_row = jnp.where(keep, rows_at(base, safe) + position, -1).reshape(topk_idx.shape)
    mine = rows_at(kept, me)
    dropped = (rows_at(demand, me) - mine).sum(dtype=jnp.int32)
    return Routed(dst_rank, dst_row, mine, rows_at(zones, me), num_recv.reshape(1), dropped)


def prepare(
    at: DeviceCall, topk_idx: jax.Array, *, most: bool = False
) -> tuple[PlanArrays, jax.Array | None]:
    call, routed = at.call, route(at, topk_idx, between_xla.all_gather)
    peers = jnp.arange(call.group.ep_size, dtype=jnp.int32)[:, None, None]
    arriving = jnp.where(routed.dst_rank == peers, routed.dst_row, -1)
    received = receiver_side(between_xla.exchange(call, arriving), call.capacity)
    plan = PlanArrays(routed.dst_rank, routed.dst_row, *received, *routed[2:5])
    return plan, between_xla.largest(call, zone_rows(plan, topk_idx)) if most else None


def zone_rows(plan: AnyArrays, topk_idx: jax.Array) -> jax.Array:
    """Returns the number of rows in the zones of this rank, int32 [1]."""
    # Results of custom calls are typed as not varying over any axis.
    return like(plan.group_sizes.sum(keepdims=True, dtype=jnp.int32), topk_idx)


def receiver_side(
    arriving: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Makes the receiver's plan arrays from the rows that sources' slots fill here, [N, T, K] with
    -1.

    Returns recv_count, staged_start, staged_row and staged_slot, for any number of sources and
    tokens.
    """
    ranks, tokens, top_k = arriving.shape
    fills = arriving >= 0
    staged = fills.any(-1)
    per_staged = fills.sum(-1, dtype=jnp.int32)
    recv_count = jnp.stack(
        [
            staged.sum(1, dtype=jnp.int32),
            per_staged.sum(1, dtype=jnp.int32),
            staged[:, : (tokens + 1) // 2].sum(1, dtype=jnp.int32),
            jnp.zeros(ranks, jnp.int32),
        ],
        axis=1,
    )
    flat = fills.reshape(-1)
    entry = jnp.where(flat, exclusive_sum(flat.astype(jnp.int32)), capacity)
    slots = jnp.broadcast_to(jnp.arange(top_k, dtype=jnp.int32), arriving.shape).reshape(-1)
    empty = jnp.full(capacity, -1, jnp.int32)
    staged_row = empty.at[entry].set(arriving.reshape(-1), mode="drop")
    staged_slot = empty.at[entry].set(slots, mode="drop")

    staged, per_staged = staged.reshape(-1), per_staged.reshape(-1)
    total = per_staged.sum(dtype=jnp.int32)
    number = jnp.where(staged, exclusive_sum(staged.astype(jnp.int32)), ranks * tokens + 1)
    staged_start = jnp.full(ranks * tokens + 1, total, jnp.int32)
    staged_start = staged_start.at[number].set(exclusive_sum(per_staged), mode="drop")
    return recv_count, staged_start, staged_row, staged_slot


def _passed(at: DeviceCall, demand: jax.Array) -> jax.Array:
    """Returns int32 [] zero if every rank fits the call's capacity; else the program fails.

    `demand`: int32 [], aligned rows that this rank needs.
    """
    call, rank, layer_index = at
    axes = tuple(axis for axis, size in call.group.mesh_axes if size > 1)
    world = call.group.world_size
    first = jnp.where(demand > call.capacity, rank[0], world)
    lowest = lax.pmin(first, axes) if axes else first
    asked = jnp.where(rank[0] == lowest, demand, 0)
    asked = lax.pmax(asked, axes) if axes else asked
    verdict = jax.ShapeDtypeStruct((), jnp.int32)
    refuse = functools.partial(_refuse, call.group.name, call.layer.name, call.capacity, world)
    return like(
        jax.pure_callback(refuse, verdict, lowest, asked, again.layer_of(layer_index)[0], rank[0]),
        demand,
    )


def _refuse(
    group: str, name: str, capacity: int, world: int, rank: Any, demand: Any, index: Any, own: Any
) -> Any:
    if int(rank) < world:
        layer = f"{name.removesuffix('[0]')}[{int(index)}]" if name.endswith("[0]") else name
        fields = {
            "layer": layer,
            "rank": int(rank),
            "demand": int(demand),
            "capacity": capacity,
        }
        text = (
            f"EP_RUNTIME/CapacityOverflowError: layer {layer}: rank {int(rank)} would receive "
            f"{int(demand)} rows, its slab holds {capacity} {json.dumps(fields)}"
        )
        if int(own) == int(rank):  # only one process reports, for `Group.check`
            live_groups.report(group, text)
        raise RuntimeError(text)
    return np.int32(0)
