"""Describes an op on one device: shardings of operands, the function of blocks, collectives."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from ep_runtime_client.ops.partitioning.roles import Entries, Roles
from ep_runtime_client.ops.tracing.varying import Axes

Sizes = tuple[tuple[str, int], ...]  # (name, size) of mesh axes
Arrived = Sequence[Entries]  # shardings of an op's operands as they arrive
Wanted = Sequence[Entries] | None  # wanted shardings of an op's results, if known
Shapes = Sequence[tuple[int, ...]]  # global shapes of the operands


@dataclasses.dataclass(frozen=True)
class Resolved:
    """An op resolved for one sharding of its operands.

    Attributes:
        operands: entries of each operand inside the op.
        results: entries of each result.
        local: local blocks of the operands -> tuple of local blocks of the results. It calls the
            op's collectives, which name mesh axes.
    """

    operands: tuple[Entries, ...]
    results: tuple[Entries, ...]
    local: Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over mesh axes, as called on one device.

    Attributes:
        roles: the axes' sizes.
        manual: axes of the user's enclosing shard_map, which does its own sums.
    """

    roles: Roles
    manual: Axes = ()

    def free(self, axes: Axes) -> Axes:
        return tuple(axis for axis in self.roles.real(axes) if axis not in self.manual)

    def total(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Sums `x` over `axes`."""
        over = self.free(axes)
        if self.roles.apart:
            for axis in reversed(over):
                x = lax.psum(x, axis)
            return x
        return lax.psum(x, over) if over else x

    def back(
        self, x: jax.Array, gathered: tuple[Axes, ...], summed: Axes, dims: int | None = None
    ) -> jax.Array:
        """Returns this device's shard of a gathered weight's gradient, summed over `summed`.

        Along a gathered axis that does not split rows, all devices have the same gradient. The
        shard is then a slice of this gradient.
        """
        over = set(self.roles.real(summed))
        for dim, axes in enumerate(gathered[:dims]):
            for on_rows, found in itertools.groupby(axes, over.__contains__):
                run = tuple(found)
                x = (scatter if on_rows else cut)(x, run, dim)
        done = {axis for axes in gathered[:dims] for axis in axes}
        return self.total(x, tuple(axis for axis in summed if axis not in done))


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
