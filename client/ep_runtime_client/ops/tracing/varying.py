"""Manual axes over which a value varies, if the enclosing shard_map tracks them.

A shard_map with check_vma=True types every value with the manual axes along which devices may have
different values. The ops keep these types as narrow as their operands': a value that is replicated
over an axis without tokens stays replicated. In other programs these functions do nothing.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

Axes = tuple[str, ...]


def varied_axes(*arrays: Any) -> frozenset[str]:
    """Returns the manual axes that any of `arrays` (pytrees) is typed to vary over."""
    found: frozenset[str] = frozenset()
    for x in jax.tree.leaves(arrays):
        tracked = getattr(jax.typeof(x), "manual_axis_type", None)
        found |= frozenset() if tracked is None else tracked.varying
    return found


def spread_over(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns `x` typed as varying also over `axes`."""
    missing = tuple(axis for axis in axes if axis not in varied_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns `x` typed as varying also over the axes that `other` varies over."""
    return spread_over(x, tuple(sorted(varied_axes(other))))


def settled(x: jax.Array, axes: Axes) -> jax.Array:
    """Types integers `x` as not varying over `axes`; use it only for positions such as ranks.

    A device's rank differs along every axis, but the results of an op only along the axes that its
    operands vary over. No public cast expresses this without a collective.
    """
    if not varied_axes(x) & {*axes}:
        return x
    return _settle_p.bind(x, axes=axes)


def _settled_type(x: Any, *, axes: Axes) -> Any:
    tracked = x.manual_axis_type
    return x.update(manual_axis_type=type(tracked)(varying=tracked.varying - {*axes}))


_settle_p = Primitive("ep_settle")
_settle_p.def_impl(lambda x, *, axes: x)
_settle_p.def_abstract_eval(_settled_type)
mlir.register_lowering(_settle_p, lambda ctx, x, *, axes: [x])
