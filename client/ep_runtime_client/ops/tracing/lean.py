"""Computes two sets of results, or only the set that the program uses.

A forward pass that saves a large array for backward also makes it in the first pass under
`jax.checkpoint`, which discards it. The repeated pass makes the op's value, which is unused there.
And a backward pass makes gradients of weights that a program may have frozen. Only dead code
elimination knows which results are used.
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
    first: Callable[..., Sequence[jax.Array]],
    rest: Callable[..., Sequence[jax.Array]] | None,
    *operands: jax.Array,
) -> list[jax.Array]:
    """Calls `full(*operands)`, which returns the results of `first` and then the rest.

    If the program uses only the results of `first`, `first` is called instead. If it uses only the
    other results, `rest` is called, unless it is None. `rest` returns as many results as `full`;
    the values of the unused ones do not matter. Not differentiable."""
    ways = [jax.make_jaxpr(way)(*operands) for way in (full, first, rest) if way is not None]
    return _either_p.bind(*operands, ways=tuple(ways))


def _run(*operands: jax.Array, ways: tuple[ClosedJaxpr, ...]) -> Any:
    with usual_options():
        return jaxpr_as_fun(ways[0])(*operands)


def _without_unused(used: list[bool], *more: Any) -> tuple[list[bool], Any]:
    eqn = more[-1]  # JAX 0.12 first passes which inputs are live
    ways = eqn.params["ways"]
    if not any(used):
        return [False] * len(eqn.invars), None
    count = len(ways[1].out_avals) if len(ways) > 1 else len(used)
    if not any(used[count:]) and len(ways) > 1:
        eqn = eqn.replace(outvars=eqn.outvars[:count], params={"ways": ways[1:2]})
    elif not any(used[:count]) and len(ways) > 2:
        eqn = eqn.replace(outvars=eqn.outvars[count:], params={"ways": ways[2:]})
    return [True] * len(eqn.invars), eqn


def _vmapped(axis: Any, operands: Any, dims: Any, *, ways: tuple[ClosedJaxpr, ...]) -> Any:
    """Maps all ways under a vmap that `Partitioning.unbatched` allows."""
    if all(dim is None for dim in dims):
        return _either_p.bind(*operands, ways=ways), (None,) * len(ways[0].out_avals)

    def each(way: ClosedJaxpr) -> Callable[..., Any]:
        options = {"axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
        return jax.vmap(jaxpr_as_fun(way), dims, **options)

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
