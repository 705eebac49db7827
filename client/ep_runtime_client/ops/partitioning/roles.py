"""What the axes of a mesh are for, and how arrays lie over them.

Roles need no names of their own. The ep axes are the group's. An outer axis (one that shards
tokens) on a weight is FSDP there: the weight is gathered over it. An axis that shards no tokens is
tensor parallelism: it stays on N', and a sum follows where it lies on the contracted K'.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import Any

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.tracing.varying import Axes

_log = logging.getLogger("ep_runtime")


Entries = tuple[Axes, ...]  # the axes on each dim of an array, major first


@functools.cache
def say_once(text: str) -> None:
    """Logs a warning the first time."""
    _log.warning("%s", text)


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the axes of a mesh are for. Hashable.

    Attributes:
        sizes: (axis, size) of every axis that can shard an operand here, mesh order.
        outer: axes that shard tokens and not experts, major first.
        ep: axes that shard experts, major first; they shard tokens too, after the outer ones.
        owner: for messages: whose axes they are. Equal roles of two owners are the same.
        apart: sums run over one axis after the other, minor first: a weight whose layout nobody
            knows gets the bits of a gradient that is scattered over some of them.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    outer: Axes = ()
    ep: Axes = ()
    owner: str = dataclasses.field(default="the operands", compare=False)
    apart: bool = False

    @functools.cached_property
    def slab(self) -> Axes:
        """Axes on dim 0 of slabs."""
        return self.outer + self.ep

    def size(self, axes: Iterable[str]) -> int:
        sizes = dict(self.sizes)
        return prod(sizes[axis] for axis in axes)

    def real(self, axes: Iterable[str]) -> Axes:
        """Those of `axes` that divide anything here."""
        sizes = dict(self.sizes)
        return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)

    def without(self, axes: Collection[str]) -> Roles:
        """The roles where `axes` are manual: they shard the operands no more."""

        def rest(given: Axes) -> Axes:
            return tuple(axis for axis in given if axis not in axes)

        sizes = tuple((axis, size) for axis, size in self.sizes if axis not in axes)
        return dataclasses.replace(self, sizes=sizes, outer=rest(self.outer), ep=rest(self.ep))

    def named(self, axes: Iterable[str]) -> str:
        """The axes with their sizes, for messages."""
        sizes = dict(self.sizes)
        return ", ".join(f"{axis}={sizes.get(axis, '?')}" for axis in axes)


def flat(entries: Iterable[Axes]) -> Axes:
    """All axes of some dims."""
    return tuple(axis for entry in entries for axis in entry)


def padded(entries: Sequence[Axes], ndim: int) -> Entries:
    """Entries for every dim of an array."""
    return (*(tuple(entry) for entry in entries[:ndim]), *([()] * (ndim - len(entries))))


def read_off(
    sizes: Iterable[tuple[str, int]],
    slabs: Axes,
    *,
    num_slabs: int,
    num_groups: int,
    num_experts: int,
) -> Roles:
    """Roles without a layer, from the axes on dim 0 of the slabs.

    Slab r holds groups r * num_groups and on, modulo num_experts: the minor axes are ep.

    Args:
        sizes: every axis of the mesh.
        slabs: axes on dim 0 of the rows, major first.
        num_slabs: R.
        num_groups: L, groups of one slab.
        num_experts: E.

    Raises:
        InvalidArgumentError: no split of the axes gives every device its experts.
    """
    found = Roles(tuple(sizes))
    axes = found.real(slabs)
    here = num_slabs // max(found.size(axes), 1)  # slabs on one device
    ranks, rest = divmod(num_experts, max(num_groups, 1))
    for first in range(len(axes) + 1):
        ep = axes[first:]
        whole = here * found.size(ep) == ranks if ep else here % max(ranks, 1) == 0
        if whole and not rest:
            return dataclasses.replace(found, outer=axes[:first], ep=ep)
    raise InvalidArgumentError(
        f"{num_slabs} slabs over the axes {found.named(axes)} do not put the {num_experts} experts "
        f"in groups of {num_groups} on devices; pass layer=",
        argument="lhs",
    )


def entries_of(spec: Any, ndim: int) -> Entries:
    """The entries of a PartitionSpec, for every dim."""
    given = [] if spec is None else list(spec)
    named = [
        (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple) else ()
        for entry in given
    ]
    return padded(named, ndim)
