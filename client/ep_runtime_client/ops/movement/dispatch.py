"""dispatch: every token's row to the ranks of its experts; its gradient is a combine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import DTYPE_BYTES
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.calls.call import Call, check_handle, world_rank
from ep_runtime_client.ops.calls.plan import AnyArrays, Dispatched, Plan, check_plan
from ep_runtime_client.ops.movement import per_device, token_watch
from ep_runtime_client.ops.movement.prepare import check_idx, known_specs, make_call, make_plan
from ep_runtime_client.ops.tracing import eager, first_order, slack
from ep_runtime_client.ops.tracing.ambient import manual_axes, open_layer
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.transports.choice import per_device_ops


def dispatch(
    layer: EpLayer | TracedLayer,
    tokens: jax.Array,
    topk_idx: jax.Array | None,
    topk_weights: jax.Array | None = None,
    *,
    handle: int = 0,
    capacity: int | None = None,
    plan: Plan | None = None,
    tokens_spec: PartitionSpec | None = None,
) -> Dispatched:
    """Moves every token to the ranks that hold its experts, and lines the rows up per expert.

    Args:
        layer: a registered layer, or `stack[i]`.
        tokens: [T, H] or [B, S, H], a float dtype no wider than the group's max_token_dtype, or
            a 1-byte dtype (no gradient). (*outer_axes, ep_axis) shard dim 0, or lie on dims 0
            and 1 of 3-D tokens in any way; other layouts are resharded.
        topk_idx: [T, K] or [B, S, K] int32; see `prepare`. May be None with `plan`.
        topk_weights: [T, K] or [B, S, K] f32. None stands for ones.
        handle: which of the layer's handles the call uses; with `plan`, the plan's.
        capacity: C, rows per slab in this call; with `plan`, the plan's.
        plan: what `prepare` returned for this layer; topk_idx is then not read.
        tokens_spec: how the leading dims lie on the mesh, where a traced 3-D array cannot tell.

    Returns:
        Dispatched with tokens [R, C, H] (zero in padding rows, undefined past the last zone),
        weights [R, C] f32 (0 in padding), group_sizes [R, L], num_recv [R] and the plan.
        Differentiable in tokens and topk_weights; a dropped slot gets exactly zero.

    Raises:
        InvalidArgumentError: shapes, dtypes, capacity, handle or plan do not fit the layer.
        CapacityOverflowError: out of the compiled program, in a group with on_overflow="error".
        StaleHandleError: the layer's group is closed.
        NotImplementedError: the gradient of 1-byte tokens, a second derivative, or under any vmap
            but one with spmd_axis_name over a mesh axis outside the group, as large as that axis.

    Inside a shard_map of the user R counts only the axes that are not manual, and so do the leading
    dims of every array.

    Cost: each token once per distinct rank that keeps a row of it; no host sync.

    Source: the first of GShard's two exchanges (arXiv:2006.16668), without its padding; a token
    travels once per rank, not once per expert, as in DeepEP (github.com/deepseek-ai/DeepEP).

    Examples:
        >>> batch = NamedSharding(mesh, P(("fsdp", "ep")))
        >>> tokens = jax.device_put(jnp.ones((64, 32)), batch)
        >>> logits = jax.device_put(jax.random.normal(jax.random.key(0), (64, 8)), batch)
        >>> routing = ep.route(logits, 2)
        >>> dispatched = ep.dispatch(layer, tokens, routing.topk_idx, routing.topk_weights)
        >>> dispatched.tokens.shape, dispatched.group_sizes.shape
        ((8, 64, 32), (8, 2))
    """
    static, index, mesh = open_layer(layer)
    if plan is None:
        if topk_idx is None:
            raise InvalidArgumentError("dispatch needs topk_idx or plan", argument="topk_idx")
        how: Any = {"handle": handle, "capacity": capacity, "tokens_spec": tokens_spec}
        call, _, weights = open_call(layer, tokens, topk_idx, topk_weights, **how)
        plan = make_plan(call, index, topk_idx)
    else:
        _check_tokens(static, tokens)
        call = call_of_plan(static, mesh, plan)
        _check_reuse(call, handle, capacity)
        if tokens.shape[:-1] != call.lead:
            raise InvalidArgumentError(
                f"the plan was made for tokens with the leading dims {call.lead}, "
                f"got {tokens.shape[:-1]}",
                argument="tokens",
            )
        weights = _as_weights(call, topk_weights)
    return _dispatch_rows(call, index, tokens, weights, plan)


def open_call(
    layer: EpLayer | TracedLayer,
    tokens: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    handle: int,
    capacity: int | None,
    tokens_spec: PartitionSpec | None,
) -> tuple[Call, jax.Array, jax.Array | None]:
    """(the call, the layer's index, weights in f32) of a dispatch without a plan; it is checked."""
    static, index, mesh = open_layer(layer)
    _check_tokens(static, tokens)
    check_idx(static, topk_idx)
    _check_lead("topk_idx", topk_idx, tokens.shape[:-1])
    hints = known_specs(tokens_spec, tokens, topk_idx, topk_weights)
    call = make_call(static, mesh, tokens.shape[:-1], hints, handle=handle, capacity=capacity)
    return call, index, _as_weights(call, topk_weights)


def call_of_plan(layer: EpLayer, mesh: jax.sharding.Mesh, plan: Plan) -> Call:
    """The call that a plan stands for in the region where it is used."""
    return Call(check_plan(plan, layer), mesh, manual_axes(layer.group_spec))


def _check_tokens(layer: EpLayer, tokens: jax.Array) -> None:
    group = layer.group_spec
    shape, dtype = jnp.shape(tokens), jnp.result_type(tokens)
    if len(shape) not in (2, 3) or shape[-1] != group.hidden_size:
        raise InvalidArgumentError(
            f"tokens must be [T, {group.hidden_size}] or [B, S, {group.hidden_size}] "
            f"(hidden_size of group {group.name!r}), got {list(shape)}",
            argument="tokens",
        )
    check_width("tokens", layer, dtype, one_byte=True)


def check_width(name: str, layer: EpLayer, dtype: Any, *, one_byte: bool) -> None:
    """Raises InvalidArgumentError unless rows of `dtype` fit the group's lanes."""
    group = layer.group_spec
    is_float = jnp.issubdtype(dtype, jnp.floating)
    small = jnp.dtype(dtype).itemsize == 1
    if not (is_float and not small) and not (one_byte and small):
        kinds = "a float dtype or a 1-byte one" if one_byte else "a float dtype of 2 bytes or more"
        raise InvalidArgumentError(f"{name} must have {kinds}, got {dtype}", argument=name)
    most = DTYPE_BYTES[group.max_token_dtype]
    if jnp.dtype(dtype).itemsize > most:
        raise InvalidArgumentError(
            f"{name} of {dtype} ({jnp.dtype(dtype).itemsize} bytes) is wider than "
            f"max_token_dtype={group.max_token_dtype} ({most} bytes) of group {group.name!r}",
            argument=name,
        )


def _check_lead(name: str, array: jax.Array, lead: tuple[int, ...]) -> None:
    if jnp.shape(array)[:-1] != lead:
        raise InvalidArgumentError(
            f"{name} must have the leading dims of tokens {lead}, got {jnp.shape(array)[:-1]}",
            argument=name,
        )


def _check_reuse(call: Call, handle: int, capacity: int | None) -> None:
    check_handle(call.layer, handle)
    if handle not in (0, call.meta.handle):
        raise InvalidArgumentError(
            f"handle={handle} was given with a plan that uses handle {call.meta.handle}",
            argument="handle",
        )
    if capacity is not None and capacity != call.capacity:
        raise InvalidArgumentError(
            f"capacity={capacity} was given with a plan made for {call.capacity}",
            argument="capacity",
        )


def _as_weights(call: Call, weights: jax.Array | None) -> jax.Array | None:
    if weights is None:
        return None
    _check_lead("topk_weights", weights, call.lead)
    if jnp.shape(weights)[-1] != call.layer.top_k:
        raise InvalidArgumentError(
            f"topk_weights must end in top_k={call.layer.top_k}, got {list(jnp.shape(weights))}",
            argument="topk_weights",
        )
    if not jnp.issubdtype(jnp.result_type(weights), jnp.floating):
        raise InvalidArgumentError(
            f"topk_weights must be f32, got {jnp.result_type(weights)}", argument="topk_weights"
        )
    return weights if weights.dtype == jnp.float32 else weights.astype(jnp.float32)


def _dispatch_rows(
    call: Call, index: jax.Array, tokens: jax.Array, weights: jax.Array | None, plan: Plan
) -> Dispatched:
    spec = call.layout.spec()
    if call.layout.tokens_per_rank == 0:
        shape = (call.num_slabs, call.capacity)
        rows = jnp.zeros((*shape, tokens.shape[-1]), tokens.dtype)
        recv_weights = jnp.zeros(shape, jnp.float32)
    else:
        with scope("dispatch", call.layer):
            call = per_device.varied(call, index, tokens, weights, plan.arrays)
            tokens = token_watch.watched(call, per_device.place(call, "tokens", tokens, spec))
            tokens = per_device.vary(call, tokens)
            if weights is not None:
                weights = per_device.vary(
                    call, per_device.place(call, "topk_weights", weights, spec)
                )
            operands = (index, tokens, weights, plan.arrays)
            rows, recv_weights = eager.run(_dispatch_primal, call, *operands, traced=_dispatch)
    return Dispatched(
        tokens=checkpoint_name(rows, "ep_recv"),
        weights=checkpoint_name(recv_weights, "ep_recv"),
        group_sizes=plan.arrays.group_sizes,
        num_recv=plan.arrays.num_recv.reshape(-1),
        plan=plan,
    )


def _dispatch_primal(
    call: Call,
    index: jax.Array,
    tokens: jax.Array,
    weights: jax.Array | None,
    arrays: AnyArrays,
) -> tuple[jax.Array, jax.Array]:
    """tokens [..., H], weights [..., K] or None -> recv [R, C, H], recv_weights [R, C]."""
    spec, slab = call.layout.spec(), per_device.slab_spec(call)
    given = (tokens,) if weights is None else (tokens, weights)

    def body(index: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        local = [x.reshape(-1, x.shape[-1]) for x in operands[: len(given)]]
        plan = type(arrays)(*(x[0] for x in operands[len(given) :]))
        rows, recv_weights = per_device_ops(call).dispatch(
            call,
            world_rank(call.group),
            index,
            local[0],
            local[1] if len(local) > 1 else None,
            plan,
        )
        rows, recv_weights = (slack.cleared(x, plan.group_sizes) for x in (rows, recv_weights))
        return rows[None], recv_weights[None]

    specs = (PartitionSpec(), *([spec] * len(given)), *([slab] * len(arrays)))
    result: tuple[jax.Array, jax.Array] = per_device.run(
        call, "dispatch", body, (index, *given, *arrays), specs, (slab, slab)
    )
    return result


def _dispatch_fwd(
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
    rows, recv_weights = eager.run(_dispatch_primal, call, index, tokens, weights, arrays)
    return (rows, recv_weights), (index, arrays, weights is not None)


def _dispatch_bwd(call: Call, saved: Any, grads: tuple[jax.Array, jax.Array]) -> Any:
    index, arrays, weighted = saved
    with scope("dispatch_bwd", call.layer):
        d_tokens, d_weights = eager.run(_dispatch_pullback, call, index, *grads, arrays)
    return None, d_tokens, d_weights if weighted else None, None


def _dispatch_pullback(
    call: Call, index: jax.Array, d_recv: jax.Array, d_weights: jax.Array, arrays: AnyArrays
) -> tuple[jax.Array, jax.Array]:
    """d_recv [R, C, H], d_weights [R, C] -> d_tokens [..., H], d_topk_weights [..., K]."""
    spec, slab = call.layout.spec(), per_device.slab_spec(call)
    block = call.layout.local

    def body(index: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        d_rows, d_row_weights, *plan = (x[0] for x in operands)
        d_tokens, d_topk = per_device_ops(call).dispatch_bwd(
            call, world_rank(call.group), index, d_rows, d_row_weights, type(arrays)(*plan)
        )
        return d_tokens.reshape(*block, -1), d_topk.reshape(*block, -1)

    operands = (index, d_recv, d_weights, *arrays)
    specs = (PartitionSpec(), *([slab] * (len(operands) - 1)))
    result: tuple[jax.Array, jax.Array] = per_device.run(
        call, "dispatch_bwd", body, operands, specs, (spec, spec)
    )
    return result


_dispatch = jax.custom_vjp(_dispatch_primal, nondiff_argnums=(0,))
first_order.defvjp("dispatch", _dispatch, _dispatch_fwd, _dispatch_bwd)
