"""combine: sends every token's expert rows back to its rank and sums; its gradient is a
dispatch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import Dispatched
from ep_runtime_client.ops.movement import per_device
from ep_runtime_client.ops.movement.prepare import call_of_plan, check_width
from ep_runtime_client.ops.tracing import eager, first_order
from ep_runtime_client.ops.tracing.ambient import open_layer
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.transports.choice import per_device_ops
from ep_runtime_client.ops.transports.protocol import DeviceCall


def combine(
    layer: EpLayer | TracedLayer,
    dispatched: Dispatched,
    expert_out: jax.Array,
    *,
    weights: jax.Array | None = None,
) -> jax.Array:
    """Sums the experts' output rows of each token and returns one row per token, in token order.

    Args:
        layer: the layer of the dispatch.
        dispatched: the result of `dispatch`; only its plan is read.
        expert_out: [R, C, H], a float dtype no wider than the group's max_token_dtype. Rows
            that no slot fills are never read.
        weights: [R, C] f32, multiplied into the rows in fp32 before they are summed, usually
            `dispatched.weights`. None sums the rows as they are.

    Returns:
        An array with the shape and sharding of the tokens and the dtype of expert_out. Each token's
        rows that were not dropped are summed in fp32 (fp64 for float64): per rank in slot order,
        then over the ranks in order. combine_precision of the group says if the sum of one rank is
        rounded in between. Differentiable in expert_out and weights.

    Raises:
        InvalidArgumentError: shapes or dtypes do not fit, or the plan is another layer's.
        StaleHandleError: the layer's group is closed.
        NotImplementedError: under a vmap, as in `dispatch`, or a second derivative.

    Cost: one row per token and distinct rank. A host sync only in eager calls, and between nodes
    over NCCL to count rows.

    Source: the second of GShard's two exchanges (arXiv:2006.16668); sums on the experts' rank
    before rows travel are as in DeepEP (github.com/deepseek-ai/DeepEP).

    Examples:
        >>> y = ep.combine(layer, dispatched, dispatched.tokens, weights=dispatched.weights)
        >>> bool(jnp.allclose(y, tokens))  # experts that do nothing, weights that add up to 1
        True
    """
    static, index, mesh = open_layer(layer)
    if not isinstance(dispatched, Dispatched):
        raise InvalidArgumentError(
            f"dispatched must be a result of ep.dispatch, got {type(dispatched).__name__}",
            argument="dispatched",
        )
    call = call_of_plan(static, mesh, dispatched.plan, index, expert_out, weights)
    _check_rows(call, expert_out, weights)
    if call.layout.tokens_per_rank == 0:
        return jnp.zeros((*call.layout.lead, expert_out.shape[-1]), expert_out.dtype)
    slab = PartitionSpec(call.group.token_axes)
    with scope("combine", call.layer):
        expert_out = per_device.place(call, "expert_out", expert_out, slab)
        if weights is not None:
            weights = per_device.place(call, "weights", weights, slab).astype(jnp.float32)
        given = per_device.Rows(index, expert_out, weights, dispatched.plan.arrays)
        tokens_out: jax.Array = eager.settled(_primal, call, given, traced=_combine)
    return tokens_out


def _check_rows(call: Call, expert_out: jax.Array, weights: jax.Array | None) -> None:
    wanted = (call.num_slabs, call.capacity, call.group.hidden_size)
    if jnp.shape(expert_out) != wanted:
        raise InvalidArgumentError(
            f"expert_out must be [R, C, H] = {list(wanted)}, got {list(jnp.shape(expert_out))}",
            argument="expert_out",
        )
    check_width("expert_out", call.layer, jnp.result_type(expert_out), one_byte=False)
    if weights is None:
        return
    dtype = jnp.result_type(weights)
    if jnp.shape(weights) != wanted[:2] or not jnp.issubdtype(dtype, jnp.floating):
        raise InvalidArgumentError(
            f"weights must be f32 [R, C] = {list(wanted[:2])}, "
            f"got {dtype} {list(jnp.shape(weights))}",
            argument="weights",
        )


def _primal(call: Call, given: per_device.Rows) -> jax.Array:
    def body(at: DeviceCall, *slabs: Any) -> jax.Array:
        return per_device_ops(call.group, given.plan).combine(at, *slabs)

    (result,) = per_device.run(
        call, "combine", body, given.layer_index, (), given[1:], results=1, to_tokens=True
    )
    return result


def _fwd(call: Call, given: per_device.Rows) -> Any:
    # Without weights the gradient is a plain copy of rows and needs no expert_out.
    saved = given if given.weights is not None else given._replace(values=None)
    return eager.settled(_primal, call, given), saved


def _bwd(call: Call, saved: per_device.Rows, grad: jax.Array) -> tuple[per_device.Rows]:
    with scope("combine_bwd", call.layer):
        d_expert_out, *d_weights = eager.settled(_pullback, call, saved, grad)
    nothing: Any = None
    return (per_device.Rows(nothing, d_expert_out, d_weights[0] if d_weights else None, nothing),)


def _pullback(call: Call, given: per_device.Rows, grad: jax.Array) -> tuple[jax.Array, ...]:
    """Pulls grad [..., H] back to expert_out [R, C, H], and to weights [R, C] if there are any."""

    def body(at: DeviceCall, *operands: Any) -> tuple[jax.Array, jax.Array | None]:
        return per_device_ops(call.group, given.plan).combine_bwd(at, *operands)

    results = 1 if given.weights is None else 2
    return per_device.run(
        call, "combine_bwd", body, given.layer_index, (grad,), given[1:], results=results
    )


_combine = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("combine", _combine, _fwd, _bwd)
