"""Per-device ops that the bench times on GPUs: those of our transports, and the ceiling probe.

All take (token, operands) and return arrays that depend on the token, so that calls in one program
run one after the other and none is merged with another (`base/device_time.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_bench.base.device_time import DeviceOp
from ep_runtime_bench.base.options import PLAIN
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays, NodePlanArrays, arrays_type
from ep_runtime_client.ops.kernels.ffi import ensure_registered
from ep_runtime_client.ops.transports import between_nccl
from ep_runtime_client.ops.transports.choice import per_device_ops
from ep_runtime_client.ops.transports.protocol import DeviceCall
from ep_runtime_client.ops.transports.windows import attributes

Operands = Mapping[str, Any]

# Operands of each op, by name.
NEEDS: dict[str, tuple[str, ...]] = {
    "prepare": ("idx",),
    "dispatch": ("x", "weights", "plan"),
    "combine": ("rows", "plan"),
    "pair": ("x", "weights", "plan"),
    "ceiling": ("x", "dst_rank", "dst_row"),
    PLAIN: ("blocks",),
    "clock": (),
}


def zero_of(token: jax.Array) -> jax.Array:
    """int32 [1] that is 0, which no compiler can know: a rank is not negative."""
    return token >> 31


def _index() -> jax.Array:
    """The layer's place in its stack."""
    return jnp.zeros(1, jnp.int32)


def our_ops(call: Call) -> dict[str, DeviceOp]:
    """The ops of the call's transport by name.

    Operands: idx [T, K], x [T, H], weights f32 [T, K], plan (nine arrays) and rows [C, H], of
    which the last two have the slab dim in front.
    """
    ops = per_device_ops(call.group)

    def at(token: jax.Array) -> DeviceCall:
        return DeviceCall(call, token, _index())

    def plan_of(token: jax.Array, operands: Operands) -> AnyArrays:
        plan = arrays_type(call.group)(*(array[0] for array in operands["plan"]))
        if isinstance(plan, NodePlanArrays):  # which rows cross, and how often the loop runs
            zero = zero_of(token)
            return plan._replace(dst_rank=plan.dst_rank + zero, chunks=plan.chunks + zero)
        if call.group.transport != "xla":
            return plan  # the token, as the rank, is an operand of the custom call
        return plan._replace(num_recv=plan.num_recv + zero_of(token))

    def prepare(token: jax.Array, operands: Operands) -> Any:
        idx = operands["idx"]
        if call.group.transport in ("xla", "nccl"):
            idx = idx + zero_of(token)
        return ops.prepare(at(token), idx)[0]

    def dispatch(token: jax.Array, operands: Operands) -> Any:
        x, weights = operands["x"], operands["weights"]
        return ops.dispatch(at(token), x, weights, plan_of(token, operands))

    def combine(token: jax.Array, operands: Operands) -> Any:
        plan = plan_of(token, operands)
        return ops.combine(at(token), operands["rows"][0], None, plan)

    def pair(token: jax.Array, operands: Operands) -> Any:
        rows, _ = dispatch(token, operands)
        return ops.combine(at(token), rows, None, plan_of(token, operands))

    return {"prepare": prepare, "dispatch": dispatch, "combine": combine, "pair": pair}


def ceiling(call: Call, like: str) -> DeviceOp:
    """The link's ceiling on as many blocks as `like` ("dispatch" or "combine") has.

    Operands: x [T, H], dst_rank and dst_row [T, N]. Returns the number of blocks, int32 [1].
    """

    def copy(token: jax.Array, operands: Operands) -> Any:
        ensure_registered("cuda")
        target = jax.ffi.ffi_call(f"ep_{like}_ceiling_v1", jax.ShapeDtypeStruct((1,), jnp.int32))
        names = ("x", "dst_rank", "dst_row")
        return target(token, _index(), *(operands[name] for name in names), **attributes(call))

    return copy


def plain_exchange(call: Call) -> DeviceOp:
    """NCCL's all-to-all of equal blocks [N, rows, H], on the group's own communicators."""

    def exchange(token: jax.Array, operands: Operands) -> Any:
        return between_nccl.exchange(call, operands["blocks"], token)

    return exchange
