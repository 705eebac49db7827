"""Which mesh axes do what in a matmul: the sharding rules as algebra on axis names.

Nothing here touches arrays. From how operands arrive it follows how an op takes them, which axes
it gathers off a weight, over which it sums, and how results lie. Both partitionings of an op (the
rule and the shard_map) ask here, so they agree.

Roles need no names of their own. The ep axes are the group's. An outer axis (one that shards
tokens) on a weight is FSDP there: the weight is gathered over it. An axis that shards no tokens is
tensor parallelism: it stays on N', and a sum follows where it lies on the contracted K'.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import Any

from ep_runtime.errors import InvalidArgumentError

_log = logging.getLogger("ep_runtime")

Axes = tuple[str, ...]
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

    @property
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


@dataclasses.dataclass(frozen=True)
class Weight:
    """How an op takes a weight.

    Attributes:
        entries: axes on each dim as the op takes it.
        gathered: on each dim, the axes that the op gathers; the minor end of its entry.
        before: on each dim, the axes behind its entry that leave no whole blocks of a recipe: it
            is gathered over them before it is quantized.
    """

    entries: Entries
    gathered: Entries
    before: Entries = ()

    @property
    def lies(self) -> Entries:
        """Axes on each dim of the weight itself, and of its gradient."""
        return _joined(self.entries, self.before)

    @property
    def taken_off(self) -> Entries:
        """On each dim, all axes that it is gathered over."""
        return _joined(self.gathered, self.before)

    @property
    def kept(self) -> Entries:
        """Axes on each dim after the gather."""
        pairs = zip(self.entries, self.gathered, strict=True)
        return tuple(entry[: len(entry) - len(gone)] for entry, gone in pairs)

    @property
    def gathered_axes(self) -> Axes:
        return flat(self.gathered)

    def amax_axes(self) -> Axes:
        """Axes that split what one expert's amax runs over: all but those on dim 0."""
        return flat(self.entries[1:])


@dataclasses.dataclass(frozen=True)
class Grouped:
    """How grouped_gemm's operands and results lie.

    Attributes:
        roles: what the axes are for.
        weight: how rhs is taken.
        bias: how the bias is taken, [E, *N'].
    """

    roles: Roles
    weight: Weight
    bias: Weight

    @property
    def contracted(self) -> Axes:
        """Axes on K' of both operands: the output is summed over them."""
        return self.weight.kept[1]

    @property
    def columns(self) -> Axes:
        """Axes on N': the rows' gradient is summed over them."""
        return flat(self.weight.kept[2:])

    @property
    def lhs(self) -> Entries:
        return (self.roles.slab, (), self.contracted)

    @property
    def out(self) -> Entries:
        return (self.roles.slab, (), *self.weight.kept[2:])

    @property
    def sizes(self) -> Entries:
        """Of group_sizes."""
        return (self.roles.slab, ())


def flat(entries: Iterable[Axes]) -> Axes:
    """All axes of some dims."""
    return tuple(axis for entry in entries for axis in entry)


def padded(entries: Sequence[Axes], ndim: int) -> Entries:
    """Entries for every dim of an array."""
    return (*(tuple(entry) for entry in entries[:ndim]), *([()] * (ndim - len(entries))))


def grouped(
    roles: Roles,
    lhs: Sequence[Axes],
    rhs: Sequence[Axes],
    rhs_shape: tuple[int, ...],
    *,
    bias: Sequence[Axes] = (),
    blocks: tuple[int, ...] | None = None,
) -> Grouped:
    """The placement of one grouped matmul.

    Args:
        roles: what the axes are for.
        lhs: entries of the rows [R, C, K'] as they arrive.
        rhs: entries of the weight [E, K', *N'] as it arrives.
        rhs_shape: its global shape.
        bias: entries of the bias [E, *N'] as it arrives.
        blocks: per dim of rhs, what its local size must be a multiple of (block scales).

    Raises:
        InvalidArgumentError: an ep axis on another dim than the experts', or experts that the ep
            and fsdp axes do not divide; names axes and sizes.
    """
    weight = expert_weight(roles, rhs, rhs_shape, blocks=blocks)
    rows = padded(lhs, 3)
    stray = [axis for axis in roles.real(rows[1]) if axis not in roles.slab]
    if stray:
        say_once(f"lhs: {roles.named(stray)} on the rows of slabs is not known: replicated")
    wanted = [a for a in roles.real(rows[2]) if a not in roles.slab]
    contracted = tuple(a for a in wanted if a not in flat(weight.entries))
    if contracted and not weight.kept[1] and _divides(roles, rhs_shape[1], contracted, blocks, 1):
        entries = list(weight.entries)
        entries[1] = contracted + entries[1]
        weight = dataclasses.replace(weight, entries=tuple(entries))
    elif wanted and tuple(wanted) != weight.kept[1]:
        say_once(
            f"lhs: {roles.named(wanted)} on K' is not how rhs lies there "
            f"({weight.kept[1] or 'whole'}): resharded"
        )
    return Grouped(roles, weight, _bias(roles, weight, bias, rhs_shape))


def _bias(
    roles: Roles, weight: Weight, entries: Sequence[Axes], rhs_shape: tuple[int, ...]
) -> Weight:
    """A bias lies over what the weight keeps, and is gathered off whatever else it lies over."""
    kept = (weight.kept[0], *weight.kept[2:])
    shape = (rhs_shape[0], *rhs_shape[2:])
    taken, gathered = [], []
    for dim, axes in enumerate(padded(entries, len(shape))):
        gone = tuple(axis for axis in roles.real(axes) if axis in roles.outer)
        if not _divides(roles, shape[dim], kept[dim] + gone, None, dim):
            gone = ()
        taken.append(kept[dim] + gone)
        gathered.append(gone)
    return Weight(tuple(taken), tuple(gathered))


def expert_weight(
    roles: Roles,
    entries: Sequence[Axes],
    shape: tuple[int, ...],
    *,
    blocks: tuple[int, ...] | None = None,
) -> Weight:
    """How a weight [E, K', *N'] is taken; `grouped` says what is raised."""
    given = padded(entries, len(shape))
    taken, gathered, before = [], [], []
    for dim, axes in enumerate(given):
        kept, gone = _experts(roles, axes, shape[0]) if dim == 0 else _inner(roles, axes, dim)
        if roles.real(axes) and kept + gone != roles.real(axes):
            say_once(
                f"rhs: dim {dim} lies over {axes} and is taken over {kept + gone or 'nothing'}: "
                "resharded"
            )
        lost: Axes = ()
        if dim > 0:
            kept, gone, lost = whole_blocks(roles, kept, gone, shape[dim], blocks, dim)
        taken.append(kept + gone)
        gathered.append(gone)
        before.append(lost)
    return Weight(tuple(taken), tuple(gathered), tuple(before))


def _joined(first: Entries, second: Entries) -> Entries:
    return tuple(map(operator.add, first, second)) if second else first


def _experts(roles: Roles, axes: Axes, num_experts: int) -> tuple[Axes, Axes]:
    """(kept, gathered) axes of the expert dim: ep in front, whatever was there."""
    unknown = [axis for axis in roles.real(axes) if axis not in roles.slab]
    if unknown:
        say_once(
            f"rhs: {roles.named(unknown)} on the expert dim shards neither experts nor tokens of "
            f"{roles.owner}: replicated"
        )
    ep = roles.real(roles.ep)
    fsdp = tuple(axis for axis in roles.real(axes) if axis in roles.outer)
    if num_experts % roles.size(ep + fsdp):
        raise InvalidArgumentError(
            f"{num_experts} experts do not divide over the axes {roles.named(ep + fsdp)} of the "
            f"expert dim ({roles.size(ep + fsdp)} shards)",
            argument="rhs",
        )
    return ep, fsdp


def _inner(roles: Roles, axes: Axes, dim: int) -> tuple[Axes, Axes]:
    """(kept, gathered) axes of another dim."""
    real = roles.real(axes)
    misplaced = [axis for axis in real if axis in roles.ep]
    if misplaced:
        raise InvalidArgumentError(
            f"rhs has the ep axis {roles.named(misplaced)} on dim {dim}; the ep axes "
            f"{roles.named(roles.ep)} of {roles.owner} shard experts, which are dim 0",
            argument="rhs",
        )
    gone = tuple(axis for axis in real if axis in roles.outer)
    return tuple(axis for axis in real if axis not in gone), gone


def whole_blocks(
    roles: Roles,
    kept: Axes,
    gone: Axes,
    size: int,
    blocks: tuple[int, ...] | None,
    dim: int,
) -> tuple[Axes, Axes, Axes]:
    """(kept, gathered, gathered before) axes of a weight's dim."""
    kept, gone = fitting(roles, kept, gone, size, None, dim)
    even = kept + gone
    kept, gone = fitting(roles, kept, gone, size, blocks, dim)
    return kept, gone, even[len(kept + gone) :]


def fitting(
    roles: Roles,
    kept: Axes,
    gone: Axes,
    size: int,
    blocks: tuple[int, ...] | None,
    dim: int,
) -> tuple[Axes, Axes]:
    """Those axes that leave whole blocks on every shard; the others are gathered before the op."""
    before = kept + gone
    while (kept or gone) and not _divides(roles, size, kept + gone, blocks, dim):
        kept, gone = (kept, gone[:-1]) if gone else (kept[:-1], gone)
    lost = before[len(kept + gone) :]
    if lost:
        unit = 1 if blocks is None else blocks[dim]
        what = f"multiples of {unit} on every shard" if unit > 1 else "equal shards"
        say_once(
            f"rhs: dim {dim} of size {size} over {roles.named(before)} does not leave {what}: "
            f"{roles.named(lost)} is gathered before the op"
        )
    return kept, gone


def _divides(roles: Roles, size: int, axes: Axes, blocks: tuple[int, ...] | None, dim: int) -> bool:
    """Whether `axes` cut a dim into equal shards of whole blocks."""
    unit = 1 if blocks is None else blocks[dim]
    return not axes or size % (roles.size(axes) * unit) == 0


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
