"""`ep.linen`: the MoE block as a flax.linen module.

Needs the extra `flax`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.base.layers import EpLayer, LayerStack
from ep_runtime_client.modules import options as module_options
from ep_runtime_client.moe import state
from ep_runtime_client.moe.params import (
    INIT_OPTIONS,
    KernelInit,
    MoEParams,
    initializers,
    logical_axes,
    of_named,
)
from ep_runtime_client.ops.routing.api import Routing
from ep_runtime_client.ops.routing.options import Router

try:
    from flax import linen
except ImportError as error:
    raise ImportError(f"ep.linen needs flax: {module_options.EXTRA}") from error

__all__ = ["MoEBlock"]


def __dir__() -> list[str]:
    return __all__


# The collection with a delayed recipe's amax histories.
_HISTORY = "amax_history"


class MoEBlock(linen.Module):  # type: ignore[misc]
    """A flax.linen module that runs `ep.moe` with router and expert parameters of its own.

    Parameters are `router`, `wi`, `wo` (and `wi_bias`, `wo_bias`) of the shapes of `MoEParams`;
    with `separate` `wi_0` (gate) and `wi_1` (up) and their `wi_0_bias`, `wi_1_bias`. They are boxed
    by `with_logical_partitioning` with logical names. Rules that are active when the block is
    called also give `ep.moe` the sharding of its parameters (`params_spec`). Layers are static
    fields, in no variable and no checkpoint.

    With a delayed recipe the amax histories of `ep.MoEState` are the variables `wi_x_amax`,
    `wi_w_amax`, `wo_x_amax` and `wo_w_amax` of the collection `amax_history`. A call updates them
    if the collection is mutable: `apply(..., mutable="amax_history")` in training, and one of
    `variable_axes` under `nn.scan`. In evaluation calls use the histories unchanged.

    Attributes:
        layer_or_spec: a registered layer; a layer stack, with a layer_index in each call; or a
            LayerSpec with num_experts and hidden_size, which is enough to initialise, without a
            daemon.
        mlp_dim: M.
        use_bias, param_dtype, kernel_init, separate: as in `init_moe_params`.
        use_expert_bias: with the variable `expert_bias`, f32 [E], in the collection of that name.
        use_router: as in `init_moe_params`; without a router every call needs `routing=`.

    The other attributes are the keyword arguments of `ep.moe`.

    Cost: that of `ep.moe`; the block adds nothing.

    Source: as `ep.moe`; the bias is that of `ep.update_expert_bias`.

    Examples:
        >>> block = ep.linen.MoEBlock(layer, 64)
        >>> variables = block.init(jax.random.key(0), tokens)
        >>> y, aux = block.apply(variables, tokens)
        >>> y.shape == tokens.shape
        True
    """

    layer_or_spec: EpLayer | LayerStack | LayerSpec
    mlp_dim: int
    use_bias: bool = False
    param_dtype: Any = jnp.float32
    kernel_init: KernelInit | None = None
    separate: bool = False
    use_expert_bias: bool = False
    use_router: bool = True
    activation: Any = "silu"
    recipe: Any = None
    router: Router = Router()
    aux_loss_coeff: float | jax.Array = 0.0
    weights_at: str | None = None
    gated: bool = True
    compute_dtype: Any = None
    capacity: int | None = None
    handle: int = 0
    keep: str = "first"
    keep_factor: float = 1.25
    return_stats: bool = False
    tokens_spec: jax.sharding.PartitionSpec | None = None
    params_spec: Any = None

    def setup(self) -> None:
        module_options.check_module(self.layer_or_spec, self.use_router, self.use_expert_bias)
        options: Any = {name: getattr(self, name) for name in INIT_OPTIONS}
        makers = initializers(self.layer_or_spec, self.mlp_dim, **options)
        made = {name: self.param(name, _boxed(name, make)) for name, make in makers.items()}
        self.moe_params = of_named(made)
        if self.use_expert_bias:
            zeros = jnp.zeros((made["wo"].shape[0],), jnp.float32)
            self.bias = self.variable("expert_bias", "expert_bias", lambda: zeros)
        kept = module_options.histories(self.layer_or_spec, self.recipe)
        self.histories = {
            name: self.variable(_HISTORY, name, jnp.zeros, like.shape, like.dtype)
            for name, like in kept.items()
        }

    def __call__(
        self,
        x: jax.Array,
        layer_index: int | jax.Array | None = None,
        *,
        routing: Routing | None = None,
        token_mask: jax.Array | None = None,
        params8: MoEParams | None = None,
    ) -> Any:
        """Runs `ep.moe` with the block's parameters; shapes, results and errors are the same.

        Args:
            x: [T, H] or [B, S, H].
            layer_index: of a layer stack, a Python int or a traced int32 []; else None.
            routing: as in `ep.moe`, for a block without a router.
            token_mask: as in `ep.moe`.
            params8: 8-bit weights of this block's parameters, from `ep.quantize_params`. Gradients
                go to the parameters, their masters.

        Returns:
            (y, aux), with return_stats (y, aux, stats). During initialisation, x and 0: no token
            is moved.

        Raises:
            InvalidArgumentError: a stack without layer_index, or an index without a stack.
            EpRuntimeError: as by `ep.moe`.
            NotImplementedError: as by `ep.moe`.

        Cost: that of `ep.moe`.
        """
        if self.is_initializing():
            return (x, jnp.zeros((), jnp.float32), None)[: 3 if self.return_stats else 2]
        layer = module_options.layer_for_call(self.layer_or_spec, layer_index, x)
        options = {name: getattr(self, name) for name in module_options.option_names()}
        options |= {"routing": routing, "token_mask": token_mask}
        options["expert_bias"] = self.bias.value if self.use_expert_bias else None
        histories = {name: held.value for name, held in self.histories.items()}
        results, after = module_options.call_moe(
            layer,
            x,
            self.moe_params,
            params8,
            state.of_named(histories) if histories else None,
            linen.get_logical_axis_rules(),
            options,
        )
        if self.is_mutable_collection(_HISTORY):
            for name, history in after.items():
                self.histories[name].value = history
        return results

    def update_expert_bias(self, tokens_per_expert: jax.Array, rate: float) -> None:
        """Updates the block's `expert_bias` as `ep.update_expert_bias` does.

        Call it by `apply(..., method="update_expert_bias", mutable="expert_bias")`.

        Args:
            tokens_per_expert: int32 [E], from the stats of a call with return_stats.
            rate: size of the step.

        Raises:
            InvalidArgumentError: the block was made without use_expert_bias.

        Cost: E additions.
        """
        bias = self.bias.value if self.use_expert_bias else None
        moved = module_options.moved_bias(bias, tokens_per_expert, rate)
        self.bias.value = moved


def _with_checked_options(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of a module's dataclass; it names all options if one is wrong."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        known = inspect.signature(init).parameters
        own = [name for name in known if name not in ("self", "parent", "name")]
        module_options.check_options([name for name in options if name not in known], own)
        init(self, *args, **options)

    return checked


MoEBlock.__init__ = _with_checked_options(MoEBlock.__init__)  # type: ignore[method-assign]


def _boxed(name: str, make: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """Returns `make` with its result in a box of logical names."""
    ndim = jax.eval_shape(make, jax.random.key(0)).ndim
    return linen.with_logical_partitioning(make, logical_axes(name, ndim))
