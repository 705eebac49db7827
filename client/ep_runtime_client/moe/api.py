"""The MoE block: router, dispatch, experts, combine. Letters: `ops/__init__.py`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ep_runtime import workspace
from ep_runtime.arguments import suggests
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.base import stored
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.moe import checks, qwix
from ep_runtime_client.moe import resolve as moe_call
from ep_runtime_client.moe import routing as moe_routing
from ep_runtime_client.moe import shapes as moe_shapes
from ep_runtime_client.moe.checks import Recipes
from ep_runtime_client.moe.params import MoEParams as MoEParams
from ep_runtime_client.moe.params import init_moe_params as init_moe_params
from ep_runtime_client.moe.state import MoEState as MoEState
from ep_runtime_client.moe.state import checked as checked_state
from ep_runtime_client.moe.state import init_moe_state as init_moe_state
from ep_runtime_client.ops.activation.function import Function, activation_of
from ep_runtime_client.ops.calls import token_layout
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.quantize.formats.recipes import DelayedState
from ep_runtime_client.ops.routing import api as routing_api
from ep_runtime_client.ops.routing import losses
from ep_runtime_client.ops.routing.options import REMOVED, Router
from ep_runtime_client.ops.tracing.ambient import check_devices, constant, manual_axes, open_layer
from ep_runtime_client.ops.tracing.scopes import scope


@stored.pytree()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEStats:
    """Statistics of one call of `moe`: load of the experts, dropped slots, and the routing.

    Only `routing` has a gradient.

    Attributes:
        tokens_per_expert: int32 [E], slots routed to each expert over the global batch.
        dropped: int32 [], slots that found no row, over the global batch.
        num_recv: int32 [R], aligned rows demanded of each slab.
        routing: the Routing that the call used, sharded as x: topk_idx and topk_weights [..., K],
            probs and logits [..., E] (None if a routing of your own has none). Use it for a z-loss,
            a balance loss per sequence or Hugging Face's loss over all layers: gradients flow
            through weights, probs and logits. It costs nothing unless it is used.
    """

    tokens_per_expert: jax.Array
    dropped: jax.Array
    num_recv: jax.Array
    routing: routing_api.Routing | None = None


class _Shared(TypedDict, total=False):
    """Keyword arguments that `moe` and its modules share, as type checkers see them."""

    activation: Function
    recipe: Recipes
    router: Router
    aux_loss_coeff: float | jax.Array
    weights_at: Literal["output", "hidden", "input"] | None
    compute_dtype: Any
    capacity: int | None
    handle: int
    keep: Literal["first", "nothing"]
    keep_factor: float
    tokens_spec: PartitionSpec | None
    params_spec: Any


class MoEOptions(_Shared, total=False):
    """Keyword arguments of `moe`, except return_stats and state."""

    routing: routing_api.Routing | None
    expert_bias: jax.Array | None
    token_mask: jax.Array | None
    gated: bool


class ModuleOptions(_Shared, total=False):
    """Options that `ep.nnx.MoEBlock` passes to `moe`; it has `gated` and a bias of its own."""

    return_stats: bool


_PAD = (
    "append zero tokens to x and cut y back (moe routes and counts them like others), or give moe "
    "routing= of your own, padded by ep.pad_tokens"
)
Layer = EpLayer | TracedLayer | LayerSpec
Result = tuple[jax.Array, jax.Array]
ResultWithStats = tuple[jax.Array, jax.Array, MoEStats]
ResultWithState = tuple[jax.Array, jax.Array, MoEState]
ResultWithBoth = tuple[jax.Array, jax.Array, MoEStats, MoEState]
Results = Result | ResultWithStats | ResultWithState | ResultWithBoth


@overload
def moe(
    layer: Layer,
    x: jax.Array,
    params: MoEParams,
    *,
    state: None = None,
    return_stats: Literal[False] = False,
    **options: Unpack[MoEOptions],
) -> Result: ...
@overload
def moe(
    layer: Layer,
    x: jax.Array,
    params: MoEParams,
    *,
    state: None = None,
    return_stats: Literal[True],
    **options: Unpack[MoEOptions],
) -> ResultWithStats: ...
@overload
def moe(
    layer: Layer,
    x: jax.Array,
    params: MoEParams,
    *,
    state: MoEState | DelayedState,
    return_stats: Literal[False] = False,
    **options: Unpack[MoEOptions],
) -> ResultWithState: ...
@overload
def moe(
    layer: Layer,
    x: jax.Array,
    params: MoEParams,
    *,
    state: MoEState | DelayedState,
    return_stats: Literal[True],
    **options: Unpack[MoEOptions],
) -> ResultWithBoth: ...
@overload
def moe(
    layer: Layer,
    x: jax.Array,
    params: MoEParams,
    *,
    state: MoEState | DelayedState | None = None,
    return_stats: bool,
    **options: Unpack[MoEOptions],
) -> Results: ...
@qwix.apart
@suggests(removed=REMOVED)
def moe(
    layer: Layer,
    x: jax.Array,
    params: MoEParams,
    *,
    router: Router = Router(),
    expert_bias: jax.Array | None = None,
    routing: routing_api.Routing | None = None,
    token_mask: jax.Array | None = None,
    aux_loss_coeff: float | jax.Array = 0.0,
    activation: Function = "silu",
    gated: bool = True,
    recipe: Recipes = None,
    compute_dtype: Any = None,
    weights_at: Literal["output", "hidden", "input"] | None = None,
    capacity: int | None = None,
    keep: Literal["first", "nothing"] = "first",
    keep_factor: float = 1.25,
    handle: int = 0,
    state: MoEState | DelayedState | None = None,
    return_stats: bool = False,
    tokens_spec: PartitionSpec | None = None,
    params_spec: Any = None,
) -> Results:
    """Runs a mixture-of-experts layer: routes tokens to experts on all ranks and sums the outputs.

    Args:
        layer: a registered layer, `stack[i]`, or under `jax.eval_shape` a LayerSpec.
        x: [T, H] or [B, S, H], sharded as `dispatch` wants tokens.
        params: the weights, or those of `quantize_params`.
        router: how the logits of `params.router` choose experts and weights.
        expert_bias: [E] f32, as in `route`.
        routing: the result of your own router instead (docs/families.md).
        token_mask: bool [T] or [B, S], sharded as x; False for padding (docs/training.md).
        aux_loss_coeff: as in `aux_loss`. A Python 0 leaves it out.
        activation: a name of ACTIVATIONS, f(gate), or f(gate, up); f(h) if ungated.
        gated: whether wi holds gate and up.
        recipe: one of `ep.recipes`, or a pair for (wi, wo).
        compute_dtype: dtype of dispatched rows and matmuls without a recipe; None is x's, or
            bf16 with BF16().
        weights_at: what the routing weights multiply: "output", "hidden", "input" or None, the
            faster of the first two (docs/families.md).
        keep: "first" saves rows of the first matmul for backward, "nothing" none.
        keep_factor: most rows that "first" saves, in even shares (docs/memory.md).
        state: MoEState, if a recipe is delayed (docs/matmuls.md).
        return_stats: also return MoEStats.
        handle, capacity, tokens_spec: as in `dispatch`.
        params_spec: sharding of params, if traced arrays do not carry it (docs/weights.md).

    Returns:
        (y, aux): y like x, aux f32 [] over the global batch. With return_stats, stats follow; with
        state, the next state comes last.

    Raises:
        InvalidArgumentError: an argument does not fit the layer.
        StaleHandleError: the layer's group is closed.
        NotImplementedError: a vmap, as in `dispatch`, or a second derivative.

    Cost: a dispatch and a combine each way; a block call dispatches tokens once more. Weights are
    gathered over outer axes that shard them. An axis on M adds a sum of activations each way.

    Source: arXiv:1701.06538, GShard (arXiv:2006.16668), MegaBlocks (arXiv:2211.15841).

    Examples:
        >>> params = ep.init_moe_params(jax.random.key(1), layer, 64)
        >>> block = jax.jit(lambda x, params: ep.moe(layer, x, params, aux_loss_coeff=0.01))
        >>> y, aux = block(tokens, params)
        >>> y.shape == tokens.shape, aux.shape
        (True, ())
    """
    # What a call of any layer or spec checks.
    checks.check_options(params, weights_at, activation)
    workspace.check_keep(keep, keep_factor)
    token_mask = routing_api.checked_mask(token_mask, x.shape[:-1])
    recipes = checks.recipes_of(recipe, params)
    dtype = checks.compute_dtype_of(compute_dtype, recipes, x)
    loss = not (isinstance(aux_loss_coeff, int | float) and aux_loss_coeff == 0)
    all_count = routing is None and token_mask is None
    route = functools.partial(
        moe_routing.routed,
        routing=routing,
        router=router,
        expert_bias=expert_bias,
        token_mask=token_mask,
        needs_probs=loss,
    )
    if isinstance(layer, LayerSpec):
        experts = moe_shapes.num_experts_of(layer, x, params)
        given = checked_state(state, recipes, experts)
        routed = route(x, params, layer.top_k, experts)[1]
        y, aux, *counts, after = moe_shapes.results_of(layer, x, experts, given)
        stats = MoEStats(counts[0], counts[1], counts[2], routed) if return_stats else None
        return _results(y, aux, stats, after)
    static, index, mesh = open_layer(layer)
    group = static.group_spec
    after = checked_state(state, recipes, group.num_experts)
    specs = checks.specs_of(params_spec, params)
    checks.check_shapes(static, x, params, specs, gated)
    check_devices(group, mesh, "x", x)
    with scope("router", static):
        rows, routed = route(x, params, static.top_k, group.num_experts)
    # The experts, by the body that this call can have.
    function, values = activation_of(activation, gated, dtype, params.wo.shape[1])
    wi, wo = (recipe if recipe and recipe.quantizes else None for recipe in recipes)
    block = moe_call.Block(function, (wi, wo), specs, group.token_axes, values)
    weighted = moe_call.weighted(static, block, params, weights_at)
    remedy = _PAD if routing is None else token_layout.PAD_TOKENS
    rows = rows.astype(dtype)
    moved = moe_call.Moved(index, mesh, rows, routed, handle, capacity, tokens_spec, remedy)
    way = moe_call.chosen(static, block, moved, params, weighted)
    spare = group.spare_experts if way.spread else 0
    with scope(f"moe.{way.body}.{way.why or 'taken'}.{spare}", static):
        saved = moe_call.SavedRows(keep, keep_factor)
        y, plan, after = moe_call.run(block, moved, params, weighted, saved, way, after)
    # Losses and counts are of the global batch, so they are summed over the manual axes that shard
    # it. Axes of size 1 are included, because JAX's types say that values vary over them.
    manual = manual_axes(group)
    axes = tuple(axis for axis in group.token_axes if axis in manual)
    if not loss:
        aux = constant(np.zeros((), np.float32), mesh)
    else:
        with scope("aux_loss", static):
            counted = None if all_count else losses.in_losses(routed)
            aux = losses.balance(routed, aux_loss_coeff, counted, axes or None)
    stats = _stats(static, routed, plan, axes) if return_stats else None
    return _results(y.astype(x.dtype), aux, stats, after)


def _results(
    y: jax.Array, aux: jax.Array, stats: MoEStats | None, state: MoEState | None
) -> Results:
    if stats is None:
        return (y, aux) if state is None else (y, aux, state)
    return (y, aux, stats) if state is None else (y, aux, stats, state)


def _stats(
    layer: EpLayer, routed: routing_api.Routing, plan: AnyArrays, axes: tuple[str, ...]
) -> MoEStats:
    with scope("stats", layer):
        counts = routing_api.tokens_per_expert(routed.topk_idx, layer.group_spec.num_experts)
        kept = plan.kept.sum(dtype=jnp.int32)
        if axes:
            counts, kept = lax.psum(counts, axes), lax.psum(kept, axes)
        dropped = counts.sum(dtype=jnp.int32) - kept
        return MoEStats(counts, dropped, plan.num_recv.reshape(-1), routed)
