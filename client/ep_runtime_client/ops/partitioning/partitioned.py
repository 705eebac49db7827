"""A partitioning rule as an op of a program, and as a shard_map where that cannot be.

A rule calls back into Python while XLA partitions, so no exported program can hold one. What a
program is made for is known when it is lowered, not while it is traced: the op holds both forms.
Under a vmap, which no rule knows, the shard_map takes its place.

JAX's own custom call asks anew for every call of a program, and names what it asks by an address.
Ours has a name that every process gives alike: the layers of a model share one answer, and a
persistent cache may key on the program's text.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax._src import config as jax_config
from jax._src import custom_partitioning as jax_rule
from jax._src import xla_bridge
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jaxlib import xla_client

from ep_runtime import specs
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

    def __init__(self, info: Any = None, contexts: Mapping[str, Any] | None = None) -> None:
        self.info = info
        self.contexts = contexts or {}
        self.answers: dict[tuple[str, ...], Any] = {}

    def __reduce__(self) -> Any:
        return _Asked, ()


def _options() -> Mapping[str, Any]:
    """JAX's options by name: calling one gives its context."""
    options: Mapping[str, Any] = jax_config.config._value_holders
    return options


def _contexts() -> dict[str, Any]:
    """Options that contexts such as `jax.enable_x64` set on this thread.

    XLA calls the rule on a thread of its own, which has none of them.
    """
    unset = jax_config.config_ext.unset
    scoped = {name: x for name, x in _options().items() if hasattr(x, "get_local")}
    return {name: x.value for name, x in scoped.items() if x.get_local() is not unset}


# By name in programs. Programs keep theirs alive until they are compiled, and JAX after that.
_asked: weakref.WeakValueDictionary[str, _Asked] = weakref.WeakValueDictionary()


def _partition(shapes: Any, shardings: Any, result: Any, sharding: Any, name: bytes) -> Any:
    """XLA's callback: a module for one device, and how operands are taken and results lie."""
    asked = _asked[name.decode()]
    arrived = tuple(map(str, (*shapes, *shardings, result, sharding)))
    if arrived not in asked.answers:
        address = str(id(asked.info)).encode()
        with contextlib.ExitStack() as entered:
            for option, value in asked.contexts.items():
                entered.enter_context(_options()[option](value))
            entered.enter_context(usual_options())
            asked.answers[arrived] = jax_rule._custom_partitioning_partition(
                shapes, shardings, result, sharding, address
            )
    return asked.answers[arrived]


def _as_it_is(sharding: Any, shape: Any, name: bytes) -> Any:
    return sharding  # Shardy propagates by the rule's factors


def _never(*_: Any) -> Any:
    raise AssertionError("Shardy does not call this")


def _lower(ctx: Any, *operands: Any, ruled: Any, mapped: Callable[..., Any], identity: int) -> Any:
    module = ctx.module_context
    several = getattr(module.axis_context, "num_devices", None) != 1
    if module.lowering_parameters.for_export and several:
        return mlir.lower_fun(mapped, multiple_results=True)(ctx, *operands)
    kept: list[Any] = module.keepalives
    before = len(kept)
    (rule,) = ruled.eqns
    results = jax_rule._custom_partitioning_lowering_rule(ctx, *operands, **rule.params)
    if kept[before:]:  # there are several devices
        (info,) = kept[before:]
        contexts = _contexts()
        name = _name(identity, info, contexts)
        asked = _asked.setdefault(name, _Asked(info, contexts))
        kept[before:] = [asked]
        call = results[0].owner
        call.attributes["call_target_name"] = mlir.ir.StringAttr.get(TARGET)
        call.attributes["backend_config"] = mlir.ir.StringAttr.get(name)
    return results


def _name(identity: int, info: Any, contexts: Mapping[str, Any]) -> str:
    """The same for calls with one answer: what a trace of the rule's body reads is in it."""
    config: Any = jax.config
    mesh, platforms = dict(info.mesh.shape), tuple(info.module_context.platforms)
    # `scatter` asks the last one.
    gloo = "cpu" in platforms and jax.distributed.is_initialized()
    read = (slack.checked(), config.jax_default_matmul_precision, config.jax_enable_x64, gloo)
    parts = repr((mesh, platforms, read, sorted(contexts.items())))
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

_register = partial(
    xla_client.register_custom_call_partitioner,
    name=TARGET,
    prop_user_sharding=_as_it_is,
    partition=_partition,
    infer_sharding_from_operands=_never,
    can_side_effecting_have_replicated_sharding=True,
)
_register()
xla_bridge.register_plugin_callbacks(_register)
