"""Marks calls of a forward pass that `jax.checkpoint` runs again in backward.

Native calls count rows and drops for `ep-runtime load`, once a step. No value of a program tells
which call is the repeated one; JAX knows while it splits a checkpointed function in two. If the
first pass's result is unused, XLA removes that pass, and the repeated one then counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Primitive
from jax.interpreters import batching, mlir
from jax.interpreters import partial_eval as pe

_MADE_AGAIN = 1 << 30  # kMadeAgain of csrc/core/base/layer_index.h


def told(index: jax.Array, after: jax.Array) -> jax.Array:
    """Returns a call's operand `layer_index`: `index` [1], marked if the forward pass is repeated.

    `after`: integers that the call reads. Without them a scan would move the index out of its loop.
    """
    return _index_p.bind(index, after, again=False)


def marked(index: jax.Array) -> jax.Array:
    """Marks `index` of a call that repeats one of this step."""
    return index | _MADE_AGAIN


def layer_of(index: jax.Array) -> jax.Array:
    """Returns the layer of the stack for an index, marked or not."""
    return jax.numpy.where(index >= _MADE_AGAIN, index - _MADE_AGAIN, index)


def _run(index: jax.Array, after: jax.Array, *, again: bool) -> jax.Array:
    return marked(index) if again else index


def _split(saveable: Any, unknown: Sequence[bool], there: Sequence[bool], eqn: Any) -> Any:
    """Splits for `jax.checkpoint`: the equation of the first pass, and the one for backward."""
    missing = [x for x, here in zip(eqn.invars, there, strict=True) if not here]
    kept = [x for x in missing if not isinstance(x, Literal)]
    if any(unknown):
        return None, eqn, [True], [True], kept
    return eqn, eqn.replace(params={"again": True}), [False], [True], kept


def _batch(operands: Any, dims: Any, *, again: bool) -> Any:
    return _index_p.bind(*operands, again=again), dims[0]


_index_p = Primitive("ep_layer_index")
_index_p.def_impl(_run)
_index_p.def_abstract_eval(lambda index, after, again: index)
batching.primitive_batchers[_index_p] = _batch
pe.partial_eval_jaxpr_custom_rules[_index_p] = _split
mlir.register_lowering(_index_p, mlir.lower_fun(_run, multiple_results=False))
