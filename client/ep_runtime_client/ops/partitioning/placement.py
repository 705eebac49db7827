"""Decides what each mesh axis does in a matmul: sharding rules as algebra on axis names.

Nothing here touches arrays. The sharding of operands decides the sharding inside an op, the axes
over which it gathers a weight, the axes it sums over, and the sharding of results. Both modes of an
op (the rule and the shard_map) ask these functions, so they agree. `roles.py` has the roles of
axes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.partitioning.roles import (
    Entries,
    Roles,
    flat,
    padded,
    say_once,
)
from ep_runtime_client.ops.tracing.varying import Axes


@dataclasses.dataclass(frozen=True)
class Weight:
    """How an op shards and gathers a weight.

    Attributes:
        entries: axes on each dim inside the op, before it gathers.
        gathered: on each dim, the axes that the op gathers; the minor ones of its entry.
        before: on each dim, axes minor to its entry that would split a recipe's block: the weight
            is gathered over them before it is quantized.
    """

    entries: Entries
    gathered: Entries
    before: Entries = ()

    @property
    def sharding(self) -> Entries:
        """The axes on each dim of the weight itself, and of its gradient."""
        return _joined(self.entries, self.before)

    @property
    def taken_off(self) -> Entries:
        """All axes over which each dim is gathered."""
        return _joined(self.gathered, self.before)

    @functools.cached_property
    def kept(self) -> Entries:
        """Axes on each dim after the gather."""
        pairs = zip(self.entries, self.gathered, strict=True)
        return tuple(entry[: len(entry) - len(gone)] for entry, gone in pairs)

    def amax_axes(self) -> Axes:
        """Axes that split the values of one expert's amax: all axes except those on dim 0."""
        return flat(self.entries[1:])


@dataclasses.dataclass(frozen=True)
class Grouped:
    """How operands and results of grouped_gemm are sharded.

    Attributes:
        roles: what each axis shards.
        weight: how rhs is sharded.
        bias: how the bias [E, *N'] is sharded.
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
        """Entries of group_sizes."""
        return (self.roles.slab, ())


def grouped(
    roles: Roles,
    lhs: Sequence[Axes] | None,
    rhs: Sequence[Axes],
    rhs_shape: tuple[int, ...],
    *,
    bias: Sequence[Axes] = (),
    blocks: tuple[int, ...] | None = None,
    ruled: bool = False,
) -> Grouped:
    """Decides how one grouped matmul is sharded.

    Args:
        roles: what each axis shards.
        lhs: entries of the rows [R, C, K'] as they arrive; None if unknown.
        rhs: entries of the weight [E, K', *N'] as it arrives.
        rhs_shape: its global shape.
        bias: entries of the bias [E, *N'] as it arrives.
        blocks: per dim of rhs, the number that must divide its local size (block scales).
        ruled: whether the partitioner infers the results' sharding from the operands' arrival.

    Raises:
        InvalidArgumentError: an ep axis on another dim than the experts', experts that the ep and
            fsdp axes do not divide, or, for a rule, a tuple with fsdp in front of tp; names axes
            and sizes.
    """
    weight = expert_weight(roles, rhs, rhs_shape, blocks=blocks, ruled=ruled)
    rows = padded(lhs or (), 3)
    stray = [axis for axis in roles.real(rows[1]) if axis not in roles.slab]
    if stray:
        say_once(f"lhs: {roles.named(stray)} on the rows of slabs is not known: replicated")
    wanted = [a for a in roles.real(rows[2]) if a not in roles.slab]
    contracted = tuple(a for a in wanted if a not in flat(weight.entries))
    if contracted and not weight.kept[1] and _divides(roles, rhs_shape[1], contracted, blocks, 1):
        entries = list(weight.entries)
        entries[1] = contracted + entries[1]
        weight = dataclasses.replace(weight, entries=tuple(entries))
        if lhs is not None:
            say_once(
                f"lhs: {roles.named(contracted)} on K', where rhs lies whole: each device takes "
                "its part of rhs, and gradients are gathered where they are needed whole"
            )
    elif wanted and tuple(wanted) != weight.kept[1]:
        say_once(
            f"lhs: {roles.named(wanted)} on K' is not how rhs lies there "
            f"({weight.kept[1] or 'whole'}): resharded"
        )
    found = Grouped(roles, weight, expert_bias(roles, weight, bias, rhs_shape))
    if lhs is not None and not wanted and found.contracted:
        say_once(
            f"rhs: {roles.named(found.contracted)} of {roles.owner} on K', where rows lie whole: "
            "each device multiplies its part of them, and their gradient is gathered where it is "
            "needed whole"
        )
    return found


def expert_bias(
    roles: Roles, weight: Weight, entries: Sequence[Axes], rhs_shape: tuple[int, ...]
) -> Weight:
    """Shards a bias like the weight after its gather; the op gathers it over all other axes."""
    kept = (weight.kept[0], *weight.kept[2:])
    shape = (rhs_shape[0], *rhs_shape[2:])
    taken, gathered = [], []
    for dim, axes in enumerate(padded(entries, len(shape))):
        gone = tuple(axis for axis in roles.real(axes) if axis in roles.outer)
        if not _divides(roles, shape[dim], kept[dim] + gone, None, dim):
            gone = ()
        stray = [axis for axis in roles.real(axes) if axis not in kept[dim] + gone]
        if stray:
            say_once(
                f"bias: {roles.named(stray)} on dim {dim} is not how the weight lies there "
                f"({roles.named(kept[dim] + gone) or 'whole'}): resharded"
            )
        taken.append(kept[dim] + gone)
        gathered.append(gone)
    return Weight(tuple(taken), tuple(gathered))


def expert_weight(
    roles: Roles,
    entries: Sequence[Axes],
    shape: tuple[int, ...],
    *,
    blocks: tuple[int, ...] | None = None,
    ruled: bool = False,
) -> Weight:
    """Decides how a weight [E, K', *N'] is sharded; raises the errors of `grouped`."""
    given = padded(entries, len(shape))
    taken, gathered, before = [], [], []
    for dim, axes in enumerate(given):
        kept, gone = _experts(roles, axes, shape[0]) if dim == 0 else _inner(roles, axes, dim)
        real = roles.real(axes)
        if real and kept + gone != real:
            if ruled and dim > 0:
                _refuse_order(roles, dim, kept, gone)
            say_once(
                f"rhs: dim {dim} lies over {axes} and is taken over {kept + gone or 'nothing'} "
                f"({roles.named(dict.fromkeys(axes + kept + gone))}): resharded"
            )
        lost: Axes = ()
        if dim > 0 and kept + gone:
            kept, gone, lost = whole_blocks(roles, kept, gone, shape[dim], blocks, dim)
        taken.append(kept + gone)
        gathered.append(gone)
        before.append(lost)
    return Weight(tuple(taken), tuple(gathered), tuple(before))


def _refuse_order(roles: Roles, dim: int, kept: Axes, gone: Axes) -> None:
    """Raises InvalidArgumentError, because the partitioner would gather rows.

    Slabs have the gathered axes on dim 0; the partitioner drops an axis that is minor to these.
    """
    raise InvalidArgumentError(
        f"rhs dim {dim} must have {roles.named(kept)} before {roles.named(gone)}, got the other "
        f"order, so gathering rhs would gather rows too. Shard the dim over {kept + gone}, or give "
        "rhs_spec= (params_spec= of moe) or Explicit axes",
        argument="rhs",
    )


def _joined(first: Entries, second: Entries) -> Entries:
    return tuple(map(operator.add, first, second)) if second else first


def _experts(roles: Roles, axes: Axes, num_experts: int) -> tuple[Axes, Axes]:
    """Returns (kept, gathered) axes of the expert dim: ep axes first, then fsdp axes."""
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
    """Returns (kept, gathered) axes of a dim other than the experts'."""
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
    """Returns (kept, gathered, gathered before quantization) axes of a weight's dim."""
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
    """Returns axes that leave whole blocks on every shard; the op first gathers over the others."""
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
