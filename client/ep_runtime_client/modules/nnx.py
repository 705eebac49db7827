"""`ep.nnx`: the MoE block as a flax.nnx module.

Needs the extra `flax`.
"""

from __future__ import annotations

import inspect
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.base.layers import EpLayer, LayerStack
from ep_runtime_client.modules import options as module_options
from ep_runtime_client.moe import state
from ep_runtime_client.moe.api import ModuleOptions
from ep_runtime_client.moe.params import (
    KernelInit,
    MoEParams,
    init_moe_params,
    logical_axes,
    of_named,
    to_named,
)
from ep_runtime_client.ops.routing.api import Routing

try:
    from flax import nnx
    from flax.core import spmd
except ImportError as error:
    raise ImportError(f"ep.nnx needs flax: {module_options.EXTRA}") from error

__all__ = ["AmaxHistory", "ExpertBias", "MoEBlock"]


def __dir__() -> list[str]:
    return __all__


class ExpertBias(nnx.Variable):  # type: ignore[misc]
    """Variable for the bias with which experts are selected.

    It is not an nnx.Param: loss-free balancing updates it, not an optimizer.
    """


class AmaxHistory(nnx.Variable):  # type: ignore[misc]
    """Variable for one amax history of `ep.MoEState`.

    It is not an nnx.Param: calls update it, unless the module evaluates, but no optimizer does.
    """


class MoEBlock(nnx.Module):  # type: ignore[misc]
    """A flax.nnx module that runs `ep.moe` with router and expert parameters of its own.

    Parameters are nnx.Params `router`, `wi`, `wo` (and `wi_bias`, `wo_bias`) of the shapes of
    `MoEParams`; with `separate` `wi_0` (gate) and `wi_1` (up) and their `wi_0_bias`, `wi_1_bias`.
    Their `out_sharding` metadata are logical names. Under `jax.set_mesh` and
    `nnx.logical_axis_rules(rules.logical)` they are created sharded; otherwise shard them by
    `ep.sharding.rules(...).shardings(nnx.state(block), mesh)`. Rules that are active when the block
    is called also give `ep.moe` the sharding of its parameters (`params_spec`). The layer is a
    static attribute, in no state and no checkpoint; `block.layer = other` replaces it.

    With a delayed recipe the amax histories of `ep.MoEState` are AmaxHistory variables `wi_x_amax`,
    `wi_w_amax`, `wo_x_amax` and `wo_w_amax`, which each call updates. After `block.eval()`, or in
    an `nnx.view` with use_running_average=True, calls use them unchanged, like BatchNorm; after
    `block.train()` they update them again.

    Args:
        layer_or_spec: a registered layer; a layer stack, with a layer_index in each call; or a
            LayerSpec with num_experts and hidden_size, which is enough to initialise, without a
            daemon.
        mlp_dim: M.
        rngs: random streams; the parameters use its stream `params`.
        gated: as in `init_moe_params`.
        use_bias: as in `init_moe_params`.
        use_router: as in `init_moe_params`; without a router every call needs `routing=`.
        param_dtype: as in `init_moe_params`.
        kernel_init: as in `init_moe_params`.
        separate: as in `init_moe_params`.
        use_expert_bias: with `expert_bias`, f32 [E], an ExpertBias of zeros.
        **options: the other keyword arguments of `ep.moe`, the same in every call.

    Raises:
        InvalidArgumentError: an unknown option, a spec without sizes, or no layer.

    Cost: that of `ep.moe`; the block adds nothing.

    Source: as `ep.moe`; the bias is that of `ep.update_expert_bias`.

    Examples:
        >>> block = ep.nnx.MoEBlock(layer, 64, rngs=nnx.Rngs(0))
        >>> y, aux = block(tokens)
        >>> y.shape == tokens.shape
        True
    """

    def __init__(
        self,
        layer_or_spec: EpLayer | LayerStack | LayerSpec,
        mlp_dim: int,
        *,
        rngs: Any,
        gated: bool = True,
        use_bias: bool = False,
        use_router: bool = True,
        param_dtype: Any = jnp.float32,
        kernel_init: KernelInit | None = None,
        separate: bool = False,
        use_expert_bias: bool = False,
        **options: Unpack[ModuleOptions],
    ) -> None:
        module_options.check_module(layer_or_spec, use_router, use_expert_bias)
        parameters = inspect.signature(MoEBlock.__init__).parameters.values()
        module_options.check_options(
            options, [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        )
        self.layer = layer_or_spec
        self._options = tuple(sorted({**options, "gated": gated}.items()))
        made = init_moe_params(
            rngs.params(),
            layer_or_spec,
            mlp_dim,
            gated=gated,
            use_bias=use_bias,
            use_router=use_router,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            separate=separate,
        )
        named = to_named(made)
        self._names = tuple(named)
        for name, value in named.items():
            names = logical_axes(name, value.ndim)
            setattr(self, name, _variable(nnx.Param, names, value))
        zeros = jnp.zeros((made.wo.shape[0],), jnp.float32)
        names = logical_axes("router_bias", 1)
        self.expert_bias = _variable(ExpertBias, names, zeros) if use_expert_bias else None
        kept = module_options.histories(layer_or_spec, options.get("recipe"))
        self._histories = tuple(kept)
        for name, like in kept.items():
            history = jnp.zeros(like.shape, like.dtype)
            setattr(self, name, _variable(AmaxHistory, (None,) * history.ndim, history))
        if kept:
            self.use_running_average = False

    @property
    def params(self) -> MoEParams:
        """The parameters as `ep.moe` accepts them."""
        return of_named({name: getattr(self, name)[...] for name in self._names})

    @property
    def moe_state(self) -> state.MoEState | None:
        """The amax histories as `ep.moe` accepts them; None without a delayed recipe."""
        if not self._histories:
            return None
        return state.of_named({name: getattr(self, name)[...] for name in self._histories})

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
            (y, aux), with the option return_stats (y, aux, stats).

        Raises:
            InvalidArgumentError: a stack without layer_index, or an index without a stack.
            EpRuntimeError: as by `ep.moe`.
            NotImplementedError: as by `ep.moe`.

        Cost: that of `ep.moe`.
        """
        layer = module_options.layer_for_call(self.layer, layer_index, x)
        options = dict(self._options) | {"routing": routing, "token_mask": token_mask}
        options["expert_bias"] = None if self.expert_bias is None else self.expert_bias[...]
        results, after = module_options.call_moe(
            layer,
            x,
            self.params,
            params8,
            self.moe_state,
            spmd.get_logical_axis_rules(),
            options,
        )
        if self._histories and not self.use_running_average:
            for name, history in after.items():
                getattr(self, name)[...] = history
        return results

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets whether calls leave amax histories unchanged; `nnx.view` calls this.

        Args:
            use_running_average: True in evaluation; None changes nothing.
        """
        if use_running_average is not None and self._histories:
            self.use_running_average = use_running_average

    def update_expert_bias(self, tokens_per_expert: jax.Array, rate: float) -> None:
        """Updates the block's `expert_bias` as `ep.update_expert_bias` does.

        Args:
            tokens_per_expert: int32 [E], from the stats of a call with return_stats.
            rate: size of the step.

        Raises:
            InvalidArgumentError: the block was made without use_expert_bias.

        Cost: E additions.
        """
        held: Any = self.expert_bias
        bias = None if held is None else held[...]
        moved = module_options.moved_bias(bias, tokens_per_expert, rate)
        held[...] = moved


def _variable(kind: Any, names: tuple[str | None, ...], value: jax.Array) -> Any:
    """Makes a Variable with logical names, sharded at once if mesh and rules tell how.

    Flax shards every annotated Variable when it is created, and fails without a mesh.
    """
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    known = {*mesh_axes, *(rule[0] for rule in spmd.get_logical_axis_rules() or ())}
    eager = bool(mesh_axes) and all(axis is None or axis in known for axis in names)
    return kind(value, out_sharding=names, eager_sharding=eager and nnx.using_eager_sharding())
