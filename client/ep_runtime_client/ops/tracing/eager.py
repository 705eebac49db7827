"""Compiles calls on concrete arrays, and traces equal calls of a program once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax

from ep_runtime import errors
from ep_runtime_client.base.jax_internals import usual_options
from ep_runtime_client.ops.tracing import slack


def run(
    function: Callable[..., Any],
    call: Hashable,
    *operands: Any,
    traced: Callable[..., Any] | None = None,
) -> Any:
    """Calls `function(call, *operands)`, compiled if every operand is concrete.

    Calls `traced` instead under a trace, and inside a user's shard_map, where constants are
    concrete too. `traced` computes the same and has its own gradient.
    """
    leaves = jax.tree.leaves(operands)
    inside = jax.sharding.get_abstract_mesh().manual_axes
    if inside or any(isinstance(x, jax.core.Tracer) for x in leaves):
        with usual_options():
            return (traced or function)(call, *operands)
    return shared(function, call, *operands)


def settled(
    function: Callable[..., Any],
    call: Hashable,
    *operands: Any,
    traced: Callable[..., Any] | None = None,
) -> Any:
    """Like `run`, for calls in which other ranks take part: waits for concrete results.

    Raises:
        EpRuntimeError: the program failed with one of our errors; raised as its class.
    """
    try:
        return jax.block_until_ready(run(function, call, *operands, traced=traced))
    except jax.errors.JaxRuntimeError as error:
        ours = errors.parse(str(error))
        if ours is None:
            raise
        raise ours from error


def shared(function: Callable[..., Any], call: Hashable, *operands: Any) -> Any:
    """Calls `function(call, *operands)` as a jitted function, traced once for all equal calls."""
    return _compiled(function, call, slack.checked(), *operands)


def _call_function(
    function: Callable[..., Any], call: Hashable, checked: bool, *operands: Any
) -> Any:
    """Calls the function; `checked`, the result of `slack.checked`, is part of the cache key."""
    with usual_options():
        return function(call, *operands)


_compiled = jax.jit(_call_function, static_argnums=(0, 1, 2))
