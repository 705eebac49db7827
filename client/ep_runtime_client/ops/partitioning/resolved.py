"""Describes an op on one device: how it gets its operands, and the function of their blocks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from ep_runtime_client.ops.partitioning.roles import Entries, Roles
from ep_runtime_client.ops.partitioning.scatter import cut, scatter
from ep_runtime_client.ops.tracing.varying import Axes

Sizes = tuple[tuple[str, int], ...]  # of mesh axes by name
Arrived = Sequence[Entries]  # how the operands of an op arrive
Wanted = Sequence[Entries] | None  # wanted shardings of its results, if anybody gives them
Shapes = Sequence[tuple[int, ...]]  # of the operands on all devices


@dataclasses.dataclass(frozen=True)
class Resolved:
    """An op for operands that arrive in one way.

    Attributes:
        operands: how each is taken.
        results: how each lies.
        local: local blocks of the operands -> tuple of local blocks of the results. The op's
            collectives are in it; they name mesh axes.
    """

    operands: tuple[Entries, ...]
    results: tuple[Entries, ...]
    local: Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over mesh axes as one device does them.

    Attributes:
        roles: the axes' sizes.
        manual: axes of a shard_map of the user around the op, which does its own sums.
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

        Along a gathered axis that does not split rows, all devices have the same gradient. There
        the shard is a slice of it.
        """
        over = set(self.roles.real(summed))
        for dim, axes in enumerate(gathered[:dims]):
            for on_rows, found in itertools.groupby(axes, over.__contains__):
                run = tuple(found)
                x = (scatter if on_rows else cut)(x, run, dim)
        done = {axis for axes in gathered[:dims] for axis in axes}
        return self.total(x, tuple(axis for axis in summed if axis not in done))
