"""Defines gradients that raise a clear error if they are differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def defvjp(name: str, op: Any, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
    """Calls `op.defvjp(fwd, bwd)` for an op with one static argument, named `ep.NAME` in the error.

    In a first derivative `fwd` and `bwd` get values only. Operands or cotangents with tangents
    belong to a second one, which otherwise fails inside shard_map or a loop. An operand saved for
    `bwd` is saved unchanged, because `scan` then makes no stack of an array that it already has.
    """

    def held_fwd(static: Any, *operands: Any) -> Any:
        held = _held(name, operands)
        out, saved = fwd(static, *held)
        came = {id(x): own for x, own in zip(*map(jax.tree.leaves, (held, operands)), strict=True)}
        return out, jax.tree.map(lambda x: came.get(id(x), x), saved)

    def held_bwd(static: Any, saved: Any, grads: Any) -> Any:
        return bwd(static, saved, _held(name, grads))

    op.defvjp(held_fwd, held_bwd)


def _held(name: str, operands: Any) -> Any:
    leaves, tree = jax.tree.flatten(operands)
    for place, x in enumerate(leaves):
        if isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact):
            leaves[place] = _once(name, x)
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(name: str, x: jax.Array) -> jax.Array:
    return x


@_once.defjvp
def _refuse(name: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"ep.{name} has no second derivatives (permute, unpermute and sort_chunks have): a "
        "gradient through it cannot be differentiated again; if the outer gradient is not needed, "
        "use jax.lax.stop_gradient"
    )
