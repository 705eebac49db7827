"""Movement over NCCL in groups whose nodes are one rank each, and the plans of all its groups.

A custom call here places or sums what no peer is needed for while rows cross, all in one exchange.
Rows are placed straight out of what arrives, and no window has any. That is for groups whose rows
all cross (`nodes_plan.counts_chunks`), so that every rank knows how many without asking. Sums and
slabs are those of `nodes.py`: a node's sum is rounded to the rows' dtype before it crosses, and
with combine_precision "fp8" to 8 bits.

Letters: `nodes_plan.py`; N = D ranks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep_runtime.layout import FP8_BLOCK
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import NodePlanArrays
from ep_runtime_client.ops.kernels.ffi import bound, ensure_registered, once, targets
from ep_runtime_client.ops.kernels.serve import FLOATS
from ep_runtime_client.ops.quantize.formats.tiles import num_tiles
from ep_runtime_client.ops.transports import fp8_sums, windows
from ep_runtime_client.ops.transports.nodes_plan import counts_chunks

TARGETS = targets(
    "ep_nccl_prepare_v1",
    "ep_nccl_dispatch_v1",
    "ep_nccl_combine_v1",
    "ep_nccl_dispatch_bwd_v1",
    "ep_nccl_combine_bwd_v1",
)
PREPARE, DISPATCH, COMBINE, DISPATCH_BWD, COMBINE_BWD = TARGETS
# Of the kernels: csrc/cuda/nccl/node_plan.cu.
MAX_EXPERTS, MAX_TOP_K = 2048, 32
MAX_PARTS, KEPT_COUNTS, ENOUGH_BLOCKS, WARPS, PART_SLOTS = 16, 4, 256, 16, 65535


def plans(call: Call, topk_idx: jax.Array) -> bool:
    """Whether `prepare` here serves the call."""
    group = call.group
    return bool(
        group.transport == "nccl"
        and group.num_nodes > 1
        and not counts_chunks(call)
        and group.on_overflow != "error"  # who fails a step asks XLA's collectives
        and group.num_experts <= MAX_EXPERTS
        and 0 < topk_idx.shape[1] <= MAX_TOP_K
        and topk_idx.shape[0] > 0
    )


def takes(call: Call, rows: jax.Array, tokens: int, *, sums: bool = False) -> bool:
    """Whether the calls here move such rows [.., H] of so many tokens; `sums`: they are added."""
    group = call.group
    kind = rows.dtype
    whole = kind.itemsize > 1 or kind.name.startswith(("bool", "int8", "uint8", "float8"))
    right = kind in FLOATS if sums else whole
    if sums and group.combine_precision == "exact":
        right = kind == jnp.float32
    if sums and group.combine_precision == "fp8":
        right = right and fp8_sums.takes(rows)
    return bool(
        right
        and group.transport == "nccl"
        and group.num_nodes > 1
        and group.ranks_per_node == 1
        and not counts_chunks(call)
        and rows.shape[-1] * kind.itemsize % 16 == 0
        and 0 < tokens * group.num_nodes < 2**31
        and call.capacity > 0
        and rows.size > 0
    )


def _shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _call(
    call: Call, target: str, results: Any, operands: tuple[jax.Array, ...], **others: int
) -> Any:
    ensure_registered("cuda")
    attributes = windows.attributes(call) | {k: np.int64(v) for k, v in others.items()}
    return once(tuple(jax.ffi.ffi_call(target, results)(*bound(*operands), **attributes)))


def prepare(call: Call, topk_idx: jax.Array) -> NodePlanArrays:
    """As `nodes_plan.prepare`, of expert indices alone that all ranks have from each other.

    Cost over the network: 4 bytes per slot of every rank to all.
    """
    group = call.group
    tokens, top_k = topk_idx.shape
    ranks, nodes, size = group.ep_size, group.num_nodes, group.ranks_per_node
    local = group.experts_per_rank
    dims = (
        *((tokens, top_k),) * 2,
        (size, 4),
        (ranks * tokens + 1,),
        *((call.capacity,),) * 2,
        *((local,),) * 2,
        (1,),
        *((nodes * tokens, top_k),) * 2,
        (1,),
        (ranks, tokens, top_k),
        (_scratch_words(ranks, tokens, top_k, group.num_experts),),
    )
    results = tuple(_shape(jnp.int32, *size) for size in dims)
    others: dict[str, Any] = {"node_size": size, "rail": 0, "alignment": call.layer.alignment}
    others |= windows.row_alignment(call)
    made = _call(call, PREPARE, results, (topk_idx.astype(jnp.int32),), **others)
    return NodePlanArrays(*made[: len(NodePlanArrays._fields)])


def _scratch_words(ranks: int, tokens: int, top_k: int, experts: int) -> int:
    """NodePlanScratch of csrc/cuda/nccl/node_plan.cu, which checks it."""
    wanted = min(max(ENOUGH_BLOCKS // ranks, 1), MAX_PARTS)
    least = 2 * tokens * top_k // PART_SLOTS + 1
    parts = ranks * max(least, min(max(tokens // WARPS, 1), wanted))
    return ranks * tokens * top_k + parts * experts + 2 * experts + parts * KEPT_COUNTS


def _blocks(call: Call, tokens: int, width: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return _shape(dtype, call.group.num_nodes, tokens, width)


def _crossing(call: Call, tokens: int, width: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What sums cross in: as rows twice, or as rows once and as data and scales twice."""
    rows, none = _blocks(call, tokens, width, dtype), (0, 0, 0)
    if call.group.combine_precision != "fp8":
        scaled = (_shape(jnp.uint8, *none), _shape(jnp.float32, *none))
        return (rows, rows, *scaled, *scaled)
    tiles = num_tiles(width, FP8_BLOCK)
    scaled = (_blocks(call, tokens, width, jnp.uint8), _blocks(call, tokens, tiles, jnp.float32))
    return (rows, _shape(dtype, *none), *scaled, *scaled)


def _sum_rows(call: Call, plan: NodePlanArrays) -> jax.Array:
    """[T, D]: which of the sums that arrive, [D * T], each rank's is; -1 where it has no row."""
    nodes = jnp.arange(call.group.num_nodes, dtype=jnp.int32)
    count = plan.dst_rank.shape[0]
    has = (plan.dst_rank[:, :, None] == nodes).any(1)
    place = nodes * count + jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.where(has, place, -1)


def dispatch(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    tokens: jax.Array,
    weights: jax.Array | None,
    plan: NodePlanArrays,
) -> tuple[jax.Array, jax.Array]:
    """tokens [T, H], weights f32 [T, K] or None -> recv [C, H], recv_weights f32 [C]."""
    (count, width), top_k = tokens.shape, plan.dst_rank.shape[1]
    results = (
        _shape(tokens.dtype, call.capacity, width),
        _shape(jnp.float32, call.capacity),
        _blocks(call, count, width, tokens.dtype),
        _blocks(call, count, top_k, jnp.float32),
    )
    given = windows.or_empty(weights, 0, 0)
    zones = (plan.recv_count, plan.kept, plan.group_sizes)
    operands = (rank, index, tokens, given, plan.virtual_row, *zones)
    recv, recv_weights, *_ = _call(call, DISPATCH, results, operands)
    return recv, recv_weights


def combine(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    expert_out: jax.Array,
    weights: jax.Array | None,
    plan: NodePlanArrays,
) -> jax.Array:
    """expert_out [C, H], weights f32 [C] or None -> tokens_out [T, H]."""
    count, width = plan.dst_rank.shape[0], expert_out.shape[1]
    crossing = _crossing(call, count, width, expert_out.dtype)
    results = (_shape(expert_out.dtype, count, width), *crossing)
    given = windows.or_empty(weights, 0)
    operands = (rank, index, expert_out, given, plan.virtual_row, _sum_rows(call, plan))
    tokens_out: jax.Array = _call(call, COMBINE, results, operands)[0]
    return tokens_out


def dispatch_bwd(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    d_recv: jax.Array,
    d_weights: jax.Array,
    plan: NodePlanArrays,
) -> tuple[jax.Array, jax.Array]:
    """d_recv [C, H], d_weights f32 [C] -> d_tokens [T, H], d_topk_weights f32 [T, K]."""
    (count, top_k), width = plan.dst_rank.shape, d_recv.shape[1]
    values = _blocks(call, count, top_k, jnp.float32)
    results = (
        _shape(d_recv.dtype, count, width),
        _shape(jnp.float32, count, top_k),
        *_crossing(call, count, width, d_recv.dtype),
        *(values, values),
    )
    sums = (plan.virtual_row, _sum_rows(call, plan), plan.dst_rank)
    d_tokens, d_topk, *_ = _call(
        call, DISPATCH_BWD, results, (rank, index, d_recv, d_weights, *sums)
    )
    return d_tokens, d_topk


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
    count, width = grad.shape
    rows = jnp.zeros((0, 0), grad.dtype) if expert_out is None else expert_out
    results = (
        _shape(grad.dtype, call.capacity, width),
        _shape(jnp.float32, 0 if expert_out is None else call.capacity),
        _blocks(call, count, width, grad.dtype),
    )
    zones = (plan.virtual_row, plan.kept, plan.group_sizes)
    operands = (rank, index, grad, rows, windows.or_empty(weights, 0), *zones)
    slack = {} if call.clear_slack else {"clear_slack": 0}
    d_expert_out, d_weights, _ = _call(call, COMBINE_BWD, results, operands, **slack)
    return d_expert_out, None if expert_out is None else d_weights
