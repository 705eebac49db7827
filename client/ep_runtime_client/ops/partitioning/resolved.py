"""Describes an op on one device: shardings of its operands, and the function of their blocks."""

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
