"""Sums over mesh axes of which each device keeps one part, and the gather they are gradients of."""

from __future__ import annotations

import functools

import jax
from jax import lax

from ep_runtime_client.ops.tracing.varying import Axes


def scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """`x` added up over `axes`; of `dim` this device keeps its part.

    Processes on CPU exchange the parts and add them up in the order of ranks, because the
    reduce-scatter that XLA takes from gloo there before jaxlib 0.12 overwrites what it still sends:
    rank 0 may get wrong values. It is the slower one too.
    """

    def reduce_scatter(x: jax.Array) -> jax.Array:
        part: jax.Array = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return part

    def exchange(x: jax.Array) -> jax.Array:
        ranks = lax.psum(1, axes)
        parts = x.reshape(*x.shape[:dim], ranks, -1, *x.shape[dim + 1 :])
        part: jax.Array = lax.all_to_all(parts, axes, dim, 0).sum(0)
        return part

    # Without jax.distributed there is no gloo, even between devices of one process.
    if not jax.distributed.is_initialized():
        return reduce_scatter(x)
    part: jax.Array = lax.platform_dependent(x, cpu=exchange, default=reduce_scatter)
    return part


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The parts of `dim` on `axes` put together; its gradient is `scatter`."""
    whole: jax.Array = lax.all_gather(x, axes, axis=dim, tiled=True)
    return whole


gather.defvjp(
    lambda x, axes, dim: (gather(x, axes, dim), None),
    lambda axes, dim, _, grad: (scatter(grad, axes, dim),),
)
