"""Decides how operands and results of `dense` are sharded: the rules without experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ep_runtime_client.ops.partitioning.placement import Weight, whole_blocks
from ep_runtime_client.ops.partitioning.roles import Entries, Roles, flat, padded
from ep_runtime_client.ops.tracing.varying import Axes


@dataclasses.dataclass(frozen=True)
class Dense:
    """How operands and results of `dense` are sharded.

    Attributes:
        lead: axes on each leading dim of x and of the output.
        kernel: how the kernel [K', N'] is sharded.
        summed: axes that split the rows; the kernel's gradient is summed over them.
        scatter: leading dim of the output over which a reduce-scatter spreads the sum over the
            contracted axes. None is a plain sum.
    """

    lead: Entries
    kernel: Weight
    summed: Axes
    scatter: int | None = None

    @property
    def contracted(self) -> Axes:
        return self.kernel.kept[0]

    @property
    def columns(self) -> Axes:
        return self.kernel.kept[1]

    @property
    def x(self) -> Entries:
        return (*self.lead, self.contracted)

    @property
    def out(self) -> Entries:
        lead = [
            axes + (self.contracted if dim == self.scatter else ())
            for dim, axes in enumerate(self.lead)
        ]
        return (*lead, self.columns)


def place(
    roles: Roles,
    x: Sequence[Axes],
    kernel: Sequence[Axes],
    kernel_shape: tuple[int, int],
    *,
    wanted: Sequence[Axes] | None = None,
    lead_shape: Sequence[int] = (),
    blocks: tuple[int, ...] | None = None,
) -> Dense:
    """Decides how y = x @ kernel is sharded.

    Args:
        roles: the mesh's axes; outer and ep do not matter here.
        x: entries of x [..., K'] as it arrives.
        kernel: entries of the kernel [K', N'] as it arrives.
        kernel_shape: its global shape.
        wanted: entries of the output, if known.
        lead_shape: x's leading dims.
        blocks: per dim of the kernel, the number that must divide its local size.

    An axis that is on x's leading dims and on the kernel is gathered off the kernel, together with
    all minor axes of its tuple. Any other axis stays: on N', or on K' of both sides.
    """
    lead = dividing(roles, x[:-1], lead_shape)
    rows = set(flat(lead))
    on_k = tuple(axis for axis in roles.real(x[-1]) if axis not in rows)
    entries, gathered, before = [], [], []
    for dim, axes in enumerate(padded(kernel, 2)):
        free = tuple(axis for axis in roles.real(axes) if axis not in on_k)
        first = next((i for i, axis in enumerate(free) if axis in rows), len(free))
        kept, gone = (on_k if dim == 0 else ()) + free[:first], free[first:]
        kept, gone, lost = whole_blocks(roles, kept, gone, kernel_shape[dim], blocks, dim)
        entries.append(kept + gone)
        gathered.append(gone)
        before.append(lost)
    taken = Weight(tuple(entries), tuple(gathered), tuple(before))
    found = Dense(lead, taken, flat(lead))
    return dataclasses.replace(found, scatter=_scattered(roles, found, wanted, lead_shape))


def dividing(roles: Roles, lead: Sequence[Axes], shape: Sequence[int]) -> Entries:
    """Returns axes on leading dims, without axes that do not divide a dim evenly."""
    real = (roles.real(axes) for axes in lead)
    if not shape:
        return tuple(real)
    pairs = zip(real, shape, strict=False)
    return tuple(axes if size % roles.size(axes) == 0 else () for axes, size in pairs)


def _scattered(
    roles: Roles, found: Dense, wanted: Sequence[Axes] | None, lead_shape: Sequence[int]
) -> int | None:
    if wanted is None or not found.contracted:
        return None
    for dim, size in enumerate(lead_shape):
        over = found.lead[dim] + found.contracted
        if roles.real(wanted[dim]) == over and size % roles.size(over) == 0:
            return dim
    return None
