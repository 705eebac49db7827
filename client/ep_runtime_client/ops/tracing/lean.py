"""Ways to compute a value and what is beside it: both, or the one of them that somebody uses.

A gradient that keeps a large array from its forward pass makes it in a program's first pass too,
where `jax.checkpoint` throws it away; in the second one it makes the value, which nobody uses
there. Which it is only dead code elimination knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.interpreters import partial_eval as pe

from ep_runtime_client.base.jax_internals import usual_options


def unless_unused(
    full: Callable[..., Sequence[jax.Array]],
    lean: Callable[..., jax.Array],
    bare: Callable[..., Sequence[jax.Array]],
    *operands: jax.Array,
) -> list[jax.Array]:
    """`full(*operands)`: a value, and what is beside it.

    Where nothing of the program uses the rest it is `lean`, the value alone; where nothing uses the
    value `bare`, which makes the rest, or something in its stead. Not differentiable."""
    ways = [jax.make_jaxpr(function)(*operands) for function in (full, lean, bare)]
    results: list[jax.Array] = _either_p.bind(*operands, ways=tuple(ways))
    return results


def _run(*operands: jax.Array, ways: tuple[ClosedJaxpr, ...]) -> Any:
    with usual_options():
        return jaxpr_as_fun(ways[0])(*operands)


def _without_unused(used: list[bool], *more: Any) -> tuple[list[bool], Any]:
    eqn = more[-1]  # JAX of 0.12 says before it which inputs are live
    ways = eqn.params["ways"]
    if not any(used):
        return [False] * len(eqn.invars), None
    if len(ways) > 1 and not any(used[1:]):
        eqn = eqn.replace(outvars=eqn.outvars[:1], params={"ways": ways[1:2]})
    elif len(ways) > 1 and not used[0]:
        eqn = eqn.replace(outvars=eqn.outvars[1:], params={"ways": ways[2:]})
    return [True] * len(eqn.invars), eqn


def _vmapped(axis: Any, operands: Any, dims: Any, *, ways: tuple[ClosedJaxpr, ...]) -> Any:
    """Under a vmap that `Partitioning.unbatched` lets through."""
    if all(dim is None for dim in dims):
        return _either_p.bind(*operands, ways=ways), (None,) * len(ways[0].out_avals)

    def each(way: ClosedJaxpr) -> Callable[..., Any]:
        options = {"axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
        run_each: Callable[..., Any] = jax.vmap(jaxpr_as_fun(way), dims, **options)
        return run_each

    made = tuple(jax.make_jaxpr(each(way))(*operands) for way in ways)
    results = _either_p.bind(*operands, ways=made)
    return results, (0,) * len(results)


_either_p = Primitive("ep_unless_unused")
_either_p.multiple_results = True
_either_p.def_impl(_run)
_either_p.def_effectful_abstract_eval(lambda *_, ways: (ways[0].out_avals, ways[0].effects))
batching.fancy_primitive_batchers[_either_p] = _vmapped
pe.dce_rules[_either_p] = _without_unused
mlir.register_lowering(_either_p, mlir.lower_fun(_run, multiple_results=True))
