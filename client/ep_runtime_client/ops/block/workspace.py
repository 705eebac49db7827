"""Sizes of the block call: rows of its workspace, rows kept for backward, and its bytes.

The native library has the same formulas and refuses a workspace that is too small.

Letters: T, K, H, M, R as in `ops/__init__.py`, R ranks of the EP group; L experts of a rank,
C capacity, N columns of the first product (2M gated, else M), W rows of the workspace.
"""

from __future__ import annotations

import dataclasses
from math import ceil

from ep_runtime.layout import align_up

FACTOR = 1.5  # even shares that the workspace holds
_ROWS = 128  # of a tile of the kernels
_REGION = 1024  # bytes that a region begins at a multiple of
_INT = 4  # bytes of an int32, and of a weight


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one block call on a rank. Hashable.

    Attributes:
        tokens: T of a rank.
        top_k: K.
        ranks: R.
        experts: L.
        alignment: of each expert's zone.
        workspace: W.
        kept: rows of the first product that forward keeps for backward; 0 keeps none.
        part: tokens of a rank in each part of a call whose rows do not fit; 0 where all always do.
    """

    tokens: int
    top_k: int
    ranks: int
    experts: int
    alignment: int
    workspace: int
    kept: int
    part: int

    @property
    def parts(self) -> int:
        """Parts of a call whose rows do not fit; 0 where all always do."""
        return -(-self.tokens // self.part) if self.part else 0


def rows_of(
    *,
    tokens: int,
    top_k: int,
    ranks: int,
    experts: int,
    alignment: int,
    capacity: int,
    keep_factor: float | None,
    factor: float = FACTOR,
) -> Rows:
    """The rows of a call.

    Args:
        tokens: T of a rank.
        top_k: K.
        ranks: R.
        experts: L.
        alignment: rows that zones are multiples of.
        capacity: C.
        keep_factor: even shares that are kept; None keeps nothing.
        factor: even shares that the workspace holds.
    """
    padding = experts * (alignment - 1)

    def shares(factor: float) -> int:
        return align_up(ceil(factor * tokens * top_k) + padding, _ROWS)

    of_one_token = ranks * min(top_k, experts)
    workspace = min(capacity, max(shares(factor), experts * alignment + of_one_token))
    kept = 0 if keep_factor is None else min(workspace, shares(keep_factor))
    part = 0 if workspace >= capacity else max(1, (workspace - padding) // of_one_token)
    return Rows(tokens, top_k, ranks, experts, alignment, workspace, kept, part)


def forward_bytes(rows: Rows, hidden: int, inner: int, columns: int, itemsize: int) -> int:
    """Bytes of the workspace of a forward call.

    Args:
        rows: of the call.
        hidden: H.
        inner: M on this device.
        columns: N on this device.
        itemsize: of the rows' dtype.
    """
    row = rows.workspace * itemsize
    regions = [*_shared(rows), row * hidden, row * inner]
    if rows.kept != rows.workspace or rows.parts:
        regions.append(row * columns)
    return _total(regions)


def backward_bytes(rows: Rows, hidden: int, inner: int, columns: int, itemsize: int) -> int:
    """Bytes of the workspace of a backward call; arguments as in `forward_bytes`."""
    row = rows.workspace * itemsize
    gradients_of_weights = _INT * rows.workspace
    products = [row * width for width in (hidden, hidden, columns, inner, inner)]
    return _total([*_shared(rows), gradients_of_weights, *products])


def _shared(rows: Rows) -> list[int]:
    """Regions of both directions: control, the plan of a part, the weights of rows."""
    slots, ints = rows.part * rows.top_k, rows.workspace
    plan = [slots] * 3 + [4 * rows.ranks, rows.ranks * rows.part + 1, ints, ints]
    plan += [rows.experts, rows.experts, 1]
    return [
        4096 + 16 * rows.experts,
        *(_INT * count for count in plan if rows.parts),
        _INT * rows.workspace,
    ]


def _total(regions: list[int]) -> int:
    return sum(align_up(size, _REGION) for size in regions)
