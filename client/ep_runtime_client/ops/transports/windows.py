"""Transports "memfd" and "nvlink": the ops as custom calls of a native library, on windows.

All functions run per device, on local blocks without the slab dim; the signatures are those of
`xla.py`. Attributes are names and static sizes only, so that every process traces the same
program and a compiled one can be kept: rank and layer index are operands, addresses and
generation are looked up when the call runs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep_runtime import device_layout, native
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import PlanArrays
from ep_runtime_client.ops.kernels.ffi import bound, ensure_registered, once, targets

TARGETS = targets(
    "ep_prepare_v1",
    "ep_dispatch_v1",
    "ep_combine_v1",
    "ep_dispatch_bwd_v1",
    "ep_combine_bwd_v1",
)
# On GPUs, where it must wait for its verdict.
(SYNC_TARGET,) = targets("ep_prepare_sync_v1")


def _call(call: Call, target: str, results: Any, *operands: jax.Array, **others: np.int64) -> Any:
    platform = native.PLATFORMS[call.group.transport]
    ensure_registered(platform)
    made = jax.ffi.ffi_call(target, results)(*bound(*operands), **attributes(call), **others)
    return made if platform == "cpu" else once(made)


def attributes(call: Call) -> dict[str, np.int64]:
    """What every call of a layer is told by."""
    return {
        "layer_id": np.int64(call.layer.base_id),
        "fingerprint": np.int64(call.layer.fingerprint),
        "handle": np.int64(call.meta.handle),
    }


def row_alignment(call: Call) -> dict[str, np.int64]:
    """The attribute of calls whose rows are laid closer than the layer's alignment; else none."""
    if call.row_alignment == call.layer.alignment:
        return {}
    return {"row_alignment": np.int64(call.row_alignment)}


def _shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def or_empty(array: jax.Array | None, *dims: int) -> jax.Array:
    """A missing operand travels as an f32 array of size 0."""
    return jnp.zeros(dims, jnp.float32) if array is None else array


def prepare(call: Call, rank: jax.Array, index: jax.Array, topk_idx: jax.Array) -> PlanArrays:
    """topk_idx [T, K] int32 -> the plan arrays of this device, without the slab dim."""
    return PlanArrays(*_prepare(call, rank, index, topk_idx))


def prepare_with_most(
    call: Call, rank: jax.Array, index: jax.Array, topk_idx: jax.Array
) -> tuple[PlanArrays, jax.Array]:
    """`prepare` on a GPU, and int32 [1]: the most rows that the zones of any rank have."""
    *arrays, most = _prepare(call, rank, index, topk_idx, (1,))
    return PlanArrays(*arrays), most


def _prepare(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    topk_idx: jax.Array,
    *more: tuple[int, ...],
) -> tuple[jax.Array, ...]:
    """Plan arrays, and int32 arrays of the shapes `more`."""
    tokens, top_k = topk_idx.shape
    ranks, local = call.group.ep_size, call.group.experts_per_rank
    dims = (
        (tokens, top_k),
        (tokens, top_k),
        (ranks, device_layout.count_columns(call.group, tokens)),
        (ranks * tokens + 1,),
        (call.capacity,),
        (call.capacity,),
        (local,),
        (local,),
        (1,),
        *more,
    )
    results = tuple(_shape(jnp.int32, *size) for size in dims)
    # On a GPU only a call that XLA does not record into a command buffer can fail a step.
    waits = call.group.transport == "nvlink" and call.group.on_overflow == "error"
    target = SYNC_TARGET if waits else "ep_prepare_v1"
    return tuple(_call(call, target, results, rank, index, topk_idx, **row_alignment(call)))


def dispatch(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    tokens: jax.Array,
    weights: jax.Array | None,
    plan: PlanArrays,
) -> tuple[jax.Array, jax.Array]:
    """tokens [T, H], weights f32 [T, K] or None -> recv [C, H], recv_weights f32 [C]."""
    results = (
        _shape(tokens.dtype, call.capacity, tokens.shape[1]),
        _shape(jnp.float32, call.capacity),
    )
    operands = (rank, index, tokens, or_empty(weights, 0, 0), *plan)
    recv, recv_weights = _call(call, "ep_dispatch_v1", results, *operands)
    return recv, recv_weights


def combine(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    expert_out: jax.Array,
    weights: jax.Array | None,
    plan: PlanArrays,
    dtype: Any = None,
) -> jax.Array:
    """expert_out [C, H], weights f32 [C] or None -> tokens_out [T, H] of its dtype, or `dtype`."""
    result = _shape(dtype or expert_out.dtype, plan.dst_rank.shape[0], expert_out.shape[1])
    tokens_out: jax.Array = _call(
        call, "ep_combine_v1", result, rank, index, expert_out, or_empty(weights, 0), *plan
    )
    return tokens_out


def dispatch_bwd(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    d_recv: jax.Array,
    d_weights: jax.Array,
    plan: PlanArrays,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """d_recv [C, H], d_weights f32 [C] -> d_tokens [T, H], d_topk_weights f32 [T, K].

    d_tokens has the dtype of d_recv, or `dtype`.
    """
    tokens, top_k = plan.dst_rank.shape
    results = (
        _shape(dtype or d_recv.dtype, tokens, d_recv.shape[1]),
        _shape(jnp.float32, tokens, top_k),
    )
    d_tokens, d_topk_weights = _call(
        call, "ep_dispatch_bwd_v1", results, rank, index, d_recv, d_weights, *plan
    )
    return d_tokens, d_topk_weights


def combine_bwd(
    call: Call,
    rank: jax.Array,
    index: jax.Array,
    grad: jax.Array,
    expert_out: jax.Array | None,
    weights: jax.Array | None,
    plan: PlanArrays,
) -> tuple[jax.Array, jax.Array | None]:
    """grad [T, H], expert_out [C, H] and weights f32 [C], or None -> d_expert_out, d_weights."""
    weighted = weights is not None
    rows = jnp.zeros((0, 0), grad.dtype) if expert_out is None else expert_out
    results = (
        _shape(grad.dtype, call.capacity, grad.shape[1]),
        _shape(jnp.float32, call.capacity if weighted else 0),
    )
    operands = (rank, index, grad, rows, or_empty(weights, 0), *plan)
    slack = {} if call.clear_slack else {"clear_slack": np.int64(0)}
    d_expert_out, d_weights = _call(call, "ep_combine_bwd_v1", results, *operands, **slack)
    return d_expert_out, d_weights if weighted else None
