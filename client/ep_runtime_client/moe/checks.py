"""What `moe` refuses, and how the weights of a block lie where their arrays do not tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ep_runtime import close_names
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec
from ep_runtime_client.base.dtypes import as_dtype
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.moe.params import Halves, MoEParams, check_all_or_none, logical_axes
from ep_runtime_client.ops.activation.function import ACTIVATIONS, GATED_UNITS, Function
from ep_runtime_client.ops.calls import token_layout
from ep_runtime_client.ops.gemm.weight_entries import values_of
from ep_runtime_client.ops.partitioning.regions import known_entries
from ep_runtime_client.ops.partitioning.roles import Entries, entries_of, padded
from ep_runtime_client.ops.quantize.formats.recipes import Recipe, check_recipe
from ep_runtime_client.ops.quantize.pair import Pair, is_pair, of_both, paired
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.tracing.ambient import manual_axes
from ep_runtime_client.ops.tracing.varying import Axes

Recipes = Recipe | tuple[Recipe | None, Recipe | None] | None


def pair_of(recipe: Recipes) -> tuple[Recipe | None, Recipe | None]:
    """The recipes of (wi, wo).

    Raises:
        InvalidArgumentError: neither a recipe nor two.
    """
    pair = recipe if isinstance(recipe, tuple) else (recipe, recipe)
    wanted = ", None, or a pair of them for wi and wo"
    if len(pair) != 2:
        check_recipe(recipe, wanted)
    for each in pair:
        if each is not None:
            check_recipe(each, wanted)
    return pair[0], pair[1]


def recipes_of(recipe: Recipes, params: MoEParams) -> tuple[Recipe | None, Recipe | None]:
    """As `pair_of`; a weight that is quantized already has the recipe that it was quantized by.

    Raises:
        InvalidArgumentError: another one is given.
    """
    found: list[Recipe | None] = []
    for name, given in zip(("wi", "wo"), pair_of(recipe), strict=True):
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


def quantizing(recipe: Recipes) -> tuple[Recipe | None, Recipe | None]:
    """As `pair_of`, but None for those that quantize nothing."""
    wi, wo = (each if each is not None and each.quantizes else None for each in pair_of(recipe))
    return wi, wo


def held_dtype(name: str, dtype: Any) -> Any:
    """`dtype` as numpy's. Raises InvalidArgumentError where JAX would take another in its place."""
    found = as_dtype(dtype, name)
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise InvalidArgumentError(
            f"{name}={found} needs jax_enable_x64: JAX computes in "
            f"{jax.dtypes.canonicalize_dtype(found)} without it",
            argument=name,
        )
    return found


# What the routing weights multiply; None is the fastest that is right.
_WEIGHTS_AT = (None, "output", "hidden", "input")


def check_weights_at(value: Any) -> None:
    """Raises InvalidArgumentError unless `moe` can multiply weights there."""
    if not isinstance(value, str | None) or value not in _WEIGHTS_AT:
        raise InvalidArgumentError(
            f'weights_at must be None, "output", "hidden" or "input", got {value!r}',
            argument="weights_at",
        )


def check_params(params: Any) -> None:
    """Raises InvalidArgumentError unless `params` are MoEParams."""
    if isinstance(params, MoEParams):
        return
    remedy = ""
    if isinstance(params, Mapping):
        remedy = f" with the keys {sorted(map(str, params))}; ep.MoEParams(**params) takes its own"
    raise InvalidArgumentError(
        f"params must be ep.MoEParams(router, wi, wo, ...), got {type(params).__name__}{remedy}",
        argument="params",
    )


def check_tokens(group: GroupSpec, x: jax.Array) -> None:
    """Raises InvalidArgumentError where tokens that `moe` routes do not divide over the ranks."""
    remedy = (
        "append zero tokens to x and cut y back (moe routes and counts them like others), or give "
        "moe routing= of your own, padded by ep.pad_tokens"
    )
    token_layout.choose(group, x.shape[:-1], manual=manual_axes(group), remedy=remedy)


def specs_of(given: Any, params: MoEParams, stack: int = 0) -> dict[str, PartitionSpec | None]:
    """Specs of the parameters by name, from moe's `params_spec`; None where it says nothing.

    `stack`: how many dims a stack of layers has in front of every parameter.

    Raises:
        InvalidArgumentError: neither MoEParams of PartitionSpecs nor rules of `ep.sharding`.
    """
    names = [field.name for field in dataclasses.fields(MoEParams)]
    if given is None:
        return dict.fromkeys(names)
    if isinstance(given, MoEParams):
        found = {name: _one_spec(name, getattr(given, name)) for name in names}
        if found["wi"] is not None and is_pair(given.wi) and not is_pair(params.wi):
            # Quantized, gate and up are one array.
            experts, hidden, *rest = padded(entries_of(found["wi"], 3), 3)
            found["wi"] = PartitionSpec(experts or None, hidden or None, None, rest[0] or None)
        return found
    if not callable(getattr(given, "spec", None)):
        raise InvalidArgumentError(
            "params_spec must be MoEParams of PartitionSpecs or rules of ep.sharding, got "
            f"{type(given).__name__}",
            argument="params_spec",
        )
    arrays = {name: getattr(params, name) for name in names}
    arrays = {name: array[0] if is_pair(array) else array for name, array in arrays.items()}
    return {
        name: None if array is None else given.spec(_names(name, array.ndim, stack))
        for name, array in arrays.items()
    }


def _names(name: str, ndim: int, stack: int) -> tuple[str | None, ...]:
    return (*[None] * stack, *logical_axes(name, ndim - stack))


def _one_spec(name: str, spec: Any) -> PartitionSpec | None:
    """The spec of a parameter; that of a pair is of each.

    Raises:
        InvalidArgumentError: those of a pair differ.
    """
    if not is_pair(spec):
        found: PartitionSpec | None = spec
        return found
    if len({*spec}) != 1:
        raise InvalidArgumentError(
            f"{name} of params_spec must have one spec for gate and up, got {spec}",
            argument="params_spec",
        )
    return _one_spec(name, spec[0])


def inner_axes(group: GroupSpec, wi: Halves, spec: PartitionSpec | None) -> Axes | None:
    """Mesh axes on M, which rows keep behind wi; None where nothing tells.

    Raises:
        InvalidArgumentError: they lie on wi [E, H, 2M], where no shard has both gate and up.
    """
    one = values_of(wi[0] if isinstance(wi, tuple | list) else wi)
    entries: Entries | None = known_entries(one, one.ndim)
    if spec is not None:
        entries = entries_of(spec, one.ndim)
    if entries is None:
        return None
    sizes = group.axis_sizes
    return tuple(a for a in entries[-1] if a not in group.token_axes and sizes.get(a, 1) > 1)


_GATED_FORMS = "[E, H, 2, M], [E, H, 2M] or a pair of [E, H, M]"


def check(
    layer: EpLayer,
    x: jax.Array,
    params: MoEParams,
    specs: Mapping[str, PartitionSpec | None],
    activation: Function,
    gated: bool,
) -> None:
    """Raises InvalidArgumentError where arguments of `moe` do not fit the layer."""
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        hint = close_names.hint(activation, ACTIVATIONS)
        if activation.lower() in GATED_UNITS:
            of_gate = GATED_UNITS[activation.lower()]
            hint = f'; type activation="{of_gate}", gated=True'
        raise InvalidArgumentError(
            f"activation must be a function or one of {sorted(ACTIVATIONS)}, "
            f"got {activation!r}{hint}",
            argument="activation",
        )
    hidden, num_experts = layer.group_spec.hidden_size, layer.group_spec.num_experts
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
    given, wo = paired(params.wi, "params.wi"), _whole(params.wo, specs["wo"])
    if isinstance(given, Pair):
        wi = of_both(_whole(given.gate, specs["wi"]), 2)
    else:
        wi = _whole(given, specs["wi"])
    if not jax.sharding.get_abstract_mesh().manual_axes:
        for name, shape in (("wi", wi), ("wo", wo)):
            if shape[0] != num_experts:
                raise InvalidArgumentError(
                    f"params.{name} must have the {num_experts} experts of group "
                    f"{layer.group_spec.name!r} in front, got {shape[0]}: {list(shape)}",
                    argument=f"params.{name}",
                )
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
            "params_spec says over which manual axes they are still sharded",
            argument="params.wi",
        )
    check_all_or_none({"wi_bias": params.wi_bias, "wo_bias": params.wo_bias})
    _check_halves_of_bias(params)
    _check_shapes_of_biases(params)


def _check_shapes_of_biases(params: MoEParams) -> None:
    """A pair's halves are compared with each other before; here with the weights. In a region of
    the user's both are parts, and not alike where they lie on other axes."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return
    pairs: list[tuple[str, Any, Any]] = [("wo_bias", params.wo_bias, params.wo)]
    if not is_pair(params.wi_bias):
        pairs.append(("wi_bias", params.wi_bias, params.wi))
    for name, bias, weight in pairs:
        if bias is None or is_pair(weight):
            continue
        features = weight.shape[2:]
        if bias.ndim < 2 or bias.shape[1:] != features:
            raise InvalidArgumentError(
                f"{name} must be [E, {', '.join(map(str, features))}] for a weight of "
                f"{list(weight.shape)}, got {list(bias.shape)}",
                argument=f"params.{name}",
            )


def _check_halves_of_bias(params: MoEParams) -> None:
    bias: Any = params.wi_bias
    quantized = isinstance(params.wi, QuantizedTensor)  # which is one array
    if bias is not None and not quantized and is_pair(bias) != is_pair(params.wi):
        raise InvalidArgumentError(
            "wi and wi_bias must both be pairs (gate, up), or neither", argument="params.wi_bias"
        )
    if not is_pair(bias):
        return
    found = [f"{x.dtype}{list(x.shape)}" for x in bias]
    if len(found) != 2 or found[0] != found[1] or bias[0].ndim != 2:
        raise InvalidArgumentError(
            f"wi_bias (gate, up) must be two arrays [E, M] of one dtype, got {' and '.join(found)}",
            argument="params.wi_bias",
        )


def _whole(array: jax.Array, spec: PartitionSpec | None) -> tuple[int, ...]:
    """The shape of a kernel without the manual axes that shard it, but for the expert dim."""
    ambient = jax.sharding.get_abstract_mesh()
    shape = list(array.shape)
    for dim, axes in enumerate(entries_of(spec, array.ndim)):
        manual = [axis for axis in axes if axis in ambient.manual_axes]
        shape[dim] *= prod(ambient.shape[axis] for axis in manual) if dim else 1
    return tuple(shape)


def check_halves(group: GroupSpec, params: MoEParams, gated: bool, inner: Axes | None) -> None:
    """Raises InvalidArgumentError where axes lie on [E, H, 2M]: no shard has both gate and up."""
    if gated and len(getattr(params.wi, "shape", ())) == 3 and inner:
        sizes = group.axis_sizes
        raise InvalidArgumentError(
            "wi [E, H, 2M] must be whole on its last dim, got "
            f"{', '.join(f'{a}={sizes[a]}' for a in inner)}; pass wi as [E, H, 2, M] or a pair",
            argument="params.wi",
        )
