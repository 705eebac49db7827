"""Transports "memfd" and "nvlink": the ops as custom calls of a native library, on windows.

Attributes are only names and static sizes, so that every process traces the same program and a
compiled one can be cached: rank and layer index are operands; addresses and generation are looked
up when the call runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct

from ep_runtime import device_layout, native
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import PlanArrays, inside_shapes
from ep_runtime_client.ops.kernels.ffi import ensure_registered, launch, once, targets
from ep_runtime_client.ops.transports.between_xla import largest
from ep_runtime_client.ops.transports.protocol import DeviceCall
from ep_runtime_client.ops.transports.xla_plan import zone_rows

TARGETS = targets(
    "ep_prepare_v1",
    "ep_dispatch_v1",
    "ep_combine_v1",
    "ep_dispatch_bwd_v1",
    "ep_combine_bwd_v1",
)
# Custom calls on GPUs that move whole experts.
PUSH_COPIES, RETURN_COPIES = targets("ep_push_copies_v1", "ep_return_copies_v1")
# With more rounds, an XLA collective is faster.
_MOST_ROUNDS = 64
PREPARE, DISPATCH, COMBINE, DISPATCH_BWD, COMBINE_BWD = TARGETS
# The prepare on GPUs that waits for its verdict, so that it can fail the step.
(PREPARE_SYNC,) = targets("ep_prepare_sync_v1")


def native_call(
    call: Call,
    target: str,
    results: Sequence[ShapeDtypeStruct],
    *operands: jax.Array,
    held: int | None = None,
    **others: Any,
) -> tuple[jax.Array, ...]:
    """Makes a custom call of the library for the group's platform, which looks up its layer.

    The first `held` results (default: all) may have users other than the stack of a `scan`.
    """
    platform = native.PLATFORMS[call.group.transport]
    ensure_registered(platform)
    made = tuple(launch(target, results, *operands, **attributes(call), **others))
    if platform == "cpu":
        return made
    count = len(made) if held is None else held
    return (*once(made[:count]), *made[count:])


def device_call(
    at: DeviceCall, target: str, results: Sequence[ShapeDtypeStruct], *operands: Any, **others: Any
) -> tuple[jax.Array, ...]:
    """Makes a custom call as `native_call` does, which also gets rank and layer index."""
    return native_call(at.call, target, results, at.rank, at.layer_index, *operands, **others)


def attributes(call: Call) -> dict[str, np.int64]:
    """Returns the attributes that every custom call of a layer has."""
    return {
        "layer_id": np.int64(call.layer.base_id),
        "fingerprint": np.int64(call.layer.fingerprint),
        "handle": np.int64(call.meta.handle),
    }


def row_alignment(call: Call) -> dict[str, Any]:
    """Returns the attribute for zones aligned closer than the layer's; empty for others."""
    if call.row_alignment == call.layer.alignment:
        return {}
    return {"row_alignment": call.row_alignment}


def clear_slack(call: Call) -> dict[str, Any]:
    """Returns the attribute that leaves rows past the last zone as they are; or empty."""
    return {} if call.clear_slack else {"clear_slack": 0}


def or_empty(array: jax.Array | None, *dims: int) -> jax.Array:
    """Replaces a missing operand by an f32 array of size 0."""
    return jnp.zeros(dims, jnp.float32) if array is None else array


def prepare(
    at: DeviceCall, topk_idx: jax.Array, *, most: bool = False
) -> tuple[PlanArrays, jax.Array | None]:
    call = at.call
    on_gpus = native.PLATFORMS[call.group.transport] == "cuda"
    plan, others = _prepared(at, topk_idx, [(1,)] * (most and on_gpus))
    if not most:
        return plan, None
    return plan, others[0] if on_gpus else largest(call, zone_rows(plan, topk_idx))


def prepare_spread(at: DeviceCall, topk_idx: jax.Array) -> tuple[PlanArrays, jax.Array, jax.Array]:
    """Makes the plan of a call on physical experts from the experts in topk_idx.

    `num_recv` counts the rows demanded of a rank's own experts, as without copies.

    Returns:
        The plan; int32 [1], rows in the zones of the fullest rank; int32 [N, S], the expert of each
        slot of the ranks, -1 in empty slots.
    """
    meta, group = at.call.meta, at.call.layer.group_spec
    more = [(1,), (group.ep_size, group.spare_experts)]
    plan, (most, experts) = _prepared(at, topk_idx, more, rows=meta.capacity)
    return plan, most, experts


def _prepared(
    at: DeviceCall, topk_idx: jax.Array, more: Sequence[tuple[int, ...]], **attributes: int
) -> tuple[PlanArrays, Sequence[jax.Array]]:
    """Makes a plan, and `more` results of these shapes."""
    call, group, count = at.call, at.call.layer.group_spec, len(PlanArrays._fields)
    dims = [*inside_shapes(call, *topk_idx.shape), *more]
    results = [ShapeDtypeStruct(each, jnp.int32) for each in dims]
    # On a GPU only a call that XLA does not record into a command buffer can fail a step.
    waits = group.transport == "nvlink" and group.on_overflow == "error"
    target = PREPARE_SYNC if waits else PREPARE
    made = device_call(at, target, results, topk_idx, **row_alignment(call), **attributes)
    return PlanArrays(*made[:count]), made[count:]


def dispatch(
    at: DeviceCall, tokens: jax.Array, weights: jax.Array | None, plan: PlanArrays
) -> tuple[jax.Array, jax.Array]:
    capacity = at.call.capacity
    results = (
        ShapeDtypeStruct((capacity, tokens.shape[1]), tokens.dtype),
        ShapeDtypeStruct((capacity,), jnp.float32),
    )
    given = (tokens, or_empty(weights, 0, 0))
    recv, recv_weights = device_call(at, DISPATCH, results, *given, *plan)
    return recv, recv_weights


def combine(
    at: DeviceCall,
    expert_out: jax.Array,
    weights: jax.Array | None,
    plan: PlanArrays,
    dtype: Any = None,
) -> jax.Array:
    """As in the protocol; the result has `dtype` if given."""
    shape = (plan.dst_rank.shape[0], expert_out.shape[1])
    results = (ShapeDtypeStruct(shape, dtype or expert_out.dtype),)
    return device_call(at, COMBINE, results, expert_out, or_empty(weights, 0), *plan)[0]


def dispatch_bwd(
    at: DeviceCall,
    d_recv: jax.Array,
    d_weights: jax.Array,
    plan: PlanArrays,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As in the protocol; d_tokens has `dtype` if given."""
    results = (
        ShapeDtypeStruct((plan.dst_rank.shape[0], d_recv.shape[1]), dtype or d_recv.dtype),
        ShapeDtypeStruct(plan.dst_rank.shape, jnp.float32),
    )
    d_tokens, d_topk_weights = device_call(at, DISPATCH_BWD, results, d_recv, d_weights, *plan)
    return d_tokens, d_topk_weights


def combine_bwd(
    at: DeviceCall,
    grad: jax.Array,
    expert_out: jax.Array | None,
    weights: jax.Array | None,
    plan: PlanArrays,
) -> tuple[jax.Array, jax.Array | None]:
    call, weighted = at.call, weights is not None
    rows = jnp.zeros((0, 0), grad.dtype) if expert_out is None else expert_out
    results = (
        ShapeDtypeStruct((call.capacity, grad.shape[1]), grad.dtype),
        ShapeDtypeStruct((call.capacity if weighted else 0,), jnp.float32),
    )
    given = (grad, rows, or_empty(weights, 0))
    made = device_call(at, COMBINE_BWD, results, *given, *plan, **clear_slack(call))
    return made[0], made[1] if weighted else None


def carries_copies(call: Call, blocks: jax.Array) -> bool:
    """Whether blocks [L + S or L, ...] of experts can move through the windows."""
    group = call.layer.group_spec
    size = math.prod(blocks.shape[1:]) * blocks.dtype.itemsize
    chunks = device_layout.copied_chunks(group)
    if size == 0 or size % 16 or chunks == 0:
        return False
    each = -(-size // device_layout.COPY_CHUNK_BYTES)
    return group.spare_experts * each <= _MOST_ROUNDS * chunks


def push_copies(at: DeviceCall, experts: jax.Array, blocks: jax.Array) -> jax.Array:
    """Fills the copy slots of blocks [L + S, ...] with experts' blocks (int32 [N, S])."""
    return _copy_experts(at, PUSH_COPIES, experts, blocks)


def return_copies(at: DeviceCall, experts: jax.Array, blocks: jax.Array) -> jax.Array:
    """Adds blocks in slots to those of their experts in blocks [L + S, ...]; slots are undefined
    then. Sums in f32 and in rank order, rounds once for all that a lane holds."""
    return _copy_experts(at, RETURN_COPIES, experts, blocks)


def _copy_experts(at: DeviceCall, target: str, experts: jax.Array, blocks: jax.Array) -> jax.Array:
    result = ShapeDtypeStruct(blocks.shape, blocks.dtype)
    return device_call(at, target, [result], experts, blocks, aliases={3: 0})[0]
