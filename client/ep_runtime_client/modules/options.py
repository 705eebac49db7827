"""Code that `ep.nnx.MoEBlock` and `ep.linen.MoEBlock` share; it does not import flax."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ep_runtime import allowed_names
from ep_runtime.arguments import refuse_removed
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.base.layers import EpLayer, LayerStack, TracedLayer, resolve
from ep_runtime_client.modules.quantized import straight_through
from ep_runtime_client.modules.sharding import Rules
from ep_runtime_client.moe.api import moe
from ep_runtime_client.moe.checks import Recipes, recipes_of
from ep_runtime_client.moe.params import LOGICAL_AXES, MoEParams
from ep_runtime_client.moe.state import MoEState, init_moe_state, keeps, to_named
from ep_runtime_client.ops.partitioning.roles import entry_axes
from ep_runtime_client.ops.routing.api import update_expert_bias
from ep_runtime_client.ops.routing.options import REMOVED

EXTRA = "pip install 'ep-runtime[flax]'"
# Arguments of `moe` that modules set themselves, with advice for users.
NO_OPTIONS = {
    "expert_bias": "a variable of the module: pass use_expert_bias=True",
    "routing": "of one call: make the module with use_router=False and call block(x, routing=...)",
    "token_mask": "of one call: call block(x, token_mask=...)",
    "state": "a variable of the module, which has one where its recipe is delayed",
}


def check_module(source: Any, use_router: bool, use_expert_bias: bool) -> None:
    """Raises InvalidArgumentError for a wrong layer_or_spec, or a bias without a router."""
    if not isinstance(source, (EpLayer, LayerStack, LayerSpec)):
        raise InvalidArgumentError(
            "layer_or_spec must be a registered layer, a layer stack (its layer comes with each "
            f"call as layer_index) or a LayerSpec, got {type(source).__name__}",
            argument="layer_or_spec",
        )
    if use_expert_bias and not use_router:
        raise InvalidArgumentError(
            "use_expert_bias=True needs the module's router, got use_router=False; add a bias of "
            "your own where you call ep.route",
            argument="use_expert_bias",
        )


def option_names() -> list[str]:
    """Returns the options of `moe` that a module passes on, the same in every call."""
    known = inspect.signature(moe).parameters
    return [n for n, p in known.items() if p.kind is p.KEYWORD_ONLY and n not in NO_OPTIONS]


def check_options(options: Iterable[str], own: Iterable[str]) -> None:
    """Raises InvalidArgumentError for an option that neither `moe` nor the module has.

    `own`: the module's own options.
    """
    passed_on = option_names()
    own = [name for name in own if name not in passed_on]
    for name in options:
        if name in NO_OPTIONS:
            raise InvalidArgumentError(f"{name} is {NO_OPTIONS[name]}", argument=name)
        refuse_removed(name, REMOVED)
        if name not in (*passed_on, *own):
            raise InvalidArgumentError(
                f"{name} is not an option of MoEBlock, which has {', '.join(own)}, and of ep.moe "
                + ", ".join(passed_on)
                + allowed_names.hint(name, (*own, *passed_on)),
                argument=name,
            )


def histories(
    layer_or_spec: EpLayer | LayerStack | LayerSpec, recipe: Recipes
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes of the amax histories that a module needs for its recipe, by name."""
    if not any(map(keeps, recipes_of(recipe))):
        return {}
    made = jax.eval_shape(lambda: init_moe_state(layer_or_spec, recipe))
    named: dict[str, Any] = to_named(made)
    return named


def call_moe(
    layer: EpLayer | TracedLayer | LayerSpec,
    x: jax.Array,
    params: MoEParams,
    params8: MoEParams | None,
    given: MoEState | None,
    logical: Sequence[tuple[str, Any]],
    options: dict[str, Any],
) -> tuple[Any, dict[str, jax.Array]]:
    """Calls `moe` for a module; returns its results and the next amax histories by name.

    Args:
        layer: from `layer_for_call`.
        x, params8: arguments of the call.
        params: the module's parameters.
        given: the module's amax histories; None without a delayed recipe.
        logical: flax's current logical axis rules, for a module without params_spec.
        options: options of `moe`, except state.

    Raises:
        InvalidArgumentError: as by `moe`.
    """
    if options.get("params_spec") is None:
        options = options | {"params_spec": rules_in_context(logical, layer)}
    if params8 is not None:
        params = straight_through(params, params8)
    if given is None:
        return moe(layer, x, params, **options), {}
    *results, after = moe(layer, x, params, state=given, **options)
    return tuple(results), to_named(after)


def moved_bias(bias: jax.Array | None, tokens_per_expert: jax.Array, rate: float) -> jax.Array:
    """Like `update_expert_bias`. Raises InvalidArgumentError if the module has no bias."""
    if bias is None:
        raise InvalidArgumentError(
            "update_expert_bias needs a module made with use_expert_bias=True",
            argument="use_expert_bias",
        )
    return update_expert_bias(bias, tokens_per_expert, rate)


def rules_in_context(
    logical: Sequence[tuple[str, Any]], layer: EpLayer | TracedLayer | LayerSpec
) -> Rules | None:
    """Converts flax's logical axis rules to `params_spec` of `moe`.

    Args:
        logical: rules set by `logical_axis_rules`; the first rule of a name counts.
        layer: layer of the call.

    Returns:
        None if they do not shard all parameters over axes of the layer's mesh only.
    """
    if isinstance(layer, LayerSpec):
        return None
    places: dict[str, Any] = {}
    for name, place in logical or ():
        places.setdefault(name, place)
    wanted = {name for names in LOGICAL_AXES.values() for name in names if name is not None}
    if not wanted <= set(places):
        return None
    rules = Rules((), tuple((name, places[name]) for name in sorted(wanted)), (), ())
    used = {axis for _, place in rules.logical for axis in entry_axes(place)}
    return rules if used <= set(resolve(layer)[0].group_spec.axis_sizes) else None


def layer_for_call(
    source: EpLayer | LayerStack | LayerSpec, layer_index: int | jax.Array | None, x: jax.Array
) -> EpLayer | TracedLayer | LayerSpec:
    """Returns the layer for one call of a module on `x`; a LayerSpec only if `x` is traced.

    Raises:
        InvalidArgumentError: a LayerSpec with concrete values, a stack without an index, or an
            index without a stack.
    """
    if isinstance(source, LayerSpec):
        if isinstance(x, jax.core.Tracer):
            return source
        raise InvalidArgumentError(
            f"the module was made from LayerSpec {source.name!r}, which moves no tokens: make it "
            "from a registered layer, or give it one (block.layer of nnx) before calling it",
            argument="layer_or_spec",
        )
    if isinstance(source, LayerStack):
        if layer_index is None:
            raise InvalidArgumentError(
                f"layer_index must be the index of one of the {source.num_layers} layers of stack "
                f"{source.name!r}, got None; scan over jnp.arange({source.num_layers}) together "
                "with the parameters, or count in the carry. If the scan cannot pass an index, "
                "use one registered layer for all its layers",
                argument="layer_index",
            )
        return source[layer_index]
    if layer_index is not None:
        raise InvalidArgumentError(
            f"layer_index goes with a layer stack; {source.name!r} is one layer",
            argument="layer_index",
        )
    return source
