"""Moves rows in groups on several nodes: windows inside a node, collectives between nodes.

A row crosses the network once per node that needs it, from its rank to its rail peer: the rank with
the same local index on that node. The peer places the row and fans it out over its node's windows.
combine does the reverse: partial sums of a node cross back, and the source adds them in node order.

On CPU rows cross in chunks of a fixed size, in a loop whose trip count is on the device: as many
chunks as the rank with the most rows for one node needs (`nodes_plan.chunk_rows`). In each chunk
every rank sends one block to each other node. Ranks with fewer rows send waste in their place, in
addition to the rounding up to whole chunks.

On GPUs the host must know how many rows cross. It waits shortly, reads the counts of every two
ranks once, and then one exchange sends exactly these rows (`between_nccl.rail_counted`). Groups
that would send most rows anyway send all of them, and nothing waits (`nodes_plan.counts_chunks`):
every token then keeps its own position, and rows are not packed. If each node has one rank,
`rails.py` is used instead.

The windows' call starts when all rows have arrived. Splitting rows into parts, so that network and
windows overlap, was no faster over NVLink, because each extra call has a fixed cost.

In nodes that count rows, windows do not grow with D (`device_layout.lane_rows`): a lane holds the
rows of any dispatch, in chunks, but not the sums of any routing. A block call with more sums runs
in chunks; combine handles the tokens of one node after the other (`_by_node`). In addition to the
windows XLA holds D*T rows per rank while they cross, in combine with "exact" in fp32.

Slabs have the same bits as with the other transports. combine's results equal theirs within f32
rounding, because sums are grouped by node; with combine_precision "fast" a node's sum is also
rounded to the row's dtype before it crosses, with "fp8" to 8 bits.

XLA's gathers of whole rows take several times as long as the network, so on GPUs the kernels of
`kernels/move_rows.py` pack rows and add nodes' sums, if they support the rows.

Letters: `nodes_plan.py`; H hidden, X any width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.base.dtypes import sum_dtype
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import NodePlanArrays, PlanArrays
from ep_runtime_client.ops.kernels import move_rows as kernels
from ep_runtime_client.ops.kernels.serve import FLOATS, either
from ep_runtime_client.ops.kernels.slots import Packed, rows_at
from ep_runtime_client.ops.tracing.varying import like
from ep_runtime_client.ops.transports import between_nccl, fp8_sums, nodes_plan, rails, windows
from ep_runtime_client.ops.transports.fp8_sums import ScaledRows
from ep_runtime_client.ops.transports.nodes_plan import (
    chunk_rows,
    collectives,
    counts_chunks,
    counts_rows,
    lined_up,
    lined_up_rows,
    my_node,
    of_node,
    packing,
    packs,
    row_counts,
    slot_nodes,
    sum_index,
    sums_fit,
)
from ep_runtime_client.ops.transports.protocol import DeviceCall
from ep_runtime_client.ops.transports.xla import round_to
from ep_runtime_client.ops.transports.xla_plan import zone_rows

_MOST = 2**31 - 1  # rows


def prepare(
    at: DeviceCall, topk_idx: jax.Array, *, most: bool = False
) -> tuple[NodePlanArrays, jax.Array | None]:
    call = at.call
    if rails.plans(call, topk_idx):
        plan = rails.prepare(call, topk_idx)
    else:
        plan = nodes_plan.prepare(at, topk_idx)
    if not most:
        return plan, None
    rows = jnp.broadcast_to(zone_rows(plan, topk_idx), (call.group.ranks_per_node, 1))
    # If a lane lacks room for sums: more than any workspace has, so that the call runs in chunks.
    return plan, jnp.where(sums_fit(call, plan), collectives(call).node(call, rows).max(0), _MOST)


def _in_chunks(
    call: Call,
    plan: NodePlanArrays,
    here: tuple[jax.Array, ...],
    take: Callable[[jax.Array, int], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
    """Exchanges rows [D, T, ...] with the rail peers: block m comes from the peer on node m.

    Args:
        call: the call.
        plan: has the number of chunks.
        here: arrays [D, T, ...] with this node's own block already filled.
        take: (first position, rows) -> blocks [D, rows, ...] to send, one per array of `here`.
    """
    if call.group.num_nodes == 1:
        return here
    ops, tokens = collectives(call), here[0].shape[1]
    if not counts_chunks(call):
        moved: tuple[jax.Array, ...] = ops.rail(call, *take(jnp.int32(0), tokens))
        return moved
    rows = chunk_rows(tokens)

    def send(number: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The last chunk begins earlier and sends some rows again, so that all chunks have one size.
        first = jnp.minimum(number * rows, tokens - rows)
        got = ops.rail(call, *take(first, rows))
        pairs = zip(arrays, got, strict=True)
        return tuple(lax.dynamic_update_slice_in_dim(x, y, first, 1) for x, y in pairs)

    arrays: tuple[jax.Array, ...]
    # A lost rank may leave a wrong count, which must not keep the loop running.
    count = jnp.minimum(plan.chunks[0], -(-tokens // rows))
    _, arrays = lax.while_loop(
        lambda state: state[0] < count,
        lambda state: (state[0] + 1, send(*state)),
        (like(jnp.int32(0), plan.chunks), here),
    )
    return arrays


def to_nodes(call: Call, plan: NodePlanArrays, *sent: jax.Array) -> tuple[jax.Array, ...]:
    """Sends arrays [T, X] of tokens; returns those of this rank's virtual tokens, [D*T, X]."""
    ops = collectives(call)
    if not counts_chunks(call):
        return tuple(x.reshape(-1, x.shape[-1]) for x in ops.rail_gather(call, *sent))
    tokens = packing(call, plan.dst_rank)
    if counts_rows(call):
        to, from_ = row_counts(call, plan, tokens.has)
        rows = lined_up_rows(plan.dst_rank, call.group.num_nodes)
        ready = by_node(call, tokens, rows, *sent)
        moved = between_nccl.rail_counted(call, to, from_, *ready, rows=sent[0].shape[0])
        return tuple(map(_flat, moved))
    mine = my_node(call)
    own = rows_at(tokens.token, mine)

    def blank(x: jax.Array) -> jax.Array:
        empty = like(jnp.zeros((call.group.num_nodes, *x.shape), x.dtype), x)
        return lax.dynamic_update_slice_in_dim(empty, _lined_up(call, x, own)[None], mine, 0)

    def take(first: jax.Array, rows: int) -> tuple[jax.Array, ...]:
        chosen = lax.dynamic_slice_in_dim(tokens.token, first, rows, 1)
        return tuple(_lined_up(call, x, chosen) for x in sent)

    arrived = _in_chunks(call, plan, tuple(blank(x) for x in sent), take)
    return tuple(x.reshape(-1, x.shape[-1]) for x in arrived)


def by_node(call: Call, tokens: Packed, rows: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Lines up arrays [T, X] of packed tokens, those of one node after the other: [rows, X]."""
    index = lined_up(tokens, rows)
    return tuple(_lined_up(call, x, index) for x in arrays)


def _from_nodes(call: Call, plan: NodePlanArrays, *sent: jax.Array) -> tuple[jax.Array, ...]:
    """Sends arrays [D*T, X] of virtual tokens back to the ranks of their tokens.

    Returns what each node sent for this rank's tokens; `sum_index` says where a token's sum is."""
    # Results of custom calls are typed as not varying over any axis.
    typed = (like(x, plan.chunks) for x in sent)
    blocks = tuple(x.reshape(call.group.num_nodes, -1, x.shape[-1]) for x in typed)
    if counts_rows(call):
        from_, to = row_counts(call, plan, packing(call, plan.dst_rank).has)
        rows = lined_up_rows(plan.dst_rank, call.group.num_nodes)
        return between_nccl.rail_counted(call, to, from_, *blocks, rows=rows)

    def take(first: jax.Array, rows: int) -> tuple[jax.Array, ...]:
        return tuple(lax.dynamic_slice_in_dim(x, first, rows, 1) for x in blocks)

    return tuple(map(_flat, _in_chunks(call, plan, blocks, take)))


def partial_dtype(call: Call, dtype: Any) -> Any:
    """Returns the dtype in which a node's sums cross the network."""
    return sum_dtype(dtype) if call.group.combine_precision == "exact" else dtype


def crossing(call: Call, sums: jax.Array, *beside: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays in which a node's sums [D*T, H] cross, as combine_precision says, then
    those of `beside`."""
    fp8 = call.group.combine_precision == "fp8"
    return (*(fp8_sums.scaled(sums) if fp8 else (sums,)), *beside)


def _crossed(
    call: Call, arrays: Sequence[jax.Array]
) -> tuple[jax.Array | ScaledRows, Sequence[jax.Array]]:
    """Returns the sums among arrays of `crossing` that the nodes sent, and the others."""
    if call.group.combine_precision == "fp8":
        return ScaledRows(*arrays[:2]), arrays[2:]
    return arrays[0], arrays[1:]


def dispatch(
    at: DeviceCall, tokens: jax.Array, weights: jax.Array | None, plan: NodePlanArrays
) -> tuple[jax.Array, jax.Array]:
    if rails.supports(at.call, tokens, tokens.shape[0]):
        return rails.dispatch(at, tokens, weights, plan)
    sent = (tokens,) if weights is None else (tokens, weights)
    arrived = to_nodes(at.call, plan, *sent)
    given = None if weights is None else arrived[1]
    return windows.dispatch(at, arrived[0], given, plan.inside)


def combine(
    at: DeviceCall, expert_out: jax.Array, weights: jax.Array | None, plan: NodePlanArrays
) -> jax.Array:
    call, dtype = at.call, expert_out.dtype
    if rails.supports(call, expert_out, plan.dst_rank.shape[0], sums=True):
        return rails.combine(at, expert_out, weights, plan)
    way = functools.partial(windows.combine, at, expert_out, weights)
    sums = _by_node(call, plan, lambda part: way(part, partial_dtype(call, dtype)))
    return added_up(call, plan, sums, dtype)


def added_up(call: Call, plan: NodePlanArrays, sums: jax.Array, dtype: Any) -> jax.Array:
    """Adds the sums [D*T, H] of virtual tokens over all nodes: [T, H] of `dtype`."""
    return summed(call, plan.dst_rank, _from_nodes(call, plan, *crossing(call, sums)), dtype)


def summed(call: Call, dst_rank: jax.Array, arrays: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Like `added_up`, from what nodes sent (`crossing`) for tokens with dst_rank [T, K]."""
    return _sum_nodes(call, packing(call, dst_rank), _crossed(call, arrays)[0], dtype)


def dispatch_bwd(
    at: DeviceCall, d_recv: jax.Array, d_weights: jax.Array, plan: NodePlanArrays
) -> tuple[jax.Array, jax.Array]:
    call, dtype = at.call, d_recv.dtype
    if rails.supports(call, d_recv, plan.dst_rank.shape[0], sums=True):
        return rails.dispatch_bwd(at, d_recv, d_weights, plan)
    way = functools.partial(windows.dispatch_bwd, at, d_recv, d_weights)
    d_tokens, d_slots = _by_node(call, plan, lambda part: way(part, partial_dtype(call, dtype)))
    return gradients(call, plan, d_tokens, d_slots, dtype)


def _by_node(call: Call, plan: NodePlanArrays, sum_up: Callable[[PlanArrays], Any]) -> Any:
    """Sums virtual tokens by their plan. If rows are packed into a lane that may lack room for all
    sums, it takes the tokens of one node after the other, which always fit."""
    if not packs(plan):
        return sum_up(plan.inside)
    parts = jnp.arange(call.group.num_nodes, dtype=jnp.int32)
    made = lax.map(lambda node: sum_up(of_node(call, plan, node)), parts)
    return jax.tree.map(_flat, made)


def gradients(
    call: Call, plan: NodePlanArrays, d_tokens: jax.Array, d_slots: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Adds gradients of virtual tokens [D*T, H] and of their slots' weights f32 [D*T, K] over
    nodes: d_tokens [T, H] of `dtype`, d_topk_weights f32 [T, K]."""
    arrays = _from_nodes(call, plan, *crossing(call, d_tokens, d_slots))
    return summed_gradients(call, plan.dst_rank, arrays, dtype)


def summed_gradients(
    call: Call, dst_rank: jax.Array, arrays: Sequence[jax.Array], dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Like `gradients`, from what nodes sent (`crossing`) for tokens with dst_rank [T, K]."""
    partials, (by_node,) = _crossed(call, arrays)
    tokens = packing(call, dst_rank)
    count, top_k = dst_rank.shape
    token = jnp.arange(count, dtype=jnp.int32)[:, None] * call.group.num_nodes
    row = rows_at(sum_index(call, tokens).reshape(-1), token + slot_nodes(call, dst_rank))
    at = jnp.where(dst_rank >= 0, row * top_k + jnp.arange(top_k, dtype=jnp.int32), 0)
    d_topk = jnp.where(dst_rank >= 0, rows_at(by_node.reshape(-1), at), 0.0)
    return _sum_nodes(call, tokens, partials, dtype), d_topk


def combine_bwd(
    at: DeviceCall,
    grad: jax.Array,
    expert_out: jax.Array | None,
    weights: jax.Array | None,
    plan: NodePlanArrays,
) -> tuple[jax.Array, jax.Array | None]:
    plain = expert_out is None and weights is None
    if rails.supports(at.call, grad, grad.shape[0]) and (plain or grad.dtype in FLOATS):
        return rails.combine_bwd(at, grad, expert_out, weights, plan)
    (arrived,) = to_nodes(at.call, plan, grad)
    return windows.combine_bwd(at, arrived, expert_out, weights, plan.inside)


def _lined_up(call: Call, rows: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows [T, X] at every index [...], all of them in range: [..., X]."""
    flat = index.reshape(-1)
    served = call.group.transport == "nccl" and kernels.supports(rows, flat, moves=True)
    taken = either(served, functools.partial(kernels.copied, 1), rows_at, rows, flat)
    return taken.reshape(*index.shape, rows.shape[-1])


def _sum_nodes(
    call: Call, tokens: Packed, partials: jax.Array | ScaledRows, dtype: Any
) -> jax.Array:
    """Adds sums [R, H] received from the nodes, by `sum_index`, in node order: tokens [T, H]."""
    slot_row = sum_index(call, tokens)
    if isinstance(partials, ScaledRows):
        return sum_scaled(partials, slot_row, dtype)
    served = call.group.transport == "nccl" and kernels.supports(partials, slot_row)
    ways = (functools.partial(way, dtype) for way in (_summed_by_kernel, _summed))
    return either(served, *ways, partials, slot_row)


def _flat(rows: jax.Array) -> jax.Array:
    return rows.reshape(-1, rows.shape[-1])


def sum_scaled(rows: ScaledRows, slot_row: jax.Array, dtype: Any) -> jax.Array:
    """Adds rows [R, H] by slot_row [T, D] (-1: none): [T, H], in f32, then rounded to `dtype`."""

    def plain(data: jax.Array, scale: jax.Array, slot_row: jax.Array) -> jax.Array:
        return _summed(dtype, fp8_sums.values(ScaledRows(data, scale)), slot_row)

    served = kernels.supports_scaled(dtype, rows.data, slot_row)
    by_kernel = functools.partial(kernels.summed_scaled, dtype)
    return either(served, by_kernel, plain, *rows, slot_row)


def _summed_by_kernel(dtype: Any, rows: jax.Array, slot_row: jax.Array) -> jax.Array:
    total = kernels.summed(rows, slot_row, None)  # in f32, rounded to the dtype of the rows
    return total if total.dtype == dtype else round_to(total, dtype)


def _summed(dtype: Any, rows: jax.Array, slot_row: jax.Array) -> jax.Array:
    """Adds rows [R, H] by slot_row [T, D] (-1: none): [T, H], in f32 or wider, then rounded."""
    total = None
    for place in slot_row.T:
        value = rows_at(rows, jnp.maximum(place, 0)).astype(sum_dtype(rows.dtype))
        value = jnp.where((place >= 0)[:, None], value, 0)
        total = value if total is None else total + value
    assert total is not None  # a group has at least one node
    return round_to(total, dtype)
