"""The rows of dispatch: tokens that travel as they are, and the gradient of any that did."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.movement import per_device
from ep_runtime_client.ops.movement.per_device import Rows
from ep_runtime_client.ops.tracing import eager, first_order, slack
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.transports.choice import per_device_ops
from ep_runtime_client.ops.transports.protocol import DeviceCall


def move(call: Call, given: Rows) -> tuple[jax.Array, jax.Array]:
    """tokens [..., H], weights [..., K] or None -> recv [R, C, H], recv_weights [R, C]."""
    with scope("dispatch", call.layer):
        call, given = ready(call, given)
        result: tuple[jax.Array, jax.Array] = eager.settled(_primal, call, given, traced=_moved)
        return result


def ready(call: Call, given: Rows) -> tuple[Call, Rows]:
    """The call with the axes that it varies over; arrays of tokens, and weights, where it wants
    them."""
    call = call.varied(given)
    tokens = jax.tree.map(lambda x: per_device.place_tokens(call, x), given.values)
    weights = given.weights
    if weights is not None:
        weights = per_device.place(call, "topk_weights", weights)
    return call, given._replace(values=tokens, weights=weights)


def _primal(call: Call, given: Rows) -> tuple[jax.Array, jax.Array]:
    tokens = (given.values, given.weights)
    rows, weights = per_device.run(
        call, "dispatch", exchange, given.layer_index, tokens, (given.plan,), results=2
    )
    return rows, weights


def exchange(
    at: DeviceCall, rows: jax.Array, weights: jax.Array | None, plan: AnyArrays
) -> tuple[jax.Array, jax.Array]:
    """Sends this device's rows [T, X] and weights [T, K]; returns the received [C, X], [C]."""
    made = per_device_ops(at.call.group, plan).dispatch(at, rows, weights, plan)
    received, recv_weights = (slack.cleared(x, plan.group_sizes) for x in made)
    return received, recv_weights


def _fwd(call: Call, given: Rows) -> Any:
    if jnp.dtype(given.values.dtype).itemsize == 1:
        raise NotImplementedError(
            f"dispatch of 1-byte tokens ({given.values.dtype}) has no gradient: sums of such rows "
            "have no useful precision; dispatch a wider dtype, or stop_gradient the tokens and "
            "weights"
        )
    saved = (given.layer_index, given.plan, given.weights is not None)
    return eager.settled(_primal, call, given), saved


def _bwd(call: Call, saved: Any, grads: tuple[jax.Array, jax.Array]) -> tuple[Rows]:
    return (pulled(call, saved, *grads),)


def pulled(call: Call, saved: Any, d_recv: jax.Array, d_weights: jax.Array) -> Rows:
    """Gradients of what a dispatch moved, [..., H] and [..., K], from d_recv [R, C, H] and
    d_weights [R, C]."""
    layer_index, plan, weighted = saved
    with scope("dispatch_bwd", call.layer):
        given = Rows(layer_index, d_recv, d_weights, plan)
        d_tokens, d_topk = eager.settled(_pullback, call, given)
    nothing: Any = None
    return Rows(nothing, d_tokens, d_topk if weighted else None, nothing)


def _pullback(call: Call, given: Rows) -> tuple[jax.Array, ...]:
    def body(at: DeviceCall, *slabs: Any) -> tuple[jax.Array, jax.Array]:
        return per_device_ops(call.group, given.plan).dispatch_bwd(at, *slabs)

    return per_device.run(
        call, "dispatch_bwd", body, given.layer_index, (), given[1:], results=2, to_tokens=True
    )


_moved = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("dispatch", _moved, _fwd, _bwd)
