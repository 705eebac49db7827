"""Finds how the leading dims of tokens are sharded over the mesh.

Tokens are [T, H] or [B, S, H]. The group's token axes (*outer, ep) shard dim 0, or dims 0 and 1 of
3-D tokens in any way. Every shard's block is flattened to the T tokens of one slab. Slabs always
have one leading dim R over (*outer, ep).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from math import prod

from jax.sharding import PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec
from ep_runtime_client.ops.partitioning.roles import Entries, entries_of
from ep_runtime_client.ops.tracing.varying import Axes

_log = logging.getLogger("ep_runtime")

PAD_TOKENS = "ep.pad_tokens pads with unused slots"  # advice if tokens do not divide


@dataclasses.dataclass(frozen=True)
class TokenLayout:
    """Leading dims of tokens and the mesh axes on each.

    Attributes:
        lead: (T,) or (B, S), global.
        axes: token axes on each leading dim, major first.
        local: leading dims of one shard's block.
    """

    lead: tuple[int, ...]
    axes: tuple[Axes, ...]
    local: tuple[int, ...]

    @property
    def tokens_per_rank(self) -> int:
        return prod(self.local)

    def entries(self, trailing: int = 1) -> Entries:
        """Returns the axes on each dim of an array with these dims and `trailing` more dims."""
        return (*self.axes, *[()] * trailing)

    def spec(self, trailing: int = 1) -> PartitionSpec:
        """Returns the PartitionSpec of an array with these dims and `trailing` more dims."""
        return PartitionSpec(*(axes or None for axes in self.axes), *([None] * trailing))

    def within(self, group: GroupSpec, manual: Axes) -> TokenLayout:
        """Returns the layout inside `manual` axes, which no longer divide the dims."""
        sizes = group.axis_sizes
        taken = [tuple(a for a in axes if a in manual) for axes in self.axes]
        lead = tuple(
            size // prod(sizes[a] for a in axes)
            for size, axes in zip(self.lead, taken, strict=True)
        )
        free = tuple(tuple(a for a in axes if a not in manual) for axes in self.axes)
        return TokenLayout(lead, free, self.local)


def choose(
    group: GroupSpec,
    lead: tuple[int, ...],
    hints: tuple[PartitionSpec, ...] = (),
    manual: Axes = (),
    *,
    remedy: str = PAD_TOKENS,
) -> TokenLayout:
    """Chooses the layout of arrays with the leading dims `lead`.

    Args:
        group: the group; its token axes must each land on one leading dim.
        lead: (T,) or (B, S), global except along the manual axes.
        hints: known specs of the operands, the most trusted first.
        manual: axes of an enclosing shard_map; `lead` is already local along them.
        remedy: what the error tells callers to do.

    Returns:
        The layout of the first hint that has every token axis on the leading dims and divides
        them; else the first way to divide them that moves no hinted axis, preferring dim 0.

    Raises:
        InvalidArgumentError: no way divides the dims; names both sizes.
    """
    sizes = group.axis_sizes
    free = tuple(axis for axis in group.token_axes if axis not in manual)
    hint = _strongest_hint(free, len(lead), hints)
    for places in _assignments(free, len(lead), hint):
        counts = [prod(sizes[axis] for axis in axes) for axes in places]
        pairs = [divmod(size, count) for size, count in zip(lead, counts, strict=True)]
        if not any(rest for _, rest in pairs):
            return TokenLayout(lead, places, tuple(local for local, _ in pairs))
    named = {axis: sizes[axis] for axis in free}
    shards = prod(named.values())
    raise InvalidArgumentError(
        f"tokens have the leading dims {lead}, which do not divide over the {shards} "
        f"shards of the token axes {named}; {remedy}",
        argument="tokens",
        tokens=prod(lead),
        shards=shards,
    )


def _strongest_hint(
    token_axes: Axes, dims: int, hints: tuple[PartitionSpec, ...]
) -> tuple[Axes, ...]:
    """Returns the token axes on each leading dim in the hint that names most of them."""
    best: tuple[Axes, ...] = ((),) * dims
    for spec in hints:
        entries = entries_of(spec, dims)
        found = tuple(tuple(a for a in axes if a in token_axes) for axes in entries)
        if sum(map(len, found)) > sum(map(len, best)):
            best = found
    return best


def _assignments(token_axes: Axes, dims: int, hint: tuple[Axes, ...]) -> list[tuple[Axes, ...]]:
    """Lists every way to put the token axes on `dims` dims, best first.

    Hinted axes stay where they are; the others go to dim 0 first, the later axes to later dims
    first when dim 0 is too small. If no such way divides, unhinted ways follow.
    """
    ways: list[tuple[Axes, ...]] = []
    for fixed in (hint, ((),) * dims) if any(hint) else (hint,):
        hinted = {axis: dim for dim, axes in enumerate(fixed) for axis in axes}
        free = [axis for axis in token_axes if axis not in hinted]
        for choice in itertools.product(range(dims), repeat=len(free)):
            where = hinted | dict(zip(free, choice, strict=True))
            places = tuple(
                tuple(a for a in _merged_order(token_axes, fixed[dim]) if where[a] == dim)
                for dim in range(dims)
            )
            ways.append(places)
    return ways


def _merged_order(token_axes: Axes, hinted: Axes) -> Axes:
    """Returns the token axes: hinted ones in the hint's order, the others in the group's."""
    queue = list(hinted)
    return tuple(queue.pop(0) if axis in hinted else axis for axis in token_axes)


@functools.cache
def say_reshard(what: str, layer: str, given: str, wanted: str) -> None:
    """Logs once per (operand, layer, specs) that an operand is moved to another layout."""
    _log.warning(
        "%s of layer %r has the layout %s and is resharded to %s", what, layer, given, wanted
    )
