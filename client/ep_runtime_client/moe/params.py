"""Parameters of the MoE block as a pytree."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.base import stored
from ep_runtime_client.base.dtypes import as_dtype
from ep_runtime_client.base.layers import EpLayer, LayerStack, TracedLayer
from ep_runtime_client.ops.quantize.pair import is_pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor

KernelInit = Callable[..., jax.Array]
Halves = jax.Array | tuple[jax.Array, jax.Array]

# Logical names of the dims of a gated block's parameters, for sharding rules: exp experts,
# embed_moe H, mlp_moe M of the experts, embed H elsewhere. None: a dim that is never sharded
# (gate and up; the router's experts, whose logits every rank needs). `logical_axes` returns the
# names for other forms.
LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "router": ("embed", None),
    "wi": ("exp", "embed_moe", None, "mlp_moe"),
    "wo": ("exp", "mlp_moe", "embed_moe"),
    "wi_bias": ("exp", None, "mlp_moe"),
    "wo_bias": ("exp", "embed_moe"),
    "router_bias": (None,),
}
# The field of MoEParams for each variable of a module.
_FIELDS = {"wi_0": "wi", "wi_1": "wi", "wi_0_bias": "wi_bias", "wi_1_bias": "wi_bias"}


# Options of `init_moe_params`.
INIT_OPTIONS = ("gated", "use_bias", "use_router", "param_dtype", "kernel_init", "separate")

# Marks a required weight that was not given; None is an absent leaf.
_NOT_GIVEN: Any = object()


@stored.pytree()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEParams:
    """The weights of a router and its experts, as a pytree.

    `ep.quantize_params` replaces wi and wo by QuantizedTensors. For the letters of shapes see
    docs/reference/index.md.

    Attributes:
        router: [H, E], or None if each call of `moe` gets a `routing`.
        wi: [E, H, 2, M] (0 gate, 1 up), [E, H, 2M] (gate then up), a pair (gate, up) of
            [E, H, M], or [E, H, M] ungated. A pair is never copied.
        wo: [E, M, H].
        wi_bias: [E, 2, M] ([E, 2M], a pair of [E, M], or [E, M], as wi is), or None.
        wo_bias: [E, H], or None; both biases or neither.
        router_bias: [E], or None.
    """

    router: jax.Array | None = None
    wi: Halves = _NOT_GIVEN
    wo: jax.Array = _NOT_GIVEN
    wi_bias: Halves | None = None
    wo_bias: jax.Array | None = None
    router_bias: jax.Array | None = None

    def __post_init__(self) -> None:
        stored.tell_flax(type(self))
        missing = [name for name in ("wi", "wo") if getattr(self, name) is _NOT_GIVEN]
        if missing:
            raise InvalidArgumentError(
                f"MoEParams needs wi and wo, got no {' and no '.join(missing)}",
                argument=missing[0],
            )

    @classmethod
    def from_separate(
        cls,
        router: jax.Array | None,
        wi_0: jax.Array,
        wi_1: jax.Array | None,
        wo: jax.Array,
        wi_0_bias: jax.Array | None = None,
        wi_1_bias: jax.Array | None = None,
        wo_bias: jax.Array | None = None,
        router_bias: jax.Array | None = None,
    ) -> MoEParams:
        """Makes MoEParams from a checkpoint that stores gate and up as separate arrays.

        `MoEParams(router, (wi_0, wi_1), wo, ...)` leaves the two separate, without a copy.

        Args:
            router: [H, E], or None.
            wi_0: [E, H, M], the gate, or the whole wi of ungated parameters.
            wi_1: [E, H, M], up; None makes ungated parameters.
            wo: [E, M, H].
            wi_0_bias: [E, M], or None.
            wi_1_bias: [E, M], or None.
            wo_bias: [E, H], or None.
            router_bias: [E], or None.

        Returns:
            MoEParams with wi [E, H, 2, M], or [E, H, M] ungated.

        Raises:
            InvalidArgumentError: some biases of the experts are given, but not all.

        Cost: one copy of wi_0 and wi_1.
        """
        biases = {"wi_0_bias": wi_0_bias, "wo_bias": wo_bias}
        if wi_1 is not None:
            biases["wi_1_bias"] = wi_1_bias
        check_all_or_none(biases)
        if wi_1 is None:
            return cls(router, wi_0, wo, wi_0_bias, wo_bias, router_bias)
        bias = None
        if wi_0_bias is not None and wi_1_bias is not None:
            bias = jnp.stack([wi_0_bias, wi_1_bias], axis=1)
        return cls(router, jnp.stack([wi_0, wi_1], axis=2), wo, bias, wo_bias, router_bias)

    def to_separate(self) -> dict[str, jax.Array | None]:
        """Returns the weights with gate and up separate, as keyword arguments of `from_separate`.

        wi_1 is None for ungated parameters.

        Raises:
            InvalidArgumentError: a weight is quantized; call it on the masters.

        Cost: one copy of wi, unless it is a pair.
        """
        for name in ("wi", "wo"):
            if isinstance(getattr(self, name), QuantizedTensor):
                raise InvalidArgumentError(
                    f"{name} is quantized; call this on the masters, which checkpoints hold",
                    argument="params",
                )
        inner = self.wo.shape[1]
        halves = _apart(self.wi, 2, inner)
        biases = (None, None) if self.wi_bias is None else _apart(self.wi_bias, 1, inner)
        return {
            "router": self.router,
            "wi_0": halves[0],
            "wi_1": halves[1],
            "wo": self.wo,
            "wi_0_bias": biases[0],
            "wi_1_bias": biases[1],
            "wo_bias": self.wo_bias,
            "router_bias": self.router_bias,
        }


def _apart(both: Halves, lead: int, inner: int) -> tuple[jax.Array, jax.Array | None]:
    """Returns gate and up of wi or wi_bias with `lead` dims before M; up is None if ungated."""
    if isinstance(both, tuple | list):
        return both[0], both[1]
    if math.prod(both.shape[lead:]) == inner:
        return both, None
    both = both.reshape(*both.shape[:lead], 2, inner)
    return both[..., 0, :], both[..., 1, :]


def to_named(params: MoEParams) -> dict[str, jax.Array]:
    """Returns the arrays that are present, by the names of `initializers`."""
    named: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if is_pair(value):
            names = [name for name in _FIELDS if _FIELDS[name] == field.name]
            named |= zip(names, value, strict=True)
        elif value is not None:
            named[field.name] = value
    return named


def of_named(made: Mapping[str, Any]) -> MoEParams:
    """Makes MoEParams from named arrays; the inverse of `to_named`."""
    fields: dict[str, Any] = {"router": None}
    fields |= {name: value for name, value in made.items() if name not in _FIELDS}
    for field in ("wi", "wi_bias"):
        halves = tuple(made[name] for name in _FIELDS if _FIELDS[name] == field and name in made)
        if halves:
            fields[field] = halves
    return MoEParams(**fields)


def check_all_or_none(biases: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError, naming the missing biases, if only some are given."""
    missing = sorted(name for name, bias in biases.items() if bias is None)
    if missing and len(missing) < len(biases):
        given = sorted(set(biases) - set(missing))
        raise InvalidArgumentError(
            f"biases of the experts come all or none: got {', '.join(given)} without "
            f"{', '.join(missing)}",
            argument=missing[0],
        )


def logical_axes(name: str, ndim: int) -> tuple[str | None, ...]:
    """Returns the logical names of the dims of one parameter of the block.

    Args:
        name: a field of MoEParams, or wi_0, wi_1, wi_0_bias, wi_1_bias of a module.
        ndim: of the array. wi [E, H, M] and wi_bias [E, M], ungated or each of a pair, lack the dim
            of gate and up; wi [E, H, 2M] (gate then up) looks the same, and no axis may shard its
            last dim.

    Returns:
        A name or None per dim, for `ep.sharding`, flax's partitioning or rules of the user.

    Raises:
        InvalidArgumentError: the name is not a parameter's, or the parameter never has so many
            dims.
    """
    name = _FIELDS.get(name, name)
    names = LOGICAL_AXES.get(name)
    if names is None:
        raise InvalidArgumentError(
            f"name must be one of {sorted(LOGICAL_AXES)}, got {name!r}", argument="name"
        )
    if ndim < len(names) and name in ("wi", "wi_bias"):
        names = tuple(each for each in names if each is not None)
    if ndim != len(names):
        raise InvalidArgumentError(
            f"{name} has the dims {LOGICAL_AXES[name]}, got {ndim} dims", argument="ndim"
        )
    return names


def init_moe_params(
    key: jax.Array,
    layer_or_spec: EpLayer | LayerStack | TracedLayer | LayerSpec,
    mlp_dim: int,
    *,
    gated: bool = True,
    use_bias: bool = False,
    use_router: bool = True,
    param_dtype: Any = jnp.float32,
    kernel_init: KernelInit | None = None,
    separate: bool = False,
) -> MoEParams:
    """Makes random parameters for `moe`: normal with variance 1 / fan-in, biases zero.

    Args:
        key: a PRNG key.
        layer_or_spec: a layer, or a LayerSpec with num_experts and hidden_size set.
        mlp_dim: M.
        gated: wi [E, H, 2, M] instead of [E, H, M].
        use_bias: add biases of the experts.
        use_router: add a router; without it calls of `moe` need `routing`. The experts get the same
            values either way.
        param_dtype: dtype of the experts; the router is float32 unless this is wider.
        kernel_init: an initializer of JAX, f(key, shape, dtype), called separately for each matrix
            (the router, every expert's gate, up and wo), so that it gets the right fan-in.
        separate: wi is a pair (gate, up) of [E, H, M], and its bias a pair of [E, M]. The values
            differ from those without it.

    Returns:
        MoEParams: router [H, E] or None, wi [E, H, 2, M], a pair of [E, H, M], or [E, H, M], wo
        [E, M, H], and the biases.

    Raises:
        InvalidArgumentError: a spec without num_experts or hidden_size, mlp_dim below 1, or
            separate=True with gated=False.

    Cost: one draw of every matrix on the default device, or sharded under `jax.jit` with
    out_shardings.

    Source: variance 1 / fan-in is LeCun's (Efficient BackProp, 1998), as in
    `jax.nn.initializers.lecun_normal`.
    """
    makers = initializers(
        layer_or_spec,
        mlp_dim,
        gated=gated,
        use_bias=use_bias,
        use_router=use_router,
        param_dtype=param_dtype,
        kernel_init=kernel_init,
        separate=separate,
    )
    # Always three keys: neither a bias nor a router changes the other values.
    keys = dict(zip(("router", "wi", "wo"), jax.random.split(key, 3), strict=True))
    keys |= zip(("wi_0", "wi_1"), jax.random.split(keys["wi"]), strict=True)
    return of_named({name: make(keys.get(name, key)) for name, make in makers.items()})


def initializers(
    layer_or_spec: EpLayer | LayerStack | TracedLayer | LayerSpec,
    mlp_dim: int,
    *,
    gated: bool,
    use_bias: bool,
    use_router: bool,
    param_dtype: Any,
    kernel_init: KernelInit | None,
    separate: bool,
) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Returns each parameter's function of a key, by name; arguments as in `init_moe_params`.

    Names are fields of MoEParams; separate ones are wi_0 and wi_1, wi_0_bias and wi_1_bias.
    """
    experts, hidden = sizes_of(layer_or_spec)
    if mlp_dim < 1:
        raise InvalidArgumentError(f"mlp_dim must be at least 1, got {mlp_dim}", argument="mlp_dim")
    if separate and not gated:
        raise InvalidArgumentError(
            "separate=True needs gated=True, got gated=False", argument="separate"
        )
    param_dtype = as_dtype(param_dtype, "param_dtype")
    inner = (2, mlp_dim) if gated and not separate else (mlp_dim,)
    halves = ("wi_0", "wi_1") if separate else ("wi",)

    def kernel(shape: tuple[int, ...], fan_in: int, dtype: Any) -> Callable[[jax.Array], jax.Array]:
        if kernel_init is None:
            return functools.partial(_normal, shape=shape, fan_in=fan_in, dtype=dtype)
        return functools.partial(_matrices, kernel_init, shape=shape, fan_in=fan_in, dtype=dtype)

    made = {
        "router": kernel((hidden, experts), hidden, jnp.promote_types(param_dtype, "float32")),
        **dict.fromkeys(halves, kernel((experts, hidden, *inner), hidden, param_dtype)),
        "wo": kernel((experts, mlp_dim, hidden), mlp_dim, param_dtype),
    }
    if not use_router:
        del made["router"]
    if use_bias:
        for name in halves:
            made[f"{name}_bias"] = lambda key: jnp.zeros((experts, *inner), param_dtype)
        made["wo_bias"] = lambda key: jnp.zeros((experts, hidden), param_dtype)
    return made


def _normal(key: jax.Array, *, shape: tuple[int, ...], fan_in: int, dtype: Any) -> jax.Array:
    values: jax.Array = jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5
    return values.astype(dtype)


def _matrices(
    kernel_init: KernelInit, key: jax.Array, *, shape: tuple[int, ...], fan_in: int, dtype: Any
) -> jax.Array:
    """Calls `kernel_init` for every [fan_in, columns] matrix of `shape`."""
    row_dim = 0 if len(shape) == 2 else 1
    rest = shape[:row_dim] + shape[row_dim + 1 : -1]
    keys = jax.random.split(key, math.prod(rest))
    drawn = jax.vmap(lambda one: kernel_init(one, (fan_in, shape[-1]), dtype))(keys)
    return jnp.moveaxis(drawn.reshape(*rest, fan_in, shape[-1]), -2, row_dim)


def sizes_of(source: EpLayer | LayerStack | TracedLayer | LayerSpec) -> tuple[int, int]:
    """Returns (E, H) of a layer or spec.

    Raises:
        InvalidArgumentError: not a layer, or a spec without them.
    """
    if isinstance(source, TracedLayer):
        source = source.stack
    if not isinstance(source, EpLayer | LayerStack | LayerSpec):
        raise InvalidArgumentError(
            f"layer_or_spec must be a registered layer, a stack or a LayerSpec, got "
            f"{type(source).__name__}",
            argument="layer_or_spec",
        )
    spec = source if isinstance(source, LayerSpec) else source.spec
    if spec.num_experts is None or spec.hidden_size is None:
        raise InvalidArgumentError(
            f"LayerSpec {spec.name!r} needs num_experts and hidden_size here, got "
            f"num_experts={spec.num_experts}, hidden_size={spec.hidden_size}",
            argument="layer_or_spec",
        )
    return spec.num_experts, spec.hidden_size
