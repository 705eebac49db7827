"""`moe` with a LayerSpec: what it would return, for `jax.eval_shape` and no daemon."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.moe.params import MoEParams
from ep_runtime_client.moe.routing import Sizes
from ep_runtime_client.moe.state import MoEState
from ep_runtime_client.ops.quantize.pair import is_pair

Shapes = tuple[jax.ShapeDtypeStruct, ...]


def check(spec: LayerSpec, x: jax.Array, params: MoEParams) -> Sizes:
    """What a routing of x looks like.

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
    return Sizes(tuple(x.shape[:-1]), spec.top_k, wanted[1])


def shapes_of(
    spec: LayerSpec, x: jax.Array, params: MoEParams, sizes: Sizes, state: MoEState | None
) -> tuple[Any, ...]:
    """(y, aux, tokens_per_expert, dropped, num_recv, the next state), without values.

    They can be traced and differentiated; a program with them is refused when it is compiled.
    How many slabs there are a LayerSpec does not know: num_recv is [1].
    """
    counts = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((sizes.experts,), (), (1,))]
    outs = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.float32), *counts)
    kept, tree = jax.tree.flatten(state)
    shapes = (*outs, *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in kept))
    made: tuple[Any, ...] = _made(spec.name, shapes, (x, params))
    found, histories = made[: len(outs)], made[len(outs) :]
    return *found, jax.tree.unflatten(tree, map(lax.stop_gradient, histories))


def _refuse(*_: Any, name: str, **__: Any) -> Any:
    raise InvalidArgumentError(
        f"ep.moe got LayerSpec {name!r}, which moves no tokens: it stands for a layer in "
        "jax.eval_shape, and names no group, so a program with it is neither compiled nor "
        'exported; pass a registered layer, without a daemon one of ep.connect("none")',
        argument="layer",
    )


# Has a shape and no values: refuses to be computed, and to be compiled.
_shape_alone = core.Primitive("ep_layer_spec")
_shape_alone.multiple_results = True
_shape_alone.def_abstract_eval(
    lambda *_, like, **__: [jax.core.ShapedArray(shape, dtype) for shape, dtype in like]
)
_shape_alone.def_impl(_refuse)
mlir.register_lowering(_shape_alone, lambda _, *__, **params: _refuse(**params))


def _without_values(name: str, like: Any, *operands: Any) -> Any:
    leaves, tree = jax.tree.flatten(like)
    shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
    return jax.tree.unflatten(tree, _shape_alone.bind(*operands, name=name, like=shapes))


def _primal(name: str, outs: Shapes, operands: Any) -> Any:
    return _without_values(name, outs, jax.tree.leaves(operands)[0])


def _fwd(name: str, outs: Shapes, operands: Any) -> Any:
    return _primal(name, outs, operands), operands


def _bwd(name: str, outs: Shapes, operands: Any, grads: Any) -> Any:
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), operands)
    return (_without_values(name, like, grads[0]),)


_made = jax.custom_vjp(_primal, nondiff_argnums=(0, 1))
_made.defvjp(_fwd, _bwd)
