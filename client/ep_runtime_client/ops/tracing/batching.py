"""Lets vmap batch only a mesh axis outside the group, with one index per device.

A mesh axis that is neither ep nor outer gives every index along it an EP group of its own.
`jax.vmap(spmd_axis_name=axis)` of a batch as large as that axis gives each group its own operands,
as for pipeline stages: the shard_map of an op splits the batch, so its per-device body gets a batch
of one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.interpreters import partial_eval as pe

from ep_runtime_client.base.jax_internals import usual_options
from ep_runtime_client.ops.tracing.varying import Axes

_REASON = (
    "ep ops cannot run under vmap: one call moves the tokens of all ranks at once, and its "
    "buffers have one capacity. Put the batch into the token dims ([B, S, H]) instead."
)

# Why an op does not support this vmap either.
RULED = 'A group with partitioning="rule" has no exception; with "auto" or "shard_map" it has one.'
NO_LAYER = "Without a layer nothing says which mesh axes are outside its group: pass layer=."


def one_each(body: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the body of a shard_map for operands that may have a batch of one, the only batch that
    `batched_p` lets through to a device."""

    def run(*blocks: jax.Array) -> Any:
        traced, shapes = jax.make_jaxpr(body, return_shape=True)(*blocks)
        results = _alone_p.bind(*blocks, call_jaxpr=traced)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _check(axis: Any, free: tuple[tuple[str, int], ...], never: str) -> None:
    """Raises NotImplementedError unless a vmap is over `free` axes, with one index per device.

    Args:
        axis: JAX's record of the vmap.
    """
    names: Axes = axis.spmd_name or ()
    if not names:
        raise NotImplementedError(_REASON)
    if never:
        raise NotImplementedError(f"{_REASON} {never}")
    sizes = dict(free)
    other = [name for name in names if name not in sizes]
    if other:
        raise NotImplementedError(
            f"{_REASON} spmd_axis_name={names} must name mesh axes outside the group, here "
            f"{sizes or 'none'}, got {', '.join(other)}"
        )
    if axis.size != prod(sizes[name] for name in names):
        raise NotImplementedError(
            f"{_REASON} With spmd_axis_name={names} the batch dim must have the axis size "
            f"{prod(sizes[name] for name in names)}, got {axis.size}"
        )


def _batch(axis: Any, operands: Any, dims: Any, *, free: Any, never: str) -> Any:
    if any(dim is not None for dim in dims):
        _check(axis, free, never)
    return batched_p.bind(*operands, free=free, never=never), dims


def _squeezed(axis: Any, blocks: Any, dims: Any, *, call_jaxpr: Any) -> Any:
    if all(dim is None for dim in dims):
        return _alone_p.bind(*blocks, call_jaxpr=call_jaxpr), (None,) * len(call_jaxpr.out_avals)
    if axis.size != 1:
        raise NotImplementedError(_REASON)
    alone = [
        x if dim is None else lax.squeeze(x, [dim]) for x, dim in zip(blocks, dims, strict=True)
    ]
    results = _alone_p.bind(*alone, call_jaxpr=call_jaxpr)
    return [x[None] for x in results], (0,) * len(results)


def _run(*blocks: jax.Array, call_jaxpr: Any) -> Any:
    with usual_options():
        return jaxpr_as_fun(call_jaxpr)(*blocks)


# Returns the operands of an op. A vmap that batches any of them is refused, unless it is over mesh
# axes of `free`, pairs of (axis, size). `never` is the reason if no vmap at all is allowed.
batched_p = Primitive("ep_batched_over")
batched_p.multiple_results = True
batched_p.def_impl(lambda *operands, free, never: operands)
batched_p.def_abstract_eval(lambda *operands, free, never: operands)
batching.fancy_primitive_batchers[batched_p] = _batch
mlir.register_lowering(batched_p, lambda ctx, *operands, free, never: operands)

_alone_p = Primitive("ep_alone")
_alone_p.multiple_results = True
_alone_p.def_impl(_run)
_alone_p.def_effectful_abstract_eval(
    lambda *blocks, call_jaxpr: (call_jaxpr.out_avals, call_jaxpr.effects)
)
batching.fancy_primitive_batchers[_alone_p] = _squeezed
pe.dce_rules[_alone_p] = pe.dce_jaxpr_closed_call_rule  # drop calls without users
mlir.register_lowering(_alone_p, mlir.lower_fun(_run, multiple_results=True))
