"""dispatch: sends every token's row to the ranks of its experts; its gradient is a combine.

If a recipe scales each row on its own, tokens can be quantized before they are sent. The received
rows have the same bits as rows quantized on arrival. Data and scales are bytes of one exchange
(`quantize/row_bytes.py`), so every transport can carry them. Gradients are those of dispatch
without quantization, as in `grouped_gemm(recipe=)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.calls.call import Call, check_handle
from ep_runtime_client.ops.calls.plan import AnyArrays, Dispatched, Plan
from ep_runtime_client.ops.movement import per_device, quantized_rows
from ep_runtime_client.ops.movement.per_device import Rows
from ep_runtime_client.ops.movement.prepare import (
    as_weights,
    call_of_plan,
    check_tokens,
    make_plan,
    open_call,
)
from ep_runtime_client.ops.movement.quantized_rows import quantized
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import (
    bits,
    from_bits,
    num_tiles,
    spread_tiles,
    widen,
)
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.quantize.row_bytes import from_bytes, to_bytes
from ep_runtime_client.ops.tracing import again, eager, first_order, slack
from ep_runtime_client.ops.tracing.ambient import open_layer
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.transports.choice import per_device_ops
from ep_runtime_client.ops.transports.protocol import DeviceCall


def dispatch(
    layer: EpLayer | TracedLayer,
    tokens: jax.Array | QuantizedTensor,
    topk_idx: jax.Array | None,
    topk_weights: jax.Array | None = None,
    *,
    handle: int = 0,
    capacity: int | None = None,
    plan: Plan | None = None,
    tokens_spec: PartitionSpec | None = None,
    recipe: Recipe | None = None,
) -> Dispatched:
    """Sends every token to the ranks that hold its experts; each rank's rows are sorted by expert.

    Args:
        layer: a registered layer, or `stack[i]`.
        tokens: [T, H] or [B, S, H], a float dtype no wider than the group's max_token_dtype, or a
            1-byte dtype (no gradient), or a QuantizedTensor of rows by BlockScaling. The axes
            (*outer_axes, ep_axis) shard dim 0, or dims 0 and 1 of 3-D tokens in any way. Other
            shardings are resharded.
        topk_idx: [T, K] or [B, S, K] int32; see `prepare`. Not read with `plan`.
        topk_weights: f32 of the same shape; None means ones.
        handle: which of the layer's handles the call uses; with `plan`, the plan's.
        capacity: C, rows per slab in this call; with `plan`, the plan's.
        plan: the result of `prepare` for this layer.
        tokens_spec: sharding of the leading dims, if a traced 3-D array does not carry it.
        recipe: BlockScaling sends rows in 8 bits; see docs/matmuls.md.

    Returns:
        Dispatched with tokens [R, C, H] (zero in padding rows, undefined past the last zone),
        weights [R, C] f32 (0 in padding), group_sizes [R, L], num_recv [R] and the plan.
        Differentiable in tokens and topk_weights; a dropped slot gets exactly zero. Inside a
        shard_map, R and leading dims count only axes that are not manual.

    Raises:
        InvalidArgumentError: an argument does not fit the layer.
        CapacityOverflowError: with on_overflow="error", by an eager call. A compiled program fails
            with this text in XLA's error.
        StaleHandleError: the layer's group is closed.
        NotImplementedError: a gradient of 1-byte tokens, a second derivative, or a vmap except as
            in docs/loops.md.

    Cost: each token once per distinct rank that keeps a row of it; without `plan` also `prepare`. A
    host sync only in eager calls, and between nodes over NCCL.

    Source: GShard's first exchange (arXiv:2006.16668); once per rank, as in DeepEP
    (github.com/deepseek-ai/DeepEP).

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
    values, recipe = _values_of(static, tokens, recipe)
    if plan is None:
        if topk_idx is None:
            raise InvalidArgumentError("dispatch needs topk_idx or plan", argument="topk_idx")
        how: Any = {"handle": handle, "capacity": capacity, "tokens_spec": tokens_spec}
        opened = (static, index, mesh)
        call, weights = open_call(opened, values, topk_idx, topk_weights, **how)
        plan, _ = make_plan(call, index, topk_idx)
    else:
        check_tokens(static, values)
        call = call_of_plan(static, mesh, plan, index, tokens, topk_weights)
        _check_reuse(call, handle, capacity)
        if tokens.shape[:-1] != call.layout.lead:
            raise InvalidArgumentError(
                f"the plan was made for tokens with the leading dims {call.layout.lead}, "
                f"got {tokens.shape[:-1]}",
                argument="tokens",
            )
        weights = as_weights(call, topk_weights)
    index = again.told(index, plan.arrays.kept)
    rows, recv_weights = send(Sending(call, recipe), Rows(index, tokens, weights, plan.arrays))
    return Dispatched(
        tokens=rows,
        weights=recv_weights,
        group_sizes=plan.arrays.group_sizes,
        num_recv=plan.arrays.num_recv.reshape(-1),
        plan=plan,
    )


def _values_of(
    layer: EpLayer, tokens: jax.Array | QuantizedTensor, recipe: Recipe | None
) -> tuple[jax.Array, Recipe | None]:
    """Checks tokens; returns the array with their shape, and the recipe that quantizes rows."""
    if isinstance(tokens, QuantizedTensor):
        if recipe not in (None, tokens.recipe):
            raise InvalidArgumentError(
                f"recipe {recipe} was given with tokens quantized by {tokens.recipe}",
                argument="recipe",
            )
        recipe = tokens.recipe
    if recipe is not None:
        quantized_rows.check(layer.group_spec, recipe, tokens)
    return (tokens.data if isinstance(tokens, QuantizedTensor) else tokens), recipe


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


class Sending(NamedTuple):
    """The static argument of one call. Hashable.

    Attributes:
        call: the static side of the call.
        recipe: how rows are quantized; None sends them as they are.
    """

    call: Call
    recipe: Recipe | None


class Sent(NamedTuple):
    """Rows of one call, before or after the exchange.

    Attributes:
        values: rows that receive gradients. Without a recipe these rows are sent.
        data, scale: quantized rows as uint8 with their f32 scales; None if rows are not quantized,
            or not yet.
    """

    values: Any
    data: Any = None
    scale: Any = None


def send(sending: Sending, given: Rows) -> tuple[Any, jax.Array]:
    """Returns rows [R, C, H] (a QuantizedTensor if there is a recipe) and recv_weights [R, C]."""
    call, recipe = sending
    sent = _taken_apart(given.values)
    if call.layout.tokens_per_rank == 0:
        made, weights = _nothing(sending, sent)
    else:
        with scope("dispatch", call.layer):
            call, given = _ready(call, given._replace(values=sent))
            sending = sending._replace(call=call)
            made, weights = eager.settled(_of_arrays, sending, given, traced=_send)
    weights = checkpoint_name(weights, "ep_recv")
    if recipe is None:
        return checkpoint_name(made.values, "ep_recv"), weights
    # A policy that saves a matmul's quantized rows saves these too, and moves nothing again.
    leaves = (checkpoint_name(x, "ep_recv") for x in lax.stop_gradient((made.data, made.scale)))
    data, scale = (checkpoint_name(x, "ep_q_x") for x in leaves)
    data, sizes = from_bits(data, recipe.data_dtype()), given.plan.group_sizes
    rows = QuantizedTensor(data, scale, None, None, None, sizes, made.values, recipe)
    return rows, weights


def _taken_apart(tokens: Any) -> Sent:
    """Takes a QuantizedTensor apart; gradients go to its origin."""
    if not isinstance(tokens, QuantizedTensor):
        return Sent(tokens)
    given: Any = lax.stop_gradient((bits(tokens.data), tokens.scale))
    return Sent(tokens.origin, *given)


def _nothing(sending: Sending, sent: Sent) -> tuple[Sent, jax.Array]:
    """Makes the results if no rank has a token."""
    call, recipe = sending
    lead = (call.num_slabs, call.capacity)
    rows = (*lead, call.group.hidden_size)
    blank = None if sent.values is None else jnp.zeros(rows, sent.values.dtype)
    weights = jnp.zeros(lead, jnp.float32)
    if recipe is None:
        return Sent(blank), weights
    scales = (*lead, num_tiles(rows[-1], format_of(recipe).tile))
    return Sent(blank, jnp.zeros(rows, jnp.uint8), jnp.ones(scales, jnp.float32)), weights


def _ready(call: Call, given: Rows) -> tuple[Call, Rows]:
    """Places arrays of tokens and weights for the call, and finds the axes it varies over."""
    call = call.varied(given)
    values = jax.tree.map(lambda x: per_device.place_tokens(call, x), given.values)
    weights = given.weights
    if weights is not None:
        weights = per_device.place(call, "topk_weights", weights)
    return call, given._replace(values=values, weights=weights)


def _primal(sending: Sending, given: Rows) -> tuple[Sent, jax.Array]:
    """Sends rows [..., H] and weights [..., K] or None; returns [R, C, H] and [R, C].

    For quantized rows it also makes the dequantized values, which receive the gradients. A compiled
    program makes them only if something reads them, and no gradient does.
    """
    origin = given.values.values
    return _of_arrays(sending, given, origin=None if origin is None else origin.dtype)


def _of_arrays(sending: Sending, given: Rows, *, origin: Any = None) -> tuple[Sent, jax.Array]:
    """Computes `_primal` of arrays that `_ready` has placed.

    Quantized rows get values only if `origin`, the dtype of these values, is given.
    """
    call, recipe = sending

    def body(at: DeviceCall, sent: Sent, weights: Any, plan: AnyArrays) -> Any:
        if recipe is None:
            values, recv_weights = exchange(at, sent.values, weights, plan)
            return Sent(values), recv_weights
        tile, hidden = format_of(recipe).tile, call.group.hidden_size
        data, scale = sent.data, sent.scale
        if data is None:
            data, scale = quantized(recipe, sent.values, plan)
        raw, recv_weights = exchange(at, to_bytes(data, scale, tile), weights, plan)
        data, scale = from_bytes(raw, hidden, tile)
        if origin is None:
            return Sent(None, data, scale), recv_weights
        values = widen(from_bits(data, recipe.data_dtype()))
        values = values * spread_tiles(scale, 1, tile, hidden)
        return Sent(values.astype(origin), data, scale), recv_weights

    sent = given.values
    if sent.data is not None:  # the values before quantization are not sent
        sent = sent._replace(values=None)
    *made, recv_weights = per_device.run(
        call,
        "dispatch",
        body,
        given.layer_index,
        (sent, given.weights),
        (given.plan,),
        results=2 if recipe is None else 3 + (origin is not None),
        variant="" if recipe is None else f"{recipe!r} {origin}",
    )
    values = made.pop(0) if recipe is None or origin is not None else None
    return Sent(values, *made), recv_weights


def exchange(
    at: DeviceCall, rows: jax.Array, weights: jax.Array | None, plan: AnyArrays
) -> tuple[jax.Array, jax.Array]:
    """Sends this device's rows [T, X] and weights [T, K]; returns the received [C, X], [C]."""
    made = per_device_ops(at.call.group, plan).dispatch(at, rows, weights, plan)
    received, recv_weights = (slack.cleared(x, plan.group_sizes) for x in made)
    return received, recv_weights


def _fwd(sending: Sending, given: Rows) -> Any:
    origin = given.values.values
    if origin is None:
        raise NotImplementedError(
            "dispatch of quantized tokens without their origin (the values before they were "
            "quantized) has no gradient; pass tokens made by grouped_quantize, or stop_gradient "
            "the weights"
        )
    if sending.recipe is None and jnp.dtype(origin.dtype).itemsize == 1:
        raise NotImplementedError(
            f"dispatch of 1-byte tokens ({origin.dtype}) has no gradient: sums of such rows "
            "have no useful precision; dispatch a wider dtype, or stop_gradient the tokens and "
            "weights"
        )
    saved = (given.layer_index, given.plan, given.weights is not None)
    return eager.settled(_primal, sending, given), saved


def _bwd(sending: Sending, saved: Any, grads: tuple[Sent, jax.Array]) -> tuple[Rows]:
    """Combines the gradients of rows [R, C, H] and weights [R, C] to tokens and their weights."""
    layer_index, plan, weighted = saved
    sent, d_weights = grads
    with scope("dispatch_bwd", sending.call.layer):
        given = Rows(layer_index, sent.values, d_weights, plan)
        d_tokens, d_topk = eager.settled(_pullback, sending.call, given)
    nothing: Any = None
    return (Rows(nothing, Sent(d_tokens), d_topk if weighted else None, nothing),)


def _pullback(call: Call, given: Rows) -> tuple[jax.Array, ...]:
    def body(at: DeviceCall, *slabs: Any) -> tuple[jax.Array, jax.Array]:
        return per_device_ops(call.group, given.plan).dispatch_bwd(at, *slabs)

    return per_device.run(
        call, "dispatch_bwd", body, given.layer_index, (), given[1:], results=2, to_tokens=True
    )


_send = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("dispatch", _send, _fwd, _bwd)
