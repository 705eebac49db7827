"""Moves rows over NCCL in groups with one rank per node, and plans all groups over NCCL.

Rows cross in one exchange; meanwhile a custom call here places or sums the rows that need no peer.
Received rows are placed directly, without windows. It supports groups that send all rows
(`nodes_plan.counts_chunks`), so that every rank knows the number of rows without asking. Sums and
slabs are those of `nodes.py`: a node's sum is rounded to the rows' dtype before it crosses, and
with combine_precision "fp8" to 8 bits.

Letters: `nodes_plan.py`; N = D ranks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from ep_runtime.layout import FP8_BLOCK
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import NodePlanArrays, plan_shapes
from ep_runtime_client.ops.kernels.ffi import targets
from ep_runtime_client.ops.kernels.serve import FLOATS
from ep_runtime_client.ops.quantize.formats.tiles import num_tiles
from ep_runtime_client.ops.transports import fp8_sums, windows
from ep_runtime_client.ops.transports.nodes_plan import counts_chunks, packing, sum_index
from ep_runtime_client.ops.transports.protocol import DeviceCall

TARGETS = targets(
    "ep_nccl_prepare_v1",
    "ep_nccl_dispatch_v1",
    "ep_nccl_combine_v1",
    "ep_nccl_dispatch_bwd_v1",
    "ep_nccl_combine_bwd_v1",
)
PREPARE, DISPATCH, COMBINE, DISPATCH_BWD, COMBINE_BWD = TARGETS
# Limits of the kernels in csrc/cuda/nccl/node_plan.cu.
MAX_EXPERTS, MAX_TOP_K = 2048, 32
MAX_PARTS, KEPT_COUNTS, ENOUGH_BLOCKS, WARPS, PART_SLOTS = 16, 4, 256, 16, 65535


def plans(call: Call, topk_idx: jax.Array) -> bool:
    """Whether this module's `prepare` supports the call."""
    group = call.group
    return bool(
        group.transport == "nccl"
        and group.num_nodes > 1
        and not counts_chunks(call)
        and group.on_overflow != "error"  # else XLA's collectives must agree
        and group.num_experts <= MAX_EXPERTS
        and 0 < topk_idx.shape[1] <= MAX_TOP_K
        and topk_idx.shape[0] > 0
    )


def supports(call: Call, rows: jax.Array, tokens: int, *, sums: bool = False) -> bool:
    """Whether these calls move rows [.., H] of `tokens` tokens; `sums`: whether they are summed."""
    group = call.group
    kind = rows.dtype
    whole = kind.itemsize > 1 or kind.name.startswith(("bool", "int8", "uint8", "float8"))
    right = kind in FLOATS if sums else whole
    if sums and group.combine_precision == "exact":
        right = kind == jnp.float32
    if sums and group.combine_precision == "fp8":
        right = right and fp8_sums.supports(rows)
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


def prepare(call: Call, topk_idx: jax.Array) -> NodePlanArrays:
    """Like `nodes_plan.prepare`, but computed from the expert indices of all ranks only.

    Cost over the network: 4 bytes per slot, from every rank to all.
    """
    group, (tokens, top_k) = call.group, topk_idx.shape
    ranks = group.ep_size
    scratch = _scratch_words(ranks, tokens, top_k, group.num_experts)
    dims = (*plan_shapes(call, tokens, top_k), (ranks, tokens, top_k), (scratch,))
    results = [ShapeDtypeStruct(each, jnp.int32) for each in dims]
    numbers: dict[str, Any] = {
        "node_size": group.ranks_per_node,
        "rail": 0,
        "alignment": call.layer.alignment,
    }
    numbers |= windows.row_alignment(call)
    made = windows.native_call(call, PREPARE, results, topk_idx.astype(jnp.int32), **numbers)
    return NodePlanArrays(*made[: len(NodePlanArrays._fields)])


def _scratch_words(ranks: int, tokens: int, top_k: int, experts: int) -> int:
    """Returns the size of NodePlanScratch in csrc/cuda/nccl/node_plan.cu, which checks it."""
    wanted = min(max(ENOUGH_BLOCKS // ranks, 1), MAX_PARTS)
    least = 2 * tokens * top_k // PART_SLOTS + 1
    parts = ranks * max(least, min(max(tokens // WARPS, 1), wanted))
    return ranks * tokens * top_k + parts * experts + 2 * experts + parts * KEPT_COUNTS


def _blocks(call: Call, tokens: int, width: int, dtype: Any) -> ShapeDtypeStruct:
    return ShapeDtypeStruct((call.group.num_nodes, tokens, width), dtype)


def _crossing(call: Call, tokens: int, width: int, dtype: Any) -> tuple[ShapeDtypeStruct, ...]:
    """Returns the shapes of arrays in which sums cross the network: rows twice, or rows once and
    data with scales twice."""
    rows, none = _blocks(call, tokens, width, dtype), (0, 0, 0)
    if call.group.combine_precision != "fp8":
        scaled = (ShapeDtypeStruct(none, jnp.uint8), ShapeDtypeStruct(none, jnp.float32))
        return (rows, rows, *scaled, *scaled)
    tiles = num_tiles(width, FP8_BLOCK)
    scaled = (_blocks(call, tokens, width, jnp.uint8), _blocks(call, tokens, tiles, jnp.float32))
    return (rows, ShapeDtypeStruct(none, dtype), *scaled, *scaled)


def _sum_rows(call: Call, plan: NodePlanArrays) -> jax.Array:
    return sum_index(call, packing(call, plan.dst_rank))


def dispatch(
    at: DeviceCall, tokens: jax.Array, weights: jax.Array | None, plan: NodePlanArrays
) -> tuple[jax.Array, jax.Array]:
    call, (count, width), top_k = at.call, tokens.shape, plan.dst_rank.shape[1]
    results = (
        ShapeDtypeStruct((call.capacity, width), tokens.dtype),
        ShapeDtypeStruct((call.capacity,), jnp.float32),
        _blocks(call, count, width, tokens.dtype),
        _blocks(call, count, top_k, jnp.float32),
    )
    given = (tokens, windows.or_empty(weights, 0, 0), plan.virtual_row)
    zones = (plan.recv_count, plan.kept, plan.group_sizes)
    recv, recv_weights, *_ = windows.device_call(at, DISPATCH, results, *given, *zones)
    return recv, recv_weights


def combine(
    at: DeviceCall, expert_out: jax.Array, weights: jax.Array | None, plan: NodePlanArrays
) -> jax.Array:
    call, count, width = at.call, plan.dst_rank.shape[0], expert_out.shape[1]
    rows = ShapeDtypeStruct((count, width), expert_out.dtype)
    results = (rows, *_crossing(call, count, width, expert_out.dtype))
    given = (expert_out, windows.or_empty(weights, 0), plan.virtual_row, _sum_rows(call, plan))
    return windows.device_call(at, COMBINE, results, *given)[0]


def dispatch_bwd(
    at: DeviceCall, d_recv: jax.Array, d_weights: jax.Array, plan: NodePlanArrays
) -> tuple[jax.Array, jax.Array]:
    call, (count, top_k), width = at.call, plan.dst_rank.shape, d_recv.shape[1]
    values = _blocks(call, count, top_k, jnp.float32)
    results = (
        ShapeDtypeStruct((count, width), d_recv.dtype),
        ShapeDtypeStruct((count, top_k), jnp.float32),
        *_crossing(call, count, width, d_recv.dtype),
        *(values, values),
    )
    given = (d_recv, d_weights, plan.virtual_row, _sum_rows(call, plan), plan.dst_rank)
    d_tokens, d_topk, *_ = windows.device_call(at, DISPATCH_BWD, results, *given)
    return d_tokens, d_topk


def combine_bwd(
    at: DeviceCall,
    grad: jax.Array,
    expert_out: jax.Array | None,
    weights: jax.Array | None,
    plan: NodePlanArrays,
) -> tuple[jax.Array, jax.Array | None]:
    call, (count, width) = at.call, grad.shape
    rows = jnp.zeros((0, 0), grad.dtype) if expert_out is None else expert_out
    results = (
        ShapeDtypeStruct((call.capacity, width), grad.dtype),
        ShapeDtypeStruct((0 if expert_out is None else call.capacity,), jnp.float32),
        _blocks(call, count, width, grad.dtype),
    )
    given = (grad, rows, windows.or_empty(weights, 0))
    zones = (plan.virtual_row, plan.kept, plan.group_sizes)
    slack = windows.clear_slack(call)
    d_expert_out, d_weights, _ = windows.device_call(
        at, COMBINE_BWD, results, *given, *zones, **slack
    )
    return d_expert_out, None if expert_out is None else d_weights
