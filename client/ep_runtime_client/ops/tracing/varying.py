"""Manual axes over which a value varies, if the shard_map around a call tracks that.

A shard_map with check_vma=True types every value with the manual axes along which its devices may
disagree. The ops keep these types as narrow as their operands': what is replicated over an axis
that shards no tokens stays so. Elsewhere nothing here does anything.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

Axes = tuple[str, ...]


def varied_axes(*arrays: Any) -> frozenset[str]:
    """The manual axes that any of `arrays` (pytrees) is typed to vary over."""
    found: frozenset[str] = frozenset()
    for x in jax.tree.leaves(arrays):
        tracked = getattr(jax.typeof(x), "manual_axis_type", None)
        found |= frozenset() if tracked is None else tracked.varying
    return found


def spread_over(x: jax.Array, axes: Axes) -> jax.Array:
    """`x` typed as varying over `axes` too."""
    missing = tuple(axis for axis in axes if axis not in varied_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def like(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x` typed as varying over whatever `other` varies over."""
    return spread_over(x, tuple(sorted(varied_axes(other))))


def settled(x: jax.Array, axes: Axes) -> jax.Array:
    """Integers `x` typed as not varying over `axes`: for values that only name a place.

    The rank of a device differs along every axis, but what an op returns differs along those
    that its operands differ along; no public cast says so without a collective.
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
