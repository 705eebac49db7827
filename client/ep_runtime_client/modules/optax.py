"""`ep.optax`: optimizers that quantize the master weights after each update.

Needs the extra `optax`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.modules.quantized import check_recipes, quantize_params
from ep_runtime_client.moe.checks import Recipes

try:
    import optax
except ImportError as error:
    raise ImportError("ep.optax needs optax: pip install 'ep-runtime[optax]'") from error

__all__ = ["Quantizing", "quantizing"]


def __dir__() -> list[str]:
    return __all__


@dataclasses.dataclass(frozen=True)
class Quantizing:
    """An optimizer that also returns the updated weights in 8 bits, made by `quantizing`.

    Attributes:
        init: masters -> state of the wrapped optimizer.
        update: (gradients, state, masters) -> (updates of the masters, state), as in the wrapped
            optimizer.
        recipe: how weights are quantized.
        layer: as in `quantize_params`.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    recipe: Recipes
    layer: EpLayer | TracedLayer | None = None

    def quantize(self, masters: Any) -> Any:
        """Returns the masters in 8 bits, as the first step and a restored job need them.

        Args:
            masters: as `quantize_params` takes them.

        Returns:
            `quantize_params(masters, recipe, weights_only=True)`, for `straight_through`.

        Raises:
            InvalidArgumentError: as by `quantize_params`.

        Cost: that of `quantize_params`.
        """
        return quantize_params(masters, self.recipe, layer=self.layer, weights_only=True)

    def apply_updates(self, masters: Any, updates: Any) -> tuple[Any, Any]:
        """Applies updates like `optax.apply_updates`, and also returns the new weights in 8 bits.

        Args:
            masters: a pytree with MoEParams in it; updated in place if it is donated to the `jit`.
            updates: the updates that `update` returned.

        Returns:
            (masters, params8); save only the masters in checkpoints.

        Raises:
            InvalidArgumentError: as by `quantize_params`.

        Cost: that of the update and of `quantize_params`; masters stay on their devices.
        """
        masters = optax.apply_updates(masters, updates)
        return masters, self.quantize(masters)


def quantizing(
    tx: optax.GradientTransformation,
    recipe: Recipes,
    *,
    layer: EpLayer | TracedLayer | None = None,
) -> Quantizing:
    """Makes an optimizer that also quantizes the experts' weights, once per step.

    It quantizes them after the update. Its state is that of tx, and the loss uses
    `straight_through`, so that gradients are those of the masters. It works wherever an optimizer
    with `init` and `update` does; put a chain of optimizers inside it.

    Args:
        tx: any optax optimizer of the masters.
        recipe: as in `quantize_params`.
        layer: as in `quantize_params`.

    Returns:
        Quantizing, whose `apply_updates` returns (masters, params8).

    Raises:
        InvalidArgumentError: a recipe that `quantize_params` refuses.

    Cost: nothing here; each step has the cost of `quantize_params`.

    Source: masters in full precision next to weights of fewer bits are from Micikevicius et al.
    2018, "Mixed Precision Training" (arXiv:1710.03740).

    Examples:
        >>> tx = ep.optax.quantizing(optax.adamw(1e-3), ep.recipes.TensorScaling())
        >>> state, params8 = tx.init(params), tx.quantize(params)
        >>> def loss(masters, params8, batch):
        ...     return ep.moe(layer, batch, ep.straight_through(masters, params8))[0].sum()
        >>> @jax.jit
        ... def step(masters, params8, state, batch):
        ...     grads = jax.grad(loss)(masters, params8, batch)
        ...     updates, state = tx.update(grads, state, masters)
        ...     return *tx.apply_updates(masters, updates), state
        >>> masters, params8, state = step(params, params8, state, tokens)
        >>> masters.wi.dtype.name, params8.wi.dtype.name
        ('float32', 'float8_e4m3fn')
    """
    check_recipes(recipe)
    whole = optax.with_extra_args_support(tx)
    return Quantizing(whole.init, whole.update, recipe, layer)
