"""Per-device ops that the bench times on GPUs: our transports' ops, and the ceiling probe.

All take (token, operands) and return arrays that depend on the token, so that calls in one program
run one after the other and XLA merges none of them (`base/device_bench.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_bench.base.device_bench import DeviceOp
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
    """Returns int32 [1] that is always 0, unknown to compilers: a rank is not negative."""
    return token >> 31


def _index() -> jax.Array:
    """Returns the layer's index in its stack."""
    return jnp.zeros(1, jnp.int32)


def our_ops(call: Call) -> dict[str, DeviceOp]:
    """Returns the ops of the call's transport by name.

    Operands: idx [T, K], x [T, H], weights f32 [T, K], and, with the slab dim in front, plan (nine
    arrays) and rows [C, H].
    """
    ops = per_device_ops(call.group)

    def at(token: jax.Array) -> DeviceCall:
        return DeviceCall(call, token, _index())

    def plan_of(token: jax.Array, operands: Operands) -> AnyArrays:
        plan = arrays_type(call.group)(*(array[0] for array in operands["plan"]))
        if isinstance(plan, NodePlanArrays):  # tie rows and trip count to token
            zero = zero_of(token)
            return plan._replace(dst_rank=plan.dst_rank + zero, chunks=plan.chunks + zero)
        if call.group.transport != "xla":
            # The plan need not be tied to the token: the custom call takes the token itself, as its
            # operand `rank`.
            return plan
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
    """Returns an op that copies at the link's ceiling, with the number of blocks of op `like`.

    `like` is "dispatch" or "combine". Operands of the op: x [T, H], dst_rank and dst_row [T, N].
    It returns the number of blocks, int32 [1].
    """

    def copy(token: jax.Array, operands: Operands) -> Any:
        ensure_registered("cuda")
        target = jax.ffi.ffi_call(f"ep_{like}_ceiling_v1", jax.ShapeDtypeStruct((1,), jnp.int32))
        names = ("x", "dst_rank", "dst_row")
        return target(token, _index(), *(operands[name] for name in names), **attributes(call))

    return copy


def plain_exchange(call: Call) -> DeviceOp:
    """Returns NCCL's all-to-all of equal blocks [N, rows, H], on the group's own communicators."""

    def exchange(token: jax.Array, operands: Operands) -> Any:
        return between_nccl.exchange(call, operands["blocks"], token)

    return exchange
