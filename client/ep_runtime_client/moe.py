"""The MoE block: router, dispatch, experts, combine. Letters: `ops/__init__.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.layers import EpLayer, TracedLayer, resolve
from ep_runtime_client.ops import experts, routing
from ep_runtime_client.ops.activation import activate
from ep_runtime_client.ops.calls import Call, open_layer
from ep_runtime_client.ops.combine import combine
from ep_runtime_client.ops.dispatch import call_of_plan, dispatch
from ep_runtime_client.ops.local_activation import ACTIVATIONS, Activation, Function
from ep_runtime_client.ops.plan import Dispatched
from ep_runtime_client.ops.routing import update_expert_bias as update_expert_bias
from ep_runtime_client.ops.scopes import scope
from ep_runtime_client.params import MoEParams as MoEParams
from ep_runtime_client.params import check_all_or_none
from ep_runtime_client.params import init_moe_params as init_moe_params


class MoEStats(NamedTuple):
    """What a step did; no gradient.

    Attributes:
        tokens_per_expert: int32 [E], slots routed to each expert over the global batch.
        dropped: int32 [], slots that found no row, over the global batch.
        num_recv: int32 [R], aligned rows demanded of each slab.
    """

    tokens_per_expert: jax.Array
    dropped: jax.Array
    num_recv: jax.Array


def moe(
    layer: EpLayer | TracedLayer,
    x: jax.Array,
    params: MoEParams,
    *,
    activation: Function = "silu",
    recipe: None = None,
    score_function: str = "softmax",
    use_pre_softmax: bool = False,
    expert_bias: jax.Array | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    aux_loss_coeff: float = 0.0,
    apply_topk_weights_early: bool = False,
    gated: bool = True,
    compute_dtype: Any = None,
    capacity: int | None = None,
    handle: int = 0,
    return_stats: bool = False,
    tokens_spec: jax.sharding.PartitionSpec | None = None,
) -> Any:
    """Routes every token to its experts on all ranks, runs them, and sums their answers.

    Args:
        layer: a registered layer, or `stack[i]`.
        x: [T, H] or [B, S, H], laid out as `dispatch` wants tokens.
        params: the block's weights; experts on dim 0 over the ep axes.
        activation: a name of ACTIVATIONS, f(gate), or f(gate, up); ungated blocks call f(h).
        recipe: None; quantization recipes come with grouped_gemm.
        score_function, use_pre_softmax, expert_bias, num_groups, group_topk, scaling_factor: as
            in `route`.
        aux_loss_coeff: as in `aux_loss`.
        apply_topk_weights_early: multiply the weights into the activations before wo, instead of
            into the experts' outputs inside combine; the same result. With a wo_bias, which is to
            be weighted too, they are multiplied in combine all the same.
        gated: whether wi holds gate and up.
        compute_dtype: of dispatched rows and matmuls; None is x's.
        capacity, handle, tokens_spec: as in `dispatch`.
        return_stats: also return MoEStats.

    Returns:
        (y, aux): y like x; aux f32 [], 0 when the coefficient is 0. With return_stats (y, aux,
        stats). Inside a shard_map of the user aux and the stats' sums are over the global batch.

    Raises:
        InvalidArgumentError: shapes, dtypes or names do not fit the layer.
        StaleHandleError: the layer's group is closed.
        NotImplementedError: a recipe, or vmap.

    Cost: one dispatch and one combine forward, the same backward; router logits in f32.
    """
    static = resolve(layer)[0]
    _check(static, x, params, activation, recipe, gated)
    with scope("router", static):
        routed = routing.route(
            _logits(x, params),
            static.top_k,
            score_function=score_function,
            use_pre_softmax=use_pre_softmax,
            expert_bias=expert_bias,
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=scaling_factor,
        )
    dtype = jnp.dtype(x.dtype if compute_dtype is None else compute_dtype)
    dispatched = dispatch(
        layer,
        x.astype(dtype),
        routed.topk_idx,
        routed.topk_weights,
        handle=handle,
        capacity=capacity,
        tokens_spec=tokens_spec,
    )
    call = call_of_plan(static, open_layer(layer)[2], dispatched.plan)
    inside = Activation(activation, gated, dtype)
    # A bias of wo is weighted too, so that beside one the weights wait for combine.
    early = apply_topk_weights_early and params.wo_bias is None
    weights = dispatched.weights
    expert_out = _run_experts(call, dispatched, params, inside, weights if early else None)
    late = None if early else weights
    y = combine(layer, dispatched, expert_out, weights=late).astype(x.dtype)
    aux = _aux_loss(call, routed, aux_loss_coeff)
    return (y, aux, _stats(call, routed, dispatched)) if return_stats else (y, aux)


def _logits(x: jax.Array, params: MoEParams) -> jax.Array:
    logits = jnp.einsum(
        "...h,he->...e",
        x.astype(jnp.float32),
        params.router.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    if params.router_bias is not None:
        logits = logits + params.router_bias.astype(jnp.float32)
    return logits


def _run_experts(
    call: Call,
    dispatched: Dispatched,
    params: MoEParams,
    activation: Activation,
    row_weights: jax.Array | None,
) -> jax.Array:
    """The two matmuls of every expert: [R, C, H] -> [R, C, H]."""

    def flat(array: jax.Array | None, dims: int) -> jax.Array | None:
        return None if array is None else array.reshape(*array.shape[:dims], -1)

    sizes, matmul = dispatched.group_sizes, experts.Stage(call, None, activation.dtype)
    with scope("experts", call.layer):
        wi, wi_bias = params.wi.reshape(*params.wi.shape[:2], -1), flat(params.wi_bias, 1)
        hidden = experts.grouped_matmul(matmul, dispatched.tokens, wi, wi_bias, None, sizes)
        hidden = checkpoint_name(hidden, "ep_wi")
        inner = activate(call, activation, hidden, row_weights, sizes)
        out = experts.grouped_matmul(matmul, inner, params.wo, params.wo_bias, None, sizes)
        tagged: jax.Array = checkpoint_name(out, "ep_wo")
        return tagged


def _batch_axes(call: Call) -> tuple[str, ...]:
    """The axes that a sum over the global batch crosses here: the manual ones."""
    sizes = call.group.axis_sizes
    return tuple(a for a in call.group.token_axes if a in call.manual and sizes[a] > 1)


def _aux_loss(call: Call, routed: routing.Routing, coeff: float) -> jax.Array:
    if coeff == 0.0:
        return jnp.zeros((), jnp.float32)
    with scope("aux_loss", call.layer):
        return routing.aux_loss(routed, coeff=coeff, axis_name=_batch_axes(call) or None)


def _stats(call: Call, routed: routing.Routing, dispatched: Dispatched) -> MoEStats:
    with scope("stats", call.layer):
        counts = routing.tokens_per_expert(routed.topk_idx, call.group.num_experts)
        kept = dispatched.plan.arrays.kept.sum(dtype=jnp.int32)
        axes = _batch_axes(call)
        if axes:
            counts, kept = lax.psum(counts, axes), lax.psum(kept, axes)
        return MoEStats(counts, counts.sum(dtype=jnp.int32) - kept, dispatched.num_recv)


def _check(
    layer: EpLayer,
    x: jax.Array,
    params: MoEParams,
    activation: Function,
    recipe: None,
    gated: bool,
) -> None:
    if recipe is not None:
        raise NotImplementedError(f"recipe {recipe!r}: this build has no quantized experts")
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        raise InvalidArgumentError(
            f"activation must be a function or one of {sorted(ACTIVATIONS)}, got {activation!r}",
            argument="activation",
        )
    hidden, num_experts = layer.group_spec.hidden_size, layer.group_spec.num_experts
    if x.ndim not in (2, 3) or x.shape[-1] != hidden:
        raise InvalidArgumentError(
            f"x must be [T, {hidden}] or [B, S, {hidden}], got {list(x.shape)}", argument="x"
        )
    if params.router.shape != (hidden, num_experts):
        raise InvalidArgumentError(
            f"router must be [H, E] = {[hidden, num_experts]}, got {list(params.router.shape)}",
            argument="params.router",
        )
    _check_experts(params, hidden, gated)


def _check_experts(params: MoEParams, hidden: int, gated: bool) -> None:
    wi, wo = params.wi, params.wo
    width = wi.size // max(wi.shape[0] * wi.shape[1], 1)
    inner = wo.shape[1]
    fits = wi.shape[:2] == (wo.shape[0], hidden) and wo.shape[2:] == (hidden,)
    if (
        not fits
        or width != inner * (2 if gated else 1)
        or wi.ndim not in ((3, 4) if gated else (3,))
    ):
        raise InvalidArgumentError(
            f"wi must be {'[E, H, 2, M] or [E, H, 2M]' if gated else '[E, H, M]'} and wo "
            f"[E, M, H] with H={hidden}, got {list(wi.shape)} and {list(wo.shape)}",
            argument="params.wi",
        )
    check_all_or_none({"wi_bias": params.wi_bias, "wo_bias": params.wo_bias})
