"""Movement in groups whose ranks lie on several nodes: windows inside a node, collectives between.

A row crosses the network once per node that needs it, from its rank to the rank of equal local
index there, its rail peer; that one places it and fans it out over its node's windows. combine
goes the other way: partial sums of a node cross back, and the source adds them up in node order.

On CPU rows travel between nodes in chunks of a fixed size, as many as the rank with the most rows
for one node needs (`nodes_plan.chunk_rows`): a loop whose count the device knows. In each chunk
every rank sends one block to each other node: what a rank with fewer rows sends in its place is
waste, on top of the rounding to whole chunks.

On GPUs the host must know how many rows cross. It reads the counts of every two ranks once, behind
a short wait, and each sends the other just those, in one exchange (`between_nccl.rail_counted`).
Groups that would send most rows anyway send all of them, and nothing waits
(`nodes_plan.counts_chunks`): every token stands at its own place then, and nothing is lined up.
Where nodes are one rank each `rails.py` does that.

The windows' call starts when all rows are there. With network and windows at work on different
parts of the rows at once, as calls of their own, every part cost its calls some fixed time and
nothing was gained, over NVLink.

Beside the windows, which are as large as those of one node, XLA holds D*T rows per rank while they
cross, of fp32 in combine where it is exact.

The slabs are those of the other transports bit for bit. combine equals theirs within the rounding
of f32, as sums are grouped by node; with combine_precision "fast" a node's sum is rounded to the
row's dtype once more before it crosses, with "fp8" to 8 bits.

All functions run per device, on local blocks without the slab dim; the signatures are those of
`xla.py`. Letters: `nodes_plan.py`; H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.base.dtypes import sum_dtype
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import NodePlanArrays
from ep_runtime_client.ops.kernels.serve import FLOATS
from ep_runtime_client.ops.kernels.slots import rows_at
from ep_runtime_client.ops.tracing.varying import like
from ep_runtime_client.ops.transports import fp8_sums, nodes_plan, rails, windows
from ep_runtime_client.ops.transports.choice import collectives
from ep_runtime_client.ops.transports.fp8_sums import ScaledRows
from ep_runtime_client.ops.transports.nodes_plan import (
    chunk_rows,
    counts_chunks,
    counts_rows,
    my_node,
    packing,
    row_counts,
    slot_nodes,
)
from ep_runtime_client.ops.transports.nodes_rows import lined_up, sum_nodes


def prepare(call: Call, rank: jax.Array, index: jax.Array, topk_idx: jax.Array) -> NodePlanArrays:
    """topk_idx [T, K] int32 -> the plan arrays of this device, without the slab dim."""
    if rails.plans(call, topk_idx):
        return rails.prepare(call, topk_idx)
    return nodes_plan.prepare(call, rank, index, topk_idx)


def prepare_with_most(
    call: Call, rank: jax.Array, index: jax.Array, topk_idx: jax.Array
) -> tuple[NodePlanArrays, jax.Array]:
    """`prepare`, and int32 [1]: the most rows that the zones of any rank of this node have."""
    plan = prepare(call, rank, index, topk_idx)
    rows = like(plan.group_sizes.sum(keepdims=True, dtype=jnp.int32), topk_idx)
    size = call.group.ranks_per_node
    of_ranks = collectives(call).node(call, jnp.broadcast_to(rows, (size, 1)))
    return plan, of_ranks.max(0)


def _in_chunks(
    call: Call,
    plan: NodePlanArrays,
    here: tuple[jax.Array, ...],
    take: Callable[[jax.Array, int], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
    """What the rail peers send, [D, T, ...] each: block m from the one on node m.

    Args:
        call: the call.
        plan: says in how many chunks.
        here: arrays [D, T, ...] of which this node's block is right already.
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
        # The last chunk begins earlier and sends some rows again, so that all have one size.
        first = jnp.minimum(number * rows, tokens - rows)
        got = ops.rail(call, *take(first, rows))
        pairs = zip(arrays, got, strict=True)
        return tuple(lax.dynamic_update_slice_in_dim(x, y, first, 1) for x, y in pairs)

    arrays: tuple[jax.Array, ...]
    # What a lost rank left of the count must not keep the loop going.
    count = jnp.minimum(plan.chunks[0], -(-tokens // rows))
    _, arrays = lax.while_loop(
        lambda state: state[0] < count,
        lambda state: (state[0] + 1, send(*state)),
        (like(jnp.int32(0), plan.chunks), here),
    )
    return arrays


def to_nodes(call: Call, plan: NodePlanArrays, *sent: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [T, X] of tokens -> those of this rank's virtual tokens, [D*T, X]."""
    ops = collectives(call)
    if not counts_chunks(call):
        return tuple(x.reshape(-1, x.shape[-1]) for x in ops.rail_gather(call, *sent))
    tokens = packing(call, plan.dst_rank)
    if counts_rows(call):
        to, from_ = row_counts(call, plan, tokens.has)
        moved = ops.rail_counted(call, to, from_, *(lined_up(call, x, tokens.token) for x in sent))
        return tuple(x.reshape(-1, x.shape[-1]) for x in moved)
    mine = my_node(call)
    own = rows_at(tokens.token, mine)

    def blank(x: jax.Array) -> jax.Array:
        empty = like(jnp.zeros((call.group.num_nodes, *x.shape), x.dtype), x)
        return lax.dynamic_update_slice_in_dim(empty, lined_up(call, x, own)[None], mine, 0)

    def take(first: jax.Array, rows: int) -> tuple[jax.Array, ...]:
        chosen = lax.dynamic_slice_in_dim(tokens.token, first, rows, 1)
        return tuple(lined_up(call, x, chosen) for x in sent)

    arrived = _in_chunks(call, plan, tuple(blank(x) for x in sent), take)
    return tuple(x.reshape(-1, x.shape[-1]) for x in arrived)


def _from_nodes(call: Call, plan: NodePlanArrays, *sent: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [D*T, X] of virtual tokens -> [D, T, X]: what each node says of its `NodePacking`."""
    # Results of custom calls are typed as varying over nothing.
    typed = (like(x, plan.chunks) for x in sent)
    blocks = tuple(x.reshape(call.group.num_nodes, -1, x.shape[-1]) for x in typed)
    if counts_rows(call):
        from_, to = row_counts(call, plan, packing(call, plan.dst_rank).has)
        moved: tuple[jax.Array, ...] = collectives(call).rail_counted(call, to, from_, *blocks)
        return moved

    def take(first: jax.Array, rows: int) -> tuple[jax.Array, ...]:
        return tuple(lax.dynamic_slice_in_dim(x, first, rows, 1) for x in blocks)

    return _in_chunks(call, plan, blocks, take)


def partial_dtype(call: Call, dtype: Any) -> Any:
    """Dtype of a node's sums on their way."""
    return sum_dtype(dtype) if call.group.combine_precision == "exact" else dtype


def sums_of_nodes(
    call: Call, plan: NodePlanArrays, sums: jax.Array, *beside: jax.Array
) -> tuple[jax.Array | ScaledRows, list[jax.Array]]:
    """Like `_from_nodes`: a node's sums [D*T, H] as combine_precision says, others as they are."""
    if call.group.combine_precision != "fp8":
        partials, *others = _from_nodes(call, plan, sums, *beside)
        return partials, others
    data, scale, *others = _from_nodes(call, plan, *fp8_sums.scaled(sums), *beside)
    return ScaledRows(data, scale), others


def dispatch(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    tokens: jax.Array,
    weights: jax.Array | None,
    plan: NodePlanArrays,
) -> tuple[jax.Array, jax.Array]:
    """tokens [T, H], weights f32 [T, K] or None -> recv [C, H], recv_weights f32 [C]."""
    if rails.takes(call, tokens, tokens.shape[0]):
        return rails.dispatch(call, rank, index, tokens, weights, plan)
    sent = (tokens,) if weights is None else (tokens, weights)
    arrived = to_nodes(call, plan, *sent)
    given = None if weights is None else arrived[1]
    return windows.dispatch(call, rank, index, arrived[0], given, plan.inside)


def combine(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    expert_out: jax.Array,
    weights: jax.Array | None,
    plan: NodePlanArrays,
) -> jax.Array:
    """expert_out [C, H], weights f32 [C] or None -> tokens_out [T, H]."""
    if rails.takes(call, expert_out, plan.dst_rank.shape[0], sums=True):
        return rails.combine(call, rank, index, expert_out, weights, plan)
    dtype = expert_out.dtype
    wide = partial_dtype(call, dtype)
    sums = windows.combine(call, rank, index, expert_out, weights, plan.inside, wide)
    return added_up(call, plan, sums, dtype)


def added_up(call: Call, plan: NodePlanArrays, sums: jax.Array, dtype: Any) -> jax.Array:
    """A node's sums [D*T, H] of virtual tokens -> those of all nodes, [T, H] of `dtype`."""
    partials, _ = sums_of_nodes(call, plan, sums)
    return sum_nodes(call, packing(call, plan.dst_rank), partials, dtype)


def dispatch_bwd(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    d_recv: jax.Array,
    d_weights: jax.Array,
    plan: NodePlanArrays,
) -> tuple[jax.Array, jax.Array]:
    """d_recv [C, H], d_weights f32 [C] -> d_tokens [T, H], d_topk_weights f32 [T, K]."""
    if rails.takes(call, d_recv, plan.dst_rank.shape[0], sums=True):
        return rails.dispatch_bwd(call, rank, index, d_recv, d_weights, plan)
    dtype = d_recv.dtype
    wide = partial_dtype(call, dtype)
    sums = windows.dispatch_bwd(call, rank, index, d_recv, d_weights, plan.inside, wide)
    return gradients(call, plan, *sums, dtype)


def gradients(
    call: Call, plan: NodePlanArrays, d_tokens: jax.Array, d_slots: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Gradients of virtual tokens [D*T, H] and of their slots' weights f32 [D*T, K] -> d_tokens
    [T, H] of `dtype`, d_topk_weights f32 [T, K]."""
    partials, (by_node,) = sums_of_nodes(call, plan, d_tokens, d_slots)
    tokens = packing(call, plan.dst_rank)
    count, top_k = plan.dst_rank.shape
    node = slot_nodes(call, plan.dst_rank)
    token = jnp.arange(count, dtype=jnp.int32)[:, None]
    position = rows_at(tokens.position.reshape(-1), node * count + token)
    at = (node * count + position) * top_k + jnp.arange(top_k, dtype=jnp.int32)
    at = jnp.where(plan.dst_rank >= 0, at, 0)
    d_topk = jnp.where(plan.dst_rank >= 0, rows_at(by_node.reshape(-1), at), 0.0)
    return sum_nodes(call, tokens, partials, dtype), d_topk


def combine_bwd(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    grad: jax.Array,
    expert_out: jax.Array | None,
    weights: jax.Array | None,
    plan: NodePlanArrays,
) -> tuple[jax.Array, jax.Array | None]:
    """grad [T, H], expert_out [C, H] and weights f32 [C], or None -> d_expert_out, d_weights."""
    plain = expert_out is None and weights is None
    if rails.takes(call, grad, grad.shape[0]) and (plain or grad.dtype in FLOATS):
        return rails.combine_bwd(call, rank, index, grad, expert_out, weights, plan)
    (arrived,) = to_nodes(call, plan, grad)
    return windows.combine_bwd(call, rank, index, arrived, expert_out, weights, plan.inside)
