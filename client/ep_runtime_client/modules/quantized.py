"""Quantizes experts' weights once for many calls of `moe`: once per optimizer step."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.moe import checks
from ep_runtime_client.moe.params import MoEParams
from ep_runtime_client.moe.state import keeps
from ep_runtime_client.ops.gemm.quantized_operands import quantize_weight
from ep_runtime_client.ops.quantize.pair import is_pair, paired
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor

Tree = TypeVar("Tree")
_WEIGHTS = ("wi", "wo")


def quantize_params(
    params: Tree,
    recipe: checks.Recipes,
    *,
    layer: EpLayer | TracedLayer | None = None,
    params_spec: Any = None,
    weights_only: bool = False,
) -> Tree:
    """Quantizes the experts' weights once, so that calls of `moe` need not quantize them again.

    Pass the result to `moe` as params, without `recipe`; results have the same bits. Inside the
    differentiated function gradients go straight through to params. Outside it, once per optimizer
    step, `straight_through` directs them to params (docs/mixed-precision.md).

    Args:
        params: MoEParams, or any pytree that contains some; other arrays stay as they are. wi and
            wo may be those of a stack of layers, [layers, E, ...] for `scan`.
        recipe: one of `ep.recipes` for wi and wo, or a pair for (wi, wo); None in a pair leaves
            that weight as it is. Not a delayed recipe.
        layer: the layer whose mesh and axes the sharding rules use. Without it they come from the
            sharding of params; required inside a shard_map, and for exports.
        params_spec: as in `moe`, for traced arrays in a shard_map.
        weights_only: return quantized weights only, with None for all else and no gradients; for
            `straight_through`.

    Returns:
        Like params, with a QuantizedTensor for each weight that has a recipe. Its data and scales
        are sharded as the weight; on Hopper GPUs it also has `transposed`. A pair (gate, up)
        becomes one array, [E, H, 2, M].

    Raises:
        InvalidArgumentError: params have no MoEParams, or are quantized already; no recipe, or a
            delayed one; sizes that the recipe cannot tile.

    Cost: one read of the weights (with tensor scales two), and one write of those bytes. With
    tensor scales one all-reduce of E amax values over the axes that split an expert's weight.

    Source: as the recipe's; once per optimizer step, and gathered in 8 bits, as in torchao's float8
    all-gather (github.com/pytorch/ao, torchao/float8).

    Examples:
        >>> params8 = ep.quantize_params(params, ep.recipes.BlockScaling())
        >>> params8.wi.dtype.name, params8.router is params.router
        ('float8_e4m3fn', True)
        >>> y, aux = jax.jit(lambda x, p: ep.moe(layer, x, p))(tokens, params8)
        >>> def loss(masters):
        ...     params8 = ep.quantize_params(masters, ep.recipes.MXFP8())
        ...     return ep.moe(layer, tokens, params8)[0].sum()
        >>> jax.grad(loss)(params).wi.dtype == params.wi.dtype
        True
    """
    recipes = check_recipes(recipe)

    def one(x: Any) -> Any:
        if not isinstance(x, MoEParams):
            return None if weights_only else x
        return _quantized(x, recipes, layer, params_spec, weights_only)

    _check_tree(params, "params")
    return jax.tree.map(one, params, is_leaf=_is_params)


def straight_through(masters: Tree, params8: Any) -> Tree:
    """Replaces masters by their quantized weights, and sends gradients to the masters.

    Use it if weights are quantized once per optimizer step, outside the differentiated function.
    The loss(masters, params8, batch) calls the model with `straight_through(masters, params8)`.
    Then `jax.grad(loss)` is the gradient of the masters, in their dtypes, for any optimizer.
    Masters that are quantized are not read.

    Args:
        masters: MoEParams, or a pytree that contains some.
        params8: the result of `quantize_params(masters, ...)`, with or without weights_only.

    Returns:
        Like masters, with the quantized weights of params8 in place of the masters'.

    Raises:
        InvalidArgumentError: masters and params8 do not fit each other.

    Cost: none.

    Source: the straight-through estimator of Bengio et al. 2013 (arXiv:1308.3432).

    Examples:
        >>> params8 = ep.quantize_params(params, ep.recipes.TensorScaling(), weights_only=True)
        >>> def loss(masters, batch):
        ...     return ep.moe(layer, batch, ep.straight_through(masters, params8))[0].sum()
        >>> grads = jax.grad(loss)(params, tokens)  # quantizes nothing but rows
        >>> jax.tree.structure(grads) == jax.tree.structure(params)
        True
    """
    _check_tree(masters, "masters")

    def one(own: Any, quantized: Any) -> Any:
        if not isinstance(own, MoEParams):
            return own
        if not isinstance(quantized, MoEParams):
            raise InvalidArgumentError(
                "params8 must be the result of quantize_params(masters, ...), got "
                f"{type(quantized).__name__} instead of MoEParams",
                argument="params8",
            )
        found = {
            name: _back(name, getattr(own, name), getattr(quantized, name)) for name in _WEIGHTS
        }
        return dataclasses.replace(own, **found)

    try:
        made: Tree = jax.tree.map(one, masters, params8, is_leaf=_is_params)
    except InvalidArgumentError:
        raise
    except ValueError as error:
        raise InvalidArgumentError(
            f"params8 must be the result of quantize_params(masters, ...): {error}",
            argument="params8",
        ) from error
    return made


def _is_params(x: Any) -> bool:
    return isinstance(x, MoEParams)


def _check_tree(tree: Any, name: str) -> None:
    """Raises InvalidArgumentError unless `tree` has MoEParams of plain arrays."""
    found = [x for x in jax.tree.leaves(tree, is_leaf=_is_params) if _is_params(x)]
    if not found:
        raise InvalidArgumentError(
            f"{name} must be ep.MoEParams or a pytree with some in it, got {type(tree).__name__} "
            "with none",
            argument=name,
        )
    for each in found:
        for weight in _WEIGHTS:
            if isinstance(getattr(each, weight), QuantizedTensor):
                raise InvalidArgumentError(
                    f"{name} must be masters, got {weight} that is quantized already",
                    argument=name,
                )


def check_recipes(recipe: checks.Recipes) -> tuple[Any, Any]:
    """Returns the recipes of (wi, wo).

    Raises:
        InvalidArgumentError: neither recipe quantizes, or one is delayed.
    """
    pair = checks.quantizing(recipe)
    for each in pair:
        if keeps(each):
            raise InvalidArgumentError(
                f"recipe must not be delayed, got {each}: its scales come from the state of a "
                "call, so that weights are quantized by the call; take TensorScaling()",
                argument="recipe",
            )
    if pair == (None, None):
        raise InvalidArgumentError(
            f"recipe must quantize wi, wo or both, got {recipe!r}", argument="recipe"
        )
    return pair


def _quantized(
    params: MoEParams,
    recipes: tuple[Any, Any],
    layer: EpLayer | TracedLayer | None,
    params_spec: Any,
    weights_only: bool,
) -> MoEParams:
    stack = params.wo.ndim - 3
    specs = checks.specs_of(params_spec, params, stack)
    made: dict[str, Any] = {}
    for name, recipe in zip(_WEIGHTS, recipes, strict=True):
        if recipe is None:
            continue
        w = getattr(params, name)
        if is_pair(w):
            paired(w, f"params.{name}", stack)  # raises an error unless both are alike
            w = tuple(w)
        q = quantize_weight(w, recipe, layer=layer, spec=specs[name], stack=stack)
        made[name] = q.detached() if weights_only else q
    if weights_only:
        nothing: Any = dict.fromkeys(field.name for field in dataclasses.fields(params))
        return MoEParams(**nothing | made)
    return dataclasses.replace(params, **made)


def _back(name: str, own: Any, quantized: Any) -> Any:
    """Returns `quantized` weights whose gradient goes to `own`."""
    if not isinstance(quantized, QuantizedTensor):
        return own
    shape = list(own[0].shape if is_pair(own) else own.shape)
    if is_pair(own):
        shape.insert(-1, 2)
    if shape != list(quantized.shape):
        raise InvalidArgumentError(
            f"{name} of masters is {shape}, of params8 {list(quantized.shape)}: they are not "
            "quantized from these masters",
            argument="params8",
        )
    return dataclasses.replace(quantized, origin=tuple(own) if is_pair(own) else own)
