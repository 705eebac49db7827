"""The rows of dispatch: tokens that travel as they are, and the gradient of any that did."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.calls.call import Call, world_rank
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.movement import per_device, token_watch
from ep_runtime_client.ops.tracing import eager, first_order, slack
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.transports.choice import per_device_ops


def move(
    call: Call,
    index: jax.Array,
    tokens: jax.Array,
    weights: jax.Array | None,
    arrays: AnyArrays,
) -> tuple[jax.Array, jax.Array]:
    """tokens [..., H], weights [..., K] or None -> recv [R, C, H], recv_weights [R, C]."""
    with scope("dispatch", call.layer):
        call, tokens, weights = ready(call, index, tokens, weights, arrays)
        operands = (index, tokens, weights, arrays)
        result: tuple[jax.Array, jax.Array] = eager.settled(_primal, call, *operands, traced=_moved)
        return result


def ready(
    call: Call, index: jax.Array, tokens: Any, weights: jax.Array | None, arrays: AnyArrays
) -> tuple[Call, Any, jax.Array | None]:
    """The call with the axes that it varies over; arrays of tokens, and weights, where it wants
    them."""
    spec = call.layout.spec()
    call = call.varied(index, tokens, weights, arrays)

    def placed(x: jax.Array) -> jax.Array:
        return token_watch.watched(call, per_device.place(call, "tokens", x, spec))

    tokens = jax.tree.map(placed, tokens)
    if weights is not None:
        weights = per_device.place(call, "topk_weights", weights, spec)
    return call, tokens, weights


def _primal(
    call: Call,
    index: jax.Array,
    tokens: jax.Array,
    weights: jax.Array | None,
    arrays: AnyArrays,
) -> tuple[jax.Array, jax.Array]:
    """tokens [..., H], weights [..., K] or None -> recv [R, C, H], recv_weights [R, C]."""
    given = (tokens,) if weights is None else (tokens, weights)

    def body(index: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        local = [x.reshape(-1, x.shape[-1]) for x in operands[: len(given)]]
        plan = type(arrays)(*(x[0] for x in operands[len(given) :]))
        made = exchange(call, index, local[0], local[1] if len(local) > 1 else None, plan)
        return made[0][None], made[1][None]

    lies = (((),), *[call.layout.entries()] * len(given), *per_device.slabs(call, *arrays))
    made = [(call.group.token_axes,)] * 2
    rows, recv_weights = per_device.run(
        call, "dispatch", body, (index, *given, *arrays), lies, made
    )
    return rows, recv_weights


def exchange(
    call: Call, index: jax.Array, rows: jax.Array, weights: jax.Array | None, plan: AnyArrays
) -> tuple[jax.Array, jax.Array]:
    """Of this device: rows [T, H], weights [T, K] -> what it receives, [C, H] and [C]."""
    rank = world_rank(call.group)
    made = per_device_ops(call).dispatch(call, rank, index, rows, weights, plan)
    received, recv_weights = (slack.cleared(x, plan.group_sizes) for x in made)
    return received, recv_weights


def _fwd(
    call: Call,
    index: jax.Array,
    tokens: jax.Array,
    weights: jax.Array | None,
    arrays: AnyArrays,
) -> Any:
    if jnp.dtype(tokens.dtype).itemsize == 1:
        raise NotImplementedError(
            f"dispatch of 1-byte tokens ({tokens.dtype}) has no gradient: sums of such rows have "
            "no useful precision; dispatch a wider dtype, or stop_gradient the tokens and weights"
        )
    rows, recv_weights = eager.settled(_primal, call, index, tokens, weights, arrays)
    return (rows, recv_weights), (index, arrays, weights is not None)


def _bwd(call: Call, saved: Any, grads: tuple[jax.Array, jax.Array]) -> Any:
    index, arrays, weighted = saved
    with scope("dispatch_bwd", call.layer):
        d_tokens, d_weights = eager.settled(pullback, call, index, *grads, arrays)
    return None, d_tokens, d_weights if weighted else None, None


def pullback(
    call: Call, index: jax.Array, d_recv: jax.Array, d_weights: jax.Array, arrays: AnyArrays
) -> tuple[jax.Array, jax.Array]:
    """d_recv [R, C, H], d_weights [R, C] -> d_tokens [..., H], d_topk_weights [..., K]."""
    block = call.layout.local

    def body(index: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        d_rows, d_row_weights, *plan = (x[0] for x in operands)
        d_tokens, d_topk = per_device_ops(call).dispatch_bwd(
            call, world_rank(call.group), index, d_rows, d_row_weights, type(arrays)(*plan)
        )
        return d_tokens.reshape(*block, -1), d_topk.reshape(*block, -1)

    slabs = (d_recv, d_weights, *arrays)
    given, made = (((),), *per_device.slabs(call, *slabs)), [call.layout.entries()] * 2
    d_tokens, d_topk = per_device.run(call, "dispatch_bwd", body, (index, *slabs), given, made)
    return d_tokens, d_topk


_moved = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("dispatch", _moved, _fwd, _bwd)
