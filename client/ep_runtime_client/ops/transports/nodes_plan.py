"""prepare for groups on several nodes, and the chunks in which their rows cross the network.

The row of every slot is decided exactly as on one node, so the slabs are the same. The ranks of a
node then act as an EP group of their own: each is the source of the tokens of its rail (the ranks
with its local index on all nodes), which send it the tokens that the node needs.

Letters: T tokens of one rank, K top_k, N ranks of an EP group on D nodes of G, C rows of a slab.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime import device_layout
from ep_runtime.device_layout import lane_rows
from ep_runtime.layout import packed_columns
from ep_runtime.specs import DTYPE_BYTES
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays, NodePlanArrays, PlanArrays
from ep_runtime_client.ops.kernels.slots import Packed, exclusive_sum, packed, rows_at
from ep_runtime_client.ops.tracing.varying import like
from ep_runtime_client.ops.transports import between_nccl, between_xla
from ep_runtime_client.ops.transports.protocol import Collectives, DeviceCall
from ep_runtime_client.ops.transports.xla_plan import receiver_side, route

# The most chunks of a rank's tokens: more would waste less of the last chunk, and wait for the
# network more often. A chunk has at least MIN_CHUNK_ROWS rows, if the rank has so many.
MAX_CHUNKS = 16
MIN_CHUNK_ROWS = 64


def collectives(call: Call) -> Collectives:
    """Returns the collectives of the call's transport that move data between nodes."""
    return between_nccl if call.group.transport == "nccl" else between_xla


def chunk_rows(tokens: int) -> int:
    """Returns the rows of one chunk between two ranks, if each rank has `tokens` tokens."""
    return -(-tokens // max(1, min(MAX_CHUNKS, tokens // MIN_CHUNK_ROWS)))


def counts_chunks(call: Call) -> bool:
    """Whether calls count rows and send only the needed ones over the network, instead of all.

    A loop on CPU reads its count on the device. On a GPU the host must read it, which costs a wait.
    """
    group = call.group
    return group.transport == "memfd" or device_layout.counts_rows(group, call.layer.top_k)


def counts_rows(call: Call) -> bool:
    """Whether rows cross in one exchange, exactly as many as two ranks have for each other."""
    return call.group.transport == "nccl" and counts_chunks(call)


def row_counts(call: Call, plan: NodePlanArrays, has: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Counts rows for the rail peer on each node, by has [D, T], and from it: int32 [D] each."""
    here = (plan.virtual_rank >= 0).any(-1).reshape(call.group.num_nodes, -1)
    return has.sum(1, dtype=jnp.int32), here.sum(1, dtype=jnp.int32)


def my_node(call: Call) -> jax.Array:
    """Returns the node of this device in its EP group, int32 []."""
    rank = between_xla.ep_rank(call)
    return lax.div(rank, jnp.full_like(rank, call.group.ranks_per_node))


def slot_nodes(call: Call, dst_rank: jax.Array) -> jax.Array:
    """Returns the node of each slot's row; 0 for a slot without one."""
    rank = jnp.maximum(dst_rank, 0)
    return lax.div(rank, jnp.full_like(rank, call.group.ranks_per_node))


def packing(call: Call, dst_rank: jax.Array) -> Packed:
    """Packs, for each node [D, T], the tokens with a row there, by dst_rank [T, K] of a plan.

    Without `counts_chunks` every token keeps its own place.
    """
    nodes = jnp.arange(call.group.num_nodes, dtype=jnp.int32)[:, None, None]
    has = ((dst_rank >= 0) & (slot_nodes(call, dst_rank) == nodes)).any(-1)
    if counts_chunks(call):
        return packed(has)
    place = jnp.broadcast_to(jnp.arange(has.shape[1], dtype=jnp.int32), has.shape)
    return Packed(has, place, place)


def lined_up_rows(dst_rank: jax.Array, nodes: int) -> int:
    """Returns the most rows of a rank's tokens on all nodes, for dst_rank [T, K] of a plan."""
    tokens, top_k = dst_rank.shape
    return tokens * min(nodes, top_k)


def lined_up(tokens: Packed, rows: int) -> jax.Array:
    """Lists the tokens of one node after the other, in order: int32 [rows]; 0 past the last."""
    nodes, count = tokens.has.shape
    first = jnp.arange(nodes, dtype=jnp.int32) * count
    counts = tokens.has.sum(1, dtype=jnp.int32)
    return jnp.maximum(_joined(tokens.token.reshape(-1), first, counts, rows)[0], 0)


def sum_index(call: Call, tokens: Packed) -> jax.Array:
    """Returns [T, D]: index of each token's sum from each node among the sums received; -1 if a
    node has none. Sums are contiguous if rows are counted; else each node has room for all
    tokens."""
    nodes, count = tokens.has.shape
    first = jnp.arange(nodes, dtype=jnp.int32) * count
    if counts_rows(call):
        first = exclusive_sum(tokens.has.sum(1, dtype=jnp.int32))
    return jnp.where(tokens.has, first[:, None] + tokens.position, -1).T


def prepare(at: DeviceCall, topk_idx: jax.Array) -> NodePlanArrays:
    """Makes the plan for topk_idx [T, K] int32.

    Cost over the network: E counts of each rank to all, 8 bytes per slot to each other node, and,
    if rows cross in chunks, one number of each rank to all.
    """
    call = at.call
    ops, group = collectives(call), call.group
    routed = route(at, topk_idx, ops.all_gather)
    tokens = packing(call, routed.dst_rank)
    virtual_rank, virtual_row = _virtual_tokens(call, tokens, routed.dst_rank, routed.dst_row)
    locals_ = jnp.arange(group.ranks_per_node, dtype=jnp.int32)[:, None, None]
    arriving = ops.node(call, jnp.where(virtual_rank == locals_, virtual_row, -1))
    received = receiver_side(arriving, call.capacity)
    return NodePlanArrays(
        *routed[:2],
        _counts(call, arriving, received[0].at[0, 3].set(routed.dropped)),
        *received[1:],
        *routed[2:5],
        virtual_rank,
        virtual_row,
        _chunks(call, tokens),
    )


def _counts(call: Call, arriving: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns recv_count [G, 4] and, if rows are packed, the counts of all pairs of ranks."""
    nodes = call.group.num_nodes
    size, virtual, _ = arriving.shape
    if not device_layout.packs(call.group, virtual):
        return counts
    staged = (arriving >= 0).any(-1).reshape(size, nodes, -1)
    half = (staged.shape[2] + 1) // 2
    here = jnp.stack([x.sum(2, dtype=jnp.int32) for x in (staged, staged[..., :half])], 2)
    pairs = collectives(call).node(call, jnp.broadcast_to(here.reshape(1, -1), (size, here.size)))
    by_node = pairs.reshape(size, size, nodes, 2).transpose(1, 2, 3, 0)  # [source, D, half, rank]
    both = by_node[:, :, 0].sum(1, dtype=jnp.int32)
    first = by_node[:, : nodes // 2, 0].sum(1, dtype=jnp.int32)
    if nodes % 2:
        first = first + by_node[:, nodes // 2, 1]
    return jnp.concatenate([counts, both, first, by_node.reshape(size, -1)], 1)


def packs(plan: NodePlanArrays) -> bool:
    """Whether rows of the plan's calls are packed into lanes without room for all of them."""
    return plan.recv_count.shape[-1] > 4


def sums_fit(call: Call, plan: NodePlanArrays) -> jax.Array:
    """Whether the lane of every rank of the node holds the sums of its virtual tokens, bool []."""
    if not packs(plan):
        return jnp.array(True)
    group = call.group
    size = group.ranks_per_node
    of_pairs = plan.recv_count[:, 4 : packed_columns(size)].reshape(size, 2, size)
    others = jnp.where(jnp.eye(size, dtype=bool)[:, None], 0, of_pairs).sum(2, dtype=jnp.int32)
    sums, first = others[:, 0], others[:, 1]
    if group.combine_precision == "exact" and DTYPE_BYTES[group.max_token_dtype] < 4:
        # Sums in f32 take two rows each, and the two halves of the tokens take turns.
        sums = 2 * jnp.maximum(first, sums - first)
    fits: jax.Array = (sums <= lane_rows(group)).all()
    return fits


def of_node(call: Call, plan: NodePlanArrays, node: jax.Array) -> PlanArrays:
    """Returns the part of a packed plan for the virtual tokens of one node, int32 []."""
    group = call.group
    nodes, size = group.num_nodes, group.ranks_per_node
    tokens = len(plan.virtual_rank) // nodes
    by_node = plan.recv_count[:, packed_columns(size) :].reshape(size, nodes, 2, size)
    me = lax.rem(between_xla.ep_rank(call), like(jnp.int32(size), plan.recv_count))
    here = rows_at(by_node.T, me)  # [half, D, source]
    staged, first_half = (rows_at(x, node) for x in here)
    earlier = jnp.where(jnp.arange(nodes)[:, None] < node, here[0], 0).sum(0, dtype=jnp.int32)
    first = exclusive_sum(plan.recv_count[:, 0]) + earlier  # staged row of every source
    entry = rows_at(plan.staged_start, first)
    entries = rows_at(plan.staged_start, first + staged) - entry
    counts = jnp.stack([staged, entries, first_half, jnp.zeros_like(staged)], 1)
    if device_layout.packs(group, tokens):
        pairs = rows_at(by_node.swapaxes(0, 1), node).reshape(size, -1)
        counts = jnp.concatenate([counts, pairs], 1)
    start, source = _joined(plan.staged_start, first, staged, size * tokens + 1)
    shift = rows_at(exclusive_sum(entries) - entry, source)
    start = jnp.where(start < 0, entries.sum(dtype=jnp.int32), start + shift)
    row, slot = (_joined(x, entry, entries, len(x))[0] for x in (plan.staged_row, plan.staged_slot))
    rank, at = (
        lax.dynamic_slice_in_dim(x, node * tokens, tokens)
        for x in (plan.virtual_rank, plan.virtual_row)
    )
    return PlanArrays(rank, at, counts, start, row, slot, *plan.inside[6:])


def _joined(
    values: jax.Array, first: jax.Array, lengths: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Joins runs of values [first, first + length): int32 [count], -1 past the last; also returns
    the run of each value."""
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    at = jnp.arange(count, dtype=jnp.int32)
    run = (at[:, None] >= ends).sum(1, dtype=jnp.int32)
    real, run = run < len(ends), jnp.minimum(run, len(ends) - 1)
    place = jnp.where(real, rows_at(first - (ends - lengths), run) + at, 0)
    return jnp.where(real, rows_at(values, place), -1), run


def _virtual_tokens(
    call: Call, tokens: Packed, dst_rank: jax.Array, dst_row: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns local rank and row of every slot of the virtual tokens, int32 [D*T, K] both."""
    group = call.group
    nodes = jnp.arange(group.num_nodes, dtype=jnp.int32)[:, None, None]
    there = (dst_rank >= 0) & (slot_nodes(call, dst_rank) == nodes)
    rows = jnp.broadcast_to(dst_row, there.shape)
    slots = jnp.stack([dst_rank - nodes * group.ranks_per_node, rows], 1)
    slots = jnp.where(there[:, None], slots, -1)  # [D, 2, T, K]
    if counts_chunks(call):
        # Positions past the last token of a node hold an arbitrary token; drop its slots.
        order = jnp.arange(dst_rank.shape[0], dtype=jnp.int32)
        filled = order < tokens.has.sum(1, dtype=jnp.int32)[:, None]
        slots = jnp.take_along_axis(slots, tokens.token[:, None, :, None], 2)
        slots = jnp.where(filled[:, None, :, None], slots, -1)
    (arrived,) = collectives(call).rail(call, slots)
    top_k = dst_rank.shape[1]
    return arrived[:, 0].reshape(-1, top_k), arrived[:, 1].reshape(-1, top_k)


def _chunks(call: Call, tokens: Packed) -> jax.Array:
    """Returns the chunks that the rank with the most rows needs, or 1 for one exchange."""
    if not counts_chunks(call) or counts_rows(call):
        return jnp.ones(1, jnp.int32)
    rows = chunk_rows(tokens.has.shape[1])
    counts = tokens.has.sum(1, dtype=jnp.int32)
    others = jnp.arange(call.group.num_nodes) != my_node(call)
    most = collectives(call).all_gather(call, jnp.where(others, counts, 0).max()).max()
    return lax.div(most + (rows - 1), jnp.full_like(most, rows)).reshape(1)


def network_rows(call: Call, plan: AnyArrays) -> tuple[int, int]:
    """Counts the rows that one dispatch (or one combine) sends between nodes, and the least
    possible.

    Args:
        call: the call of the plan.
        plan: whole arrays, with the slab dim, of one EP group.
    """
    group = call.group
    if not isinstance(plan, NodePlanArrays):
        return 0, 0
    size, nodes = group.ranks_per_node, jnp.arange(group.num_nodes)
    place = jnp.where(plan.dst_rank >= 0, plan.dst_rank // size, -1)  # [N, T, K]
    goes = (place[..., None] == nodes).any(2)  # [N, T, D]
    own = (jnp.arange(group.ep_size) // size)[:, None, None] == nodes
    least = int((goes & ~own).sum())
    if counts_rows(call):
        return least, least
    rows = int(plan.chunks[0, 0]) * chunk_rows(plan.dst_rank.shape[1])
    if not counts_chunks(call):  # one exchange of all rows
        rows = plan.virtual_rank.shape[1] // group.num_nodes
    return rows * (group.num_nodes - 1) * group.ep_size, least
