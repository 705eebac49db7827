"""Keeps the scaling histories of a block's two matmuls from one call to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.base import stored
from ep_runtime_client.base.layers import EpLayer, LayerStack, TracedLayer
from ep_runtime_client.moe.checks import RecipePair, Recipes, recipes_of
from ep_runtime_client.moe.params import sizes_of
from ep_runtime_client.ops.quantize.delayed import check_state
from ep_runtime_client.ops.quantize.formats.recipes import DelayedState, Recipe

_PRODUCTS = ("wi", "wo")
_OPERANDS = ("x", "w")


@stored.pytree()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEState:
    """The amax histories that delayed scaling carries from one call of `moe` to the next.

    They are the same on every device, as each covers all experts of the group. Save them in
    checkpoints with the parameters, and keep them out of the optimizer: no gradient flows through
    them.

    Attributes:
        wi: DelayedState of the matmul with wi: x for the rows that experts got and w for their
            kernels, each f32 [history, E], newest first. None if wi's recipe is not delayed.
        wo: likewise of the matmul with wo, whose rows are activations.
    """

    wi: DelayedState | None = None
    wo: DelayedState | None = None

    def __post_init__(self) -> None:
        stored.tell_flax(type(self))


def init_moe_state(
    layer_or_spec: EpLayer | LayerStack | TracedLayer | LayerSpec, recipe: Recipes
) -> MoEState:
    """Makes the first state for `ep.moe` with delayed scaling: zeros, which stand for scales of 1.

    Args:
        layer_or_spec: a layer, or a LayerSpec with num_experts and hidden_size set. For a stack it
            returns the state of one layer.
        recipe: as in `moe`, with delayed scaling for at least one matmul.

    Returns:
        MoEState: DelayedState of f32 [history, E] for each matmul whose recipe is delayed, None
        for the other.

    Raises:
        InvalidArgumentError: no recipe is delayed, or a spec without num_experts or hidden_size.

    Cost: 2 * history * E f32 zeros for each of these matmuls.

    Examples:
        >>> recipe = ep.recipes.TensorScaling(delayed=True)
        >>> state = ep.init_moe_state(layer, recipe)
        >>> y, aux, state = ep.moe(layer, tokens, params, recipe=recipe, state=state)
    """
    recipes = recipes_of(recipe)
    if not any(map(keeps, recipes)):
        raise InvalidArgumentError(
            f"recipe must be TensorScaling(delayed=True), for wi, wo or both, to have a state, got "
            f"{recipe}",
            argument="recipe",
        )
    num_experts = sizes_of(layer_or_spec)[0]
    made = [r.init_state(num_experts) if r is not None and r.delayed else None for r in recipes]
    return MoEState(*made)


def keeps(recipe: Recipe | None) -> bool:
    """Whether a matmul with this recipe has a state."""
    return recipe is not None and recipe.delayed


def checked(state: Any, recipes: RecipePair, num_experts: int) -> MoEState | None:
    """Returns the state of both matmuls; one DelayedState is the initial state of both.

    Raises:
        InvalidArgumentError: the state does not fit these recipes of (wi, wo).
    """
    delayed = any(recipe is not None and recipe.delayed for recipe in recipes)
    shown = recipes[0] if recipes[0] == recipes[1] else recipes
    if state is None and delayed:
        raise InvalidArgumentError(
            f"recipe {shown} needs state=, from ep.init_moe_state(layer, recipe) or an earlier "
            "call; moe then returns the next one last",
            argument="state",
        )
    if state is None:
        return None
    if not delayed:
        raise InvalidArgumentError(
            f"state goes with recipe=TensorScaling(delayed=True) alone, got recipe {shown}",
            argument="state",
        )
    if isinstance(state, DelayedState):
        state = MoEState(*(state if keeps(recipe) else None for recipe in recipes))
    if not isinstance(state, MoEState):
        raise InvalidArgumentError(
            "state must be ep.MoEState, from ep.init_moe_state(layer, recipe), got "
            f"{type(state).__name__}",
            argument="state",
        )
    for name, recipe in zip(_PRODUCTS, recipes, strict=True):
        found = getattr(state, name)
        if recipe is not None and recipe.delayed:
            check_state(recipe, found, num_experts, f"state.{name}")
        elif found is not None:
            raise InvalidArgumentError(
                f"state.{name} must be None, because the recipe of {name} has no state: {recipe}",
                argument="state",
            )
    return state


def to_named(state: MoEState) -> dict[str, jax.Array]:
    """Returns the state's arrays by name, because modules keep each array in its own variable."""
    return {
        f"{product}_{operand}_amax": getattr(getattr(state, product), operand)
        for product in _PRODUCTS
        if getattr(state, product) is not None
        for operand in _OPERANDS
    }


def of_named(named: Mapping[str, jax.Array]) -> MoEState:
    """Makes a state from arrays by name, as `to_named` returns them."""

    def one(product: str) -> DelayedState | None:
        names = [f"{product}_{operand}_amax" for operand in _OPERANDS]
        return DelayedState(*(named[name] for name in names)) if names[0] in named else None

    return MoEState(*map(one, _PRODUCTS))
