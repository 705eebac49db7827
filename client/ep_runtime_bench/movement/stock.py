"""Dispatch and combine in stock JAX, as a user without this package writes them, on GPUs.

Sort by expert and `jax.lax.ragged_all_to_all`: one row per slot, rows in the order of arrival, no
places per expert. XLA on CPU has no ragged_all_to_all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ep_runtime_bench.base import routing
from ep_runtime_bench.base.device_bench import AXIS, Bench, Operands, token_rows
from ep_runtime_bench.base.device_time import DeviceOp, chain
from ep_runtime_bench.base.options import STOCK, DeviceSample
from ep_runtime_bench.movement.device_ops import zero_of

CALLS = 2
REPEATS = 3
_ALIGNMENT = 128


def planner(num_experts: int) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """A function of idx [T, K] -> what dispatch and combine need to know of it.

    Needs manual axes. order [T * K] sorts the slots by expert; the others [N] are rows to and from
    each rank, and where they start here and there.
    """

    def plan(idx: jax.Array) -> dict[str, jax.Array]:
        ranks = lax.axis_size(AXIS)
        flat = idx.reshape(-1)
        sent = jnp.bincount(flat, length=num_experts).reshape(ranks, -1).sum(1).astype(jnp.int32)
        every = lax.all_gather(sent, AXIS)  # [source, rank]
        me = lax.axis_index(AXIS)
        received = every[:, me]
        return {
            "order": jnp.argsort(flat, stable=True).astype(jnp.int32),
            "sent": sent,
            "sent_from": jnp.cumsum(sent) - sent,
            "sent_to": (jnp.cumsum(every, axis=0) - every)[me],
            "received": received,
            "received_from": jnp.cumsum(received) - received,
            "received_to": (jnp.cumsum(every, axis=1) - every)[:, me],
        }

    return plan


def make_ops(capacity: int) -> dict[str, DeviceOp]:
    """dispatch and combine. Operands: x [T, H], plan (of `planner`), rows [capacity, H]."""

    def parts(token: jax.Array, operands: Operands) -> dict[str, jax.Array]:
        plan: dict[str, jax.Array] = operands["plan"]
        return {name: array + zero_of(token) for name, array in plan.items()}

    def dispatch(token: jax.Array, operands: Operands) -> Any:
        p, x = parts(token, operands), operands["x"]
        rows = x[p["order"] // (p["order"].shape[0] // x.shape[0])]
        blank = jnp.zeros((capacity, x.shape[1]), x.dtype)
        names = ("sent_from", "sent", "sent_to", "received")
        return lax.ragged_all_to_all(rows, blank, *(p[name] for name in names), axis_name=AXIS)

    def combine(token: jax.Array, operands: Operands) -> Any:
        p, y = parts(token, operands), operands["rows"]
        slots, tokens = p["order"].shape[0], operands["x"].shape[0]
        blank = jnp.zeros((slots, y.shape[1]), y.dtype)
        names = ("received_from", "received", "received_to", "sent")
        back = lax.ragged_all_to_all(y, blank, *(p[name] for name in names), axis_name=AXIS)
        row = jnp.zeros(slots, jnp.int32).at[p["order"]].set(jnp.arange(slots, dtype=jnp.int32))
        return back[row].reshape(tokens, -1, y.shape[1]).astype(jnp.float32).sum(1).astype(y.dtype)

    return {"dispatch": dispatch, "combine": combine}


def capacity_of(idx: routing.Ints, ranks: int, num_experts: int) -> int:
    """Rows that the fullest rank gets, rounded up."""
    to = np.bincount(idx.reshape(-1) // (num_experts // ranks), minlength=ranks)
    return -(-int(to.max()) // _ALIGNMENT) * _ALIGNMENT


def measure(bench: Bench) -> None:
    """Every size and routing."""
    for tokens in bench.options.tokens:
        x = token_rows(bench, tokens)
        for name in bench.options.routing:
            _measure_case(bench, tokens, name, x)


def _measure_case(bench: Bench, tokens: int, name: str, x: jax.Array) -> None:
    options = bench.options
    idx = bench.idx(tokens, name)
    ops = make_ops(capacity_of(idx, bench.mesh.size, options.num_experts))
    plan = jax.jit(bench.mapped(planner(options.num_experts)))(bench.put(idx))
    operands: dict[str, Any] = {"x": x, "plan": plan}
    operands["rows"] = jax.jit(bench.mapped(_once(ops["dispatch"])))(operands)
    for op, function in ops.items():
        if op not in options.benches:
            continue
        repeats = min(REPEATS, options.repeats)
        chained = jax.jit(bench.mapped(chain(bench.clock, _rank, _gate, function, CALLS)))
        kernel_us = bench.device_us(chained, operands, repeats)
        once = jax.jit(bench.mapped(_once(function)))
        step_s = bench.host_s(once, operands, repeats)
        bench.add(DeviceSample(op, STOCK, tokens, name, "", 0, 0, kernel_us, step_s))


def _once(op: DeviceOp) -> Callable[[Operands], Any]:
    return lambda operands: op(_rank(), operands)


def _rank() -> jax.Array:
    """This device's rank, int32 [1]. Needs manual axes."""
    return lax.axis_index(AXIS).astype(jnp.int32).reshape(1)


def _gate(token: jax.Array, operands: Any) -> jax.Array:
    """Returns on all ranks at once."""
    del operands
    total: jax.Array = lax.psum(token, AXIS)
    return total
