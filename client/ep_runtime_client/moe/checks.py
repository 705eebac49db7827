"""Checks `moe`'s arguments, and reads the sharding of params from `params_spec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ep_runtime import allowed_names
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec
from ep_runtime_client.base.dtypes import as_dtype
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.moe.params import MoEParams, check_all_or_none, logical_axes
from ep_runtime_client.ops.activation.function import ACTIVATIONS, GATED_UNITS, Function
from ep_runtime_client.ops.gemm.quantized_operands import outside_shape, values_of
from ep_runtime_client.ops.partitioning.regions import known_entries
from ep_runtime_client.ops.partitioning.roles import entries_of, padded
from ep_runtime_client.ops.quantize.formats.recipes import Recipe, check_recipe
from ep_runtime_client.ops.quantize.pair import is_pair, paired
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor

RecipePair = tuple[Recipe | None, Recipe | None]
Recipes = Recipe | RecipePair | None


def recipes_of(recipe: Recipes, params: Any = None) -> RecipePair:
    """Returns the recipes of (wi, wo); a quantized weight keeps the recipe that made it.

    Raises:
        InvalidArgumentError: neither a recipe nor a pair, or another recipe than a weight's own.
    """
    pair = recipe if isinstance(recipe, tuple) else (recipe, recipe)
    wanted = ", None, or a pair of them for wi and wo"
    if len(pair) != 2:
        check_recipe(recipe, wanted)
    found: list[Recipe | None] = []
    for name, given in zip(("wi", "wo"), pair, strict=True):
        if given is not None:
            check_recipe(given, wanted)
        weight: Any = getattr(params, name, None)
        own = weight.recipe if isinstance(weight, QuantizedTensor) else given
        if given is not None and given != own:
            raise InvalidArgumentError(
                f"recipe is {given} for {name}, and params.{name} was quantized by {own}; leave "
                "recipe= out, or quantize the masters by the recipe you want",
                argument="recipe",
            )
        found.append(own)
    return found[0], found[1]


def quantizing(recipe: Recipes) -> RecipePair:
    """Returns the recipes of (wi, wo), with None for recipes that quantize nothing."""
    wi, wo = (each if each is not None and each.quantizes else None for each in recipes_of(recipe))
    return wi, wo


def compute_dtype_of(given: Any, recipes: RecipePair, x: jax.Array) -> Any:
    """Returns the numpy dtype of dispatched rows: `compute_dtype` of `moe`, else x's, or BF16()'s.

    Raises:
        InvalidArgumentError: JAX would compute in another dtype.
    """
    if given is None:
        narrow = any(each is not None and not each.quantizes for each in recipes)
        given = "bfloat16" if narrow else x.dtype
    found = as_dtype(given, "compute_dtype")
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise InvalidArgumentError(
            f"compute_dtype={found} needs jax_enable_x64: JAX computes in "
            f"{jax.dtypes.canonicalize_dtype(found)} without it",
            argument="compute_dtype",
        )
    return found


# Where the routing weights are multiplied; None chooses the faster of "output" and "hidden".
_WEIGHTS_AT = (None, "output", "hidden", "input")


def check_options(params: Any, weights_at: Any, activation: Function) -> None:
    """Raises InvalidArgumentError unless `params` are MoEParams and the others are known names."""
    if not isinstance(params, MoEParams):
        remedy = ""
        if isinstance(params, Mapping):
            keys = sorted(map(str, params))
            remedy = f" with the keys {keys}; ep.MoEParams(**params) takes its own"
        raise InvalidArgumentError(
            "params must be ep.MoEParams(router, wi, wo, ...), got "
            f"{type(params).__name__}{remedy}",
            argument="params",
        )
    if not isinstance(weights_at, str | None) or weights_at not in _WEIGHTS_AT:
        raise InvalidArgumentError(
            f'weights_at must be None, "output", "hidden" or "input", got {weights_at!r}',
            argument="weights_at",
        )
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        hint = allowed_names.hint(activation, ACTIVATIONS)
        if activation.lower() in GATED_UNITS:
            of_gate = GATED_UNITS[activation.lower()]
            hint = f'; type activation="{of_gate}", gated=True'
        raise InvalidArgumentError(
            f"activation must be a function or one of {sorted(ACTIVATIONS)}, "
            f"got {activation!r}{hint}",
            argument="activation",
        )


def specs_of(given: Any, params: MoEParams, stack: int = 0) -> dict[str, PartitionSpec | None]:
    """Returns specs of the parameters by name, from moe's `params_spec`; None if it gives none.

    `stack`: number of leading dims that a stack of layers adds to every parameter.

    Raises:
        InvalidArgumentError: neither MoEParams of PartitionSpecs nor rules of `ep.sharding`.
    """
    names = [field.name for field in dataclasses.fields(MoEParams)]
    if given is None:
        return dict.fromkeys(names)
    if isinstance(given, MoEParams):
        found = {name: _one_spec(name, getattr(given, name)) for name in names}
        if found["wi"] is not None and is_pair(given.wi) and not is_pair(params.wi):
            # Quantized gate and up are one array.
            experts, hidden, *rest = padded(entries_of(found["wi"], 3), 3)
            found["wi"] = PartitionSpec(experts or None, hidden or None, None, rest[0] or None)
        return found
    if not callable(getattr(given, "spec", None)):
        raise InvalidArgumentError(
            "params_spec must be MoEParams of PartitionSpecs or rules of ep.sharding, got "
            f"{type(given).__name__}",
            argument="params_spec",
        )
    found = {}
    for name in names:
        array = getattr(params, name)
        array = array[0] if is_pair(array) else array
        if array is not None:
            dims = (None,) * stack + logical_axes(name, array.ndim - stack)
            found[name] = given.spec(dims)
    return dict.fromkeys(names) | found


def _one_spec(name: str, spec: Any) -> PartitionSpec | None:
    """Returns the spec of a parameter; a pair has one spec for both arrays.

    Raises:
        InvalidArgumentError: the specs of a pair differ.
    """
    if not is_pair(spec):
        return spec
    if len({*spec}) != 1:
        raise InvalidArgumentError(
            f"{name} of params_spec must have one spec for gate and up, got {spec}",
            argument="params_spec",
        )
    return _one_spec(name, spec[0])


_GATED_FORMS = "[E, H, 2, M], [E, H, 2M] or a pair of [E, H, M]"


def check_shapes(
    layer: EpLayer,
    x: jax.Array,
    params: MoEParams,
    specs: Mapping[str, PartitionSpec | None],
    gated: bool,
) -> None:
    """Raises InvalidArgumentError if x and params of `moe` do not fit the layer."""
    group = layer.group_spec
    hidden, num_experts = group.hidden_size, group.num_experts
    if x.ndim not in (2, 3) or x.shape[-1] != hidden:
        raise InvalidArgumentError(
            f"x must be [T, {hidden}] or [B, S, {hidden}], got {list(x.shape)}", argument="x"
        )
    if params.router is not None and params.router.shape != (hidden, num_experts):
        raise InvalidArgumentError(
            f"router must be [H, E] = {[hidden, num_experts]}, whole inside a shard_map too, got "
            f"{list(params.router.shape)}",
            argument="params.router",
        )
    # Shapes of kernels outside a user's shard_map.
    wi = outside_shape(paired(params.wi, "params.wi"), specs["wi"])
    wo = outside_shape(params.wo, specs["wo"])
    if not jax.sharding.get_abstract_mesh().manual_axes:
        for name, shape in (("wi", wi), ("wo", wo)):
            if shape[0] != num_experts:
                raise InvalidArgumentError(
                    f"params.{name} must have the {num_experts} experts of group {group.name!r} "
                    f"in front, got {shape[0]}: {list(shape)}",
                    argument=f"params.{name}",
                )
    # Their dims must match, and wi must have one of the supported forms.
    inner = wo[1]
    fits = wi[:2] == (wo[0], hidden) and wo[2:] == (hidden,)
    if (
        not fits
        or prod(wi[2:]) != inner * (2 if gated else 1)
        or len(wi) not in ((3, 4) if gated else (3,))
    ):
        raise InvalidArgumentError(
            f"wi must be {_GATED_FORMS if gated else '[E, H, M]'} and wo "
            f"[E, M, H] with H={hidden}, got {list(wi)} and {list(wo)}; inside a shard_map "
            "params_spec must name the manual axes that still shard them",
            argument="params.wi",
        )
    if params.wi_bias is not None or params.wo_bias is not None:
        _check_biases(params)
    if gated and len(wi) == 3:
        _check_halves_together(group, params.wi, specs["wi"])


def _check_biases(params: MoEParams) -> None:
    """Raises InvalidArgumentError if biases do not fit the weights or each other."""
    wi_bias: Any = params.wi_bias
    check_all_or_none({"wi_bias": wi_bias, "wo_bias": params.wo_bias})
    quantized = isinstance(params.wi, QuantizedTensor)  # a quantized wi is one array
    if not quantized and is_pair(wi_bias) != is_pair(params.wi):
        raise InvalidArgumentError(
            "wi and wi_bias must both be pairs (gate, up), or neither", argument="params.wi_bias"
        )
    compared: list[tuple[str, Any, Any]] = [("wo_bias", params.wo_bias, params.wo)]
    if is_pair(wi_bias):
        # Halves are compared with each other.
        found = [f"{x.dtype}{list(x.shape)}" for x in wi_bias]
        if len(found) != 2 or found[0] != found[1] or wi_bias[0].ndim != 2:
            raise InvalidArgumentError(
                "wi_bias (gate, up) must be two arrays [E, M] of one dtype, got "
                f"{' and '.join(found)}",
                argument="params.wi_bias",
            )
    else:
        compared.append(("wi_bias", wi_bias, params.wi))
    # In a user's shard_map both are shards, which differ if they are sharded over different axes.
    if jax.sharding.get_abstract_mesh().manual_axes:
        return
    for name, bias, weight in compared:
        features = weight.shape[2:]
        if bias.ndim < 2 or bias.shape[1:] != features:
            raise InvalidArgumentError(
                f"{name} must be [E, {', '.join(map(str, features))}] for a weight of "
                f"{list(weight.shape)}, got {list(bias.shape)}",
                argument=f"params.{name}",
            )


def _check_halves_together(group: GroupSpec, wi: Any, spec: PartitionSpec | None) -> None:
    """Raises InvalidArgumentError if an axis shards 2M of [E, H, 2M].

    No shard would have both gate and up.
    """
    wi = values_of(wi)
    entries = known_entries(wi, 3) if spec is None else entries_of(spec, 3)
    sizes = group.axis_sizes
    last = () if entries is None else entries[-1]
    inner = [a for a in last if a not in group.token_axes and sizes.get(a, 1) > 1]
    if inner:
        raise InvalidArgumentError(
            "wi [E, H, 2M] must be whole on its last dim, got "
            f"{', '.join(f'{a}={sizes[a]}' for a in inner)}; pass wi as [E, H, 2, M] or a pair",
            argument="params.wi",
        )
