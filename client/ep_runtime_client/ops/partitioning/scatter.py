"""Reduce-scatters over mesh axes, and all-gathers with a reduce-scatter as gradient."""

from __future__ import annotations

import functools

import jax
from jax import lax

from ep_runtime_client.ops.tracing.varying import Axes


def scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sums `x` over `axes`; this device keeps its part of `dim`.

    Between processes on CPU it makes the whole sum and cuts the part out. Before jaxlib 0.12, the
    reduce-scatter that XLA uses there (gloo's) overwrites values it still sends: rank 0 may get
    wrong values. It is also slower.
    """

    def reduce_scatter(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    # Only processes under jax.distributed use gloo; devices of one process never do.
    if not jax.distributed.is_initialized():
        return reduce_scatter(x)
    return lax.platform_dependent(
        x, cpu=lambda x: cut(lax.psum(x, axes), axes, dim), default=reduce_scatter
    )


def cut(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Cuts this device's part of `dim` out of an array that all devices along `axes` have."""
    size = x.shape[dim] // int(lax.psum(1, axes))
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Joins the parts of `dim` over `axes`; the gradient is `scatter`."""
    return lax.all_gather(x, axes, axis=dim, tiled=True)


gather.defvjp(
    lambda x, axes, dim: (gather(x, axes, dim), None),
    lambda axes, dim, _, grad: (scatter(grad, axes, dim),),
)
