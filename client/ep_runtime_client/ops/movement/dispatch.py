"""dispatch: sends every token's row to the ranks of its experts; its gradient is a combine."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.calls.call import Call, check_handle
from ep_runtime_client.ops.calls.plan import Dispatched, Plan
from ep_runtime_client.ops.movement import dispatch_rows, quantized_rows
from ep_runtime_client.ops.movement.per_device import Rows
from ep_runtime_client.ops.movement.prepare import (
    as_weights,
    call_of_plan,
    check_tokens,
    make_plan,
    open_call,
)
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.tracing import again
from ep_runtime_client.ops.tracing.ambient import open_layer


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
    rows, recv_weights = dispatch_rows.send(
        dispatch_rows.Sending(call, recipe), Rows(index, tokens, weights, plan.arrays)
    )
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
    if not isinstance(tokens, QuantizedTensor):
        if recipe is not None:
            quantized_rows.check(layer.group_spec, recipe, tokens)
        return tokens, recipe
    if recipe not in (None, tokens.recipe):
        raise InvalidArgumentError(
            f"recipe {recipe} was given with tokens quantized by {tokens.recipe}",
            argument="recipe",
        )
    quantized_rows.check(layer.group_spec, tokens.recipe, tokens)
    return tokens.data, tokens.recipe


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
