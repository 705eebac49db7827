"""`moe` with a LayerSpec: results without values, for `jax.eval_shape` without a daemon."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, mlir

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.moe.params import MoEParams
from ep_runtime_client.ops.quantize.pair import is_pair


def num_experts_of(spec: LayerSpec, x: jax.Array, params: MoEParams) -> int:
    """Returns E, from the spec or from the arrays.

    Raises:
        InvalidArgumentError: shapes do not fit each other or the spec.
    """
    wi: Any = params.wi[0] if is_pair(params.wi) else params.wi
    name, found = "wi [E, H, ...]", wi.shape[1::-1]
    if params.router is not None:
        name, found = "router [H, E]", params.router.shape
    wanted = (spec.hidden_size or x.shape[-1], spec.num_experts or found[-1])
    if x.shape[-1:] != wanted[:1] or found != wanted:
        raise InvalidArgumentError(
            f"x [..., H] and {name} must fit H={wanted[0]} and E={wanted[1]} of LayerSpec "
            f"{spec.name!r}, got {list(x.shape)} and H={found[0]}, E={found[-1]}",
            argument="x",
        )
    return wanted[1]


def results_of(spec: LayerSpec, x: jax.Array, num_experts: int, state: Any) -> tuple[Any, ...]:
    """Returns (y, aux, tokens_per_expert, dropped, num_recv, the next state), without values.

    They can be traced and differentiated; compiling a program with them raises an error. A
    LayerSpec does not know the number of slabs: num_recv is [1].
    """
    shapes = ((), jnp.float32), ((num_experts,), jnp.int32), ((), jnp.int32), ((1,), jnp.int32)
    like = (x, *(jnp.zeros(*each) for each in shapes), jax.lax.stop_gradient(state))
    return jax.tree.map(lambda leaf: _without_values.bind(leaf, name=spec.name), like)


def _refuse(*_: Any, name: str) -> Any:
    raise InvalidArgumentError(
        f"ep.moe got LayerSpec {name!r}, which moves no tokens: it serves jax.eval_shape only, and "
        "has no group, so its program cannot be compiled or exported; pass a registered layer "
        '(without a daemon, register it after ep.connect("none"))',
        argument="layer",
    )


# An array like its operand, and linear in it, that is never computed or compiled.
_without_values = core.Primitive("ep_layer_spec")
_without_values.def_abstract_eval(lambda x, name: x)
_without_values.def_impl(_refuse)
ad.deflinear2(_without_values, lambda grad, *_, name: [_without_values.bind(grad, name=name)])
mlir.register_lowering(_without_values, lambda _, *__, name: _refuse(name=name))
