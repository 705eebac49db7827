"""Two ways to compute one value: with something beside it, and without where nobody uses that.

A gradient that keeps a large array from its forward pass makes it in a program's first pass too,
where `jax.checkpoint` throws it away. Which it is only dead code elimination knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.interpreters import partial_eval as pe


def unless_unused(
    full: Callable[..., tuple[jax.Array, jax.Array]],
    lean: Callable[..., jax.Array],
    *operands: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`full(*operands)`, a value and what is beside it; `lean(*operands)`, the same value, where
    nothing of the program uses the second. Not differentiable."""
    ways = [jax.make_jaxpr(function)(*operands) for function in (full, lean)]
    value, beside = _either_p.bind(*operands, full=ways[0], lean=ways[1])
    return value, beside


def _run(*operands: jax.Array, full: ClosedJaxpr, lean: ClosedJaxpr) -> Any:
    return jaxpr_as_fun(full)(*operands)


def _without_unused(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(eqn.invars), None
    if len(used) == 2 and not used[1]:
        lean = eqn.params["lean"]
        eqn = eqn.replace(outvars=eqn.outvars[:1], params={"full": lean, "lean": lean})
    return [True] * len(eqn.invars), eqn


def _vmapped(axis: Any, operands: Any, dims: Any, *, full: ClosedJaxpr, lean: ClosedJaxpr) -> Any:
    """Under a vmap that `batched_over` lets through."""

    def each(way: ClosedJaxpr) -> Callable[..., Any]:
        options = {"axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
        run_each: Callable[..., Any] = jax.vmap(jaxpr_as_fun(way), dims, **options)
        return run_each

    ways = [jax.make_jaxpr(each(way))(*operands) for way in (full, lean)]
    results = _either_p.bind(*operands, full=ways[0], lean=ways[1])
    return results, (0,) * len(results)


_either_p = Primitive("ep_unless_unused")
_either_p.multiple_results = True
_either_p.def_impl(_run)
_either_p.def_effectful_abstract_eval(lambda *_, full, lean: (full.out_avals, full.effects))
batching.fancy_primitive_batchers[_either_p] = _vmapped
pe.dce_rules[_either_p] = _without_unused
mlir.register_lowering(_either_p, mlir.lower_fun(_run, multiple_results=True))
