"""A partitioning rule as an op of a program, and as a shard_map where that cannot be.

A rule calls back into Python while XLA partitions, so no exported program can hold one. What a
program is made for is known when it is lowered, not while it is traced: the op holds both forms.
Under a vmap, which no rule knows, the shard_map takes its place; everywhere, if this JAX is one
that `jax_internals.unsupported_reason` names.

JAX's own custom call asks anew for every call of a program, and names what it asks by an address.
Ours has a name that every process gives alike: the layers of a model share one answer, and a
persistent cache may key on the program's text.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from ep_runtime import specs
from ep_runtime_client.base import jax_internals
from ep_runtime_client.base.jax_internals import RuleCall
from ep_runtime_client.ops.partitioning.roles import say_once
from ep_runtime_client.ops.tracing import slack
from ep_runtime_client.ops.tracing.eager import usual_options

TARGET = "ep_runtime.partitioned"


def run(
    ruled: Callable[..., Any], mapped: Callable[..., Any], identity: int, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """`ruled(*operands)`, and `mapped(*operands)` where the program is exported, or under vmap.

    Args:
        ruled: a function of custom_partitioning.
        mapped: the same by a shard_map. It may raise where it cannot be that. Under a vmap it gets
            its spmd_axis_name as `vmapped`.
        identity: of everything that the rule's callback depends on, the same in every process.
        operands: global arrays.

    Returns:
        The arrays that both return, as a tuple.
    """
    held = {"ruled": jax.make_jaxpr(ruled)(*operands), "mapped": mapped, "identity": identity}
    return tuple(_partitioned_p.bind(*operands, **held))


class _Asked:
    """What XLA asks of equal calls, answered once. A serialized executable asks no more."""

    def __init__(
        self, call: RuleCall | None = None, contexts: Mapping[str, Any] | None = None
    ) -> None:
        self.call = call
        self.contexts = contexts or {}
        self.answers: dict[tuple[str, ...], Any] = {}

    def __reduce__(self) -> Any:
        return _Asked, ()


# By name in programs. Programs keep theirs alive until they are compiled, and JAX after that.
_asked: weakref.WeakValueDictionary[str, _Asked] = weakref.WeakValueDictionary()


def _partition(shapes: Any, shardings: Any, result: Any, sharding: Any, name: bytes) -> Any:
    """XLA's callback: a module for one device, and how operands are taken and results lie.

    XLA calls it on a thread of its own, which has none of the program's contexts.
    """
    asked = _asked[name.decode()]
    assert asked.call is not None, "a program that came serialized is partitioned already"
    arrived = tuple(map(str, (*shapes, *shardings, result, sharding)))
    if arrived not in asked.answers:
        with jax_internals.entered(asked.contexts), usual_options():
            asked.answers[arrived] = jax_internals.answer(
                asked.call, shapes, shardings, result, sharding
            )
    return asked.answers[arrived]


def _lower(ctx: Any, *operands: Any, ruled: Any, mapped: Callable[..., Any], identity: int) -> Any:
    several = jax_internals.for_several(ctx)
    if jax_internals.unsupported_reason() is None and not (
        several and jax_internals.for_export(ctx)
    ):
        (rule,) = ruled.eqns
        lowered = jax_internals.lower_rule(ctx, rule.params, operands)
        if lowered is not None:
            results, call = lowered
            if call is not None:
                _rename(ctx, results[0].owner, call, identity)
            return results
    if several and (warning := jax_internals.fallback()):
        say_once(warning)
    with usual_options():
        plain = mapped if several else jaxpr_as_fun(ruled)
        return mlir.lower_fun(plain, multiple_results=True)(ctx, *operands)


def _rename(ctx: Any, op: Any, call: RuleCall, identity: int) -> None:
    """Makes a call one of ours, which shares its answer with equal ones."""
    contexts = jax_internals.contexts()
    name = _name(identity, call, contexts)
    asked = _asked.setdefault(name, _Asked(call, contexts))
    ctx.module_context.add_keepalive(asked)
    op.attributes["call_target_name"] = mlir.ir.StringAttr.get(TARGET)
    op.attributes["backend_config"] = mlir.ir.StringAttr.get(name)


def _name(identity: int, call: RuleCall, contexts: Mapping[str, Any]) -> str:
    """The same for calls with one answer: what a trace of the rule's body reads is in it."""
    config: Any = jax.config
    # `scatter` asks the last one.
    gloo = "cpu" in call.platforms and jax.distributed.is_initialized()
    read = (slack.checked(), config.jax_default_matmul_precision, config.jax_enable_x64, gloo)
    parts = repr((call.mesh, call.platforms, read, sorted(contexts.items())))
    return f"{specs.stable_id('partitioned', str(identity), parts):x}"


def _run_here(*operands: jax.Array, ruled: Any, mapped: Any, identity: int) -> Any:
    return jax.jit(jaxpr_as_fun(ruled))(*operands)


def _vmapped(axis: Any, operands: Any, dims: Any, *, ruled: Any, mapped: Any, identity: int) -> Any:
    """The op under a vmap that `batched_over` lets through."""
    if all(dim is None for dim in dims):
        held = {"ruled": ruled, "mapped": mapped, "identity": identity}
        return _partitioned_p.bind(*operands, **held), (None,) * len(ruled.out_avals)
    over = axis.spmd_name
    run_each = jax.vmap(
        partial(mapped, vmapped=over), dims, axis_size=axis.size, spmd_axis_name=over
    )
    results = run_each(*operands)
    return results, (0,) * len(results)


_partitioned_p = Primitive("ep_partitioned")
_partitioned_p.multiple_results = True
_partitioned_p.def_impl(_run_here)
_partitioned_p.def_abstract_eval(lambda *_, ruled, mapped, identity: ruled.out_avals)
batching.fancy_primitive_batchers[_partitioned_p] = _vmapped
mlir.register_lowering(_partitioned_p, _lower)
if jax_internals.unsupported_reason() is None:
    jax_internals.register(TARGET, _partition)
