"""A partitioning rule as an op of a program, and as a shard_map where that program is exported.

A rule calls back into Python while XLA partitions, so no exported program can hold one. What a
program is made for is known when it is lowered, not while it is traced: the op holds both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir


def run(
    ruled: Callable[..., Any], mapped: Callable[..., Any], *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """`ruled(*operands)`, and `mapped(*operands)` where the program is exported.

    Args:
        ruled: calls a function of custom_partitioning.
        mapped: the same by a shard_map. It may raise where it cannot be that.
        operands: global arrays.

    Returns:
        The arrays that both return, as a tuple.
    """
    return tuple(
        _partitioned_p.bind(*operands, ruled=jax.make_jaxpr(ruled)(*operands), mapped=mapped)
    )


class _UntilCompiled:
    """What XLA calls back while it compiles; a serialized executable needs nothing of it."""

    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    def __reduce__(self) -> Any:
        return _UntilCompiled, ()


def _lower(ctx: Any, *operands: Any, ruled: Any, mapped: Callable[..., Any]) -> Any:
    module = ctx.module_context
    several = getattr(module.axis_context, "num_devices", None) != 1
    if module.lowering_parameters.for_export and several:
        return mlir.lower_fun(mapped, multiple_results=True)(ctx, *operands)
    kept: list[Any] = module.keepalives
    before = len(kept)
    results = mlir.lower_fun(jaxpr_as_fun(ruled), multiple_results=True)(ctx, *operands)
    kept[before:] = map(_UntilCompiled, kept[before:])
    return results


def _run_here(*operands: jax.Array, ruled: Any, mapped: Any) -> Any:
    return jax.jit(jaxpr_as_fun(ruled))(*operands)


_partitioned_p = Primitive("ep_partitioned")
_partitioned_p.multiple_results = True
_partitioned_p.def_impl(_run_here)
_partitioned_p.def_abstract_eval(lambda *_, ruled, mapped: ruled.out_avals)
mlir.register_lowering(_partitioned_p, _lower)
