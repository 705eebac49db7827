"""Sizes of the workspace in which a block call keeps its rows: how many, in how many parts, bytes.

`ep.moe` on GPUs is one call forward and one backward; the experts' rows lie in memory that the call
has only while it runs. That memory is for W rows, a factor of the even share, and not for the C
rows of the worst case. Where a routing asks any rank for more than W, the call runs its tokens in
parts: results are the same, and no row is dropped. `csrc/` has the same sum of bytes.

Pure Python integers, like `layout.py`. Letters: T tokens of one rank, K top_k, N ranks of one EP
group, L experts of one rank, C rows of one slab, H hidden, M expert FFN width.
"""

from __future__ import annotations

import dataclasses
from math import ceil, isfinite
from numbers import Integral, Real
from typing import Literal, NamedTuple

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layout import align_up, packed_columns

# Values of the setting `workspace`: "auto", a factor of the even share, or bytes.
Setting = Literal["auto"] | float | int

AUTO_FACTOR = 1.5
# More ranks than any mesh has: the workspace then holds all rows that a group can send.
MAX_FACTOR = 1024.0
MAX_BYTES = 1 << 60
KEEPS = ("first", "nothing")
# How 8-bit matmuls scale operands; "none" for matmuls without quantization.
Scaling = Literal["none", "tensor", "block"]

# To which zones of experts are aligned in a workspace, whatever a layer's slabs have: products take
# zones of any size, and what alignment adds would be written, multiplied and saved.
ROW_ALIGNMENT = 1

_TILE_ROWS = 128  # of a product; W and the kept rows are multiples where C is not less
_REGION_BYTES = 1024  # to which every region is rounded up
_CONTROL_BYTES = 4096  # flags, then 16 bytes of each expert
_SCALED_VALUES = 128  # of a row, that share a block's scale
_PADDED_TO = 128  # rows of an expert in a copy with rows along memory
_COPIED = 16  # bytes that copies of rows are multiples of


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Inputs of the sizes of a layer's block calls, for one rank.

    Attributes:
        tokens, top_k: T, K. Between nodes the tokens are those of D ranks that one sends on inside
            its node, D*T.
        ep_size, experts: N, L. Between nodes the ranks are those of one node.
        capacity, alignment: C of the call; rows to which an expert's zone is aligned in the
            workspace.
        hidden_size, mlp_dim: H, M.
        gated: the first product has a gate beside each of its M columns.
        element_bytes: of a row's elements; products of 4 bytes are in tf32.
        scaling: of 8-bit products.
        nodes: D, 1 where no rows cross between nodes.
        lane_rows: rows of a lane, which the sums of a rank's tokens arrive in.
    """

    tokens: int
    top_k: int
    ep_size: int
    experts: int
    capacity: int
    alignment: int
    hidden_size: int
    mlp_dim: int
    gated: bool = True
    element_bytes: int = 2
    scaling: Scaling = "none"
    nodes: int = 1
    lane_rows: int = 2**31 - 1

    @property
    def columns(self) -> int:
        """Columns of the first product: 2 * M if gated, else M."""
        return self.mlp_dim * (2 if self.gated else 1)

    @property
    def packed_bytes(self) -> int:
        """Bytes of a token, or of its gradient, that is quantized before it is sent: 8 bits and
        behind them the scales of their blocks. 0 if rows are sent as they are: with tensor scales,
        and where scales fill no whole copies."""
        scales = 4 * -(-self.hidden_size // _SCALED_VALUES)
        if self.scaling != "block" or self.hidden_size % _COPIED or scales % _COPIED:
            return 0
        return self.hidden_size + scales

    @property
    def even_share(self) -> int:
        """Rows that every rank receives where the routing is even, zones not yet aligned: T * K of
        its own T, whatever the nodes."""
        return self.tokens // self.nodes * self.top_k

    @property
    def least_rows(self) -> int:
        """The fewest rows W: one token of every rank fits, wherever it goes."""
        least = self.experts * self.alignment + self._rows_of_token
        return min(self.capacity, align_up(least, _TILE_ROWS))

    @property
    def _rows_of_token(self) -> int:
        """Rows of one rank at most where every rank has one token; zones not aligned.

        All K slots, though a rank may have fewer experts: one may be there more than once.
        """
        return self.ep_size * self.top_k

    def rows_of_factor(self, factor: float) -> int:
        """Rows of that many even shares with their zones aligned, at most C."""
        rows = factor * self.even_share
        if rows >= self.capacity:  # also for a float past every integer, such as inf
            return self.capacity
        return min(self.capacity, align_up(ceil(rows) + self._padding, _TILE_ROWS))

    @property
    def _padding(self) -> int:
        return self.experts * (self.alignment - 1)

    def part_tokens(self, rows: int) -> int:
        """P, tokens of each rank in one part: wherever they go, no rank has over `rows` of them, or
        more sums than its lane holds.

        0 if `rows` are C and a lane holds all sums: then no call has parts.
        """
        sums = min(self.top_k, self.ep_size - 1)  # of a token, that come from other ranks
        # Even: half of them may have sums that take two rows each.
        summed = self.lane_rows // sums // 2 * 2 if sums > 0 else self.tokens
        if rows < self.capacity:
            return min((rows - self._padding) // self._rows_of_token, summed)
        return summed if summed < self.tokens else 0

    def parts(self, rows: int) -> int:
        """Parts of a call whose rows do not fit: ceil(T / P). 0 if all always fit."""
        part = self.part_tokens(rows)
        return -(-self.tokens // part) if part else 0


class Workspace(NamedTuple):
    """Sizes of a layer's block calls on one rank.

    Attributes:
        rows: W, rows that a call holds at once.
        kept_rows: rows of the first product that forward keeps for backward.
        part_tokens: P, tokens of each rank in one part; 0 if no call has parts.
        parts: parts of a call whose rows are more than W; 0 if none can be.
        forward_bytes, backward_bytes: of the call's workspace.
        kept_bytes: of the kept rows, from forward to backward.
    """

    rows: int
    kept_rows: int
    part_tokens: int
    parts: int
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int


def check_setting(workspace: Setting) -> Setting:
    """The group setting as a spec holds it, so that a factor and bytes are never equal.

    Args:
        workspace: "auto"; a float over 0, a factor of the even share, at most the worst case; or
            an int over 0, bytes.

    Returns:
        "auto", a float of at most MAX_FACTOR, or an int above it.

    Raises:
        InvalidArgumentError: it is none of these.
    """
    if isinstance(workspace, str) and workspace == "auto":
        return "auto"
    number = isinstance(workspace, Real) and not isinstance(workspace, bool)
    if not number or not workspace > 0:  # NaN is not
        raise InvalidArgumentError(
            'workspace must be "auto", a float over 0 (a factor of the even share of rows) or an '
            f"int over 0 (bytes), got {workspace!r}",
            argument="workspace",
        )
    if not isinstance(workspace, Integral):
        return float(min(workspace, MAX_FACTOR))
    if not _CONTROL_BYTES <= workspace <= MAX_BYTES:
        raise InvalidArgumentError(
            f"workspace={workspace} is an int, so bytes, which must be {_CONTROL_BYTES} to "
            f"{MAX_BYTES}; a factor of the even share is a float, {workspace}.0",
            argument="workspace",
        )
    return int(workspace)


def check_keep(keep: str, keep_factor: float) -> None:
    """Raises InvalidArgumentError unless `ep.moe` supports them."""
    if keep not in KEEPS:
        raise InvalidArgumentError(f"keep must be one of {KEEPS}, got {keep!r}", argument="keep")
    number = isinstance(keep_factor, Real) and not isinstance(keep_factor, bool)
    if not (number and isfinite(keep_factor) and keep_factor > 0):
        raise InvalidArgumentError(
            f"keep_factor must be a finite factor over 0, got {keep_factor!r}",
            argument="keep_factor",
        )


def of_block(
    sizes: BlockSizes,
    workspace: Setting = "auto",
    *,
    keep: str = "first",
    keep_factor: float = 1.25,
) -> Workspace:
    """Sizes of a layer's block calls.

    Args:
        sizes: of the layer, and of the call's tokens.
        workspace: the group setting, as `check_setting` returns it. Of bytes W is the largest with
            which the larger of both calls fits.
        keep: "first" keeps rows of the first product for backward, "nothing" none.
        keep_factor: so many even shares of them; more than W are never kept.

    Returns:
        Workspace.

    Raises:
        InvalidArgumentError: so few bytes hold no call of these sizes; it says the least. Or keep
            and keep_factor are no such.

    Cost: arithmetic on sizes.
    """
    check_keep(keep, keep_factor)
    rows = _rows(sizes, workspace)
    kept = min(rows, sizes.rows_of_factor(keep_factor)) if keep == "first" else 0
    return Workspace(
        rows=rows,
        kept_rows=kept,
        part_tokens=sizes.part_tokens(rows),
        parts=sizes.parts(rows),
        forward_bytes=forward_bytes(sizes, rows, kept),
        backward_bytes=backward_bytes(sizes, rows),
        kept_bytes=kept * sizes.columns * sizes.element_bytes,
    )


def _rows(sizes: BlockSizes, workspace: Setting) -> int:
    """W."""
    if isinstance(workspace, int):
        return _rows_in_bytes(sizes, workspace)
    factor = AUTO_FACTOR if isinstance(workspace, str) else workspace
    return max(sizes.rows_of_factor(factor), sizes.least_rows)


def _rows_in_bytes(sizes: BlockSizes, limit: int) -> int:
    """The most rows whose calls fit: C, or the largest multiple of a tile."""

    def fits(rows: int) -> bool:
        return largest_bytes(sizes, rows) <= limit

    least = sizes.least_rows
    if fits(sizes.capacity):  # without parts, so it may need less than a few rows fewer
        return sizes.capacity
    if not fits(least):
        raise InvalidArgumentError(
            f"workspace={limit} bytes hold no block call of {sizes.tokens} tokens per rank, "
            f"top_k={sizes.top_k}, {sizes.experts} experts per rank, hidden size "
            f"{sizes.hidden_size} and mlp_dim {sizes.mlp_dim}: the least is "
            f"{min(largest_bytes(sizes, rows) for rows in (least, sizes.capacity))}",
            argument="workspace",
        )
    low, high = least // _TILE_ROWS, -(-sizes.capacity // _TILE_ROWS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _TILE_ROWS) else (low, middle)
    return low * _TILE_ROWS


def forward_bytes(sizes: BlockSizes, rows: int, kept_rows: int) -> int:
    """Bytes of the forward call's workspace with W = `rows`.

    Tokens (in whose place the experts' outputs come), activations, and the first product unless
    all of it is kept, which an array outside the workspace holds. With block scales also this
    rank's tokens, quantized before they are sent; of f32 rows a weight, transposed.
    """
    h, m, n, e = sizes.hidden_size, sizes.mlp_dim, sizes.columns, sizes.element_bytes
    whole = kept_rows == rows and sizes.parts(rows) == 0
    regions = [rows * 4, rows * h * e, 0 if whole else rows * n * e]
    if sizes.scaling == "none":
        regions += [_weights_32(sizes), rows * m * e]
        return _common_bytes(sizes, rows) + _total(regions)
    # Quantized activations reuse the memory of quantized tokens.
    narrow = max(_total(_quantized(sizes, rows, width)) for width in (h, m))
    regions += [_sent(sizes), 4 * sizes.experts]
    return _common_bytes(sizes, rows) + _total(regions) + narrow


def backward_bytes(sizes: BlockSizes, rows: int) -> int:
    """Bytes of the backward call's workspace with W = `rows`.

    Weights of rows and their gradients, tokens, gradients of outputs and then of tokens, gradients
    of the first product, activations and their gradients; with f32 rows also the transposed copies
    for weight gradients.
    """
    h, n, e = sizes.hidden_size, sizes.columns, sizes.element_bytes
    if sizes.scaling != "none":
        return _common_bytes(sizes, rows) + _quantized_backward_bytes(sizes, rows)
    regions = [rows * 4, rows * 4, *(rows * width * e for width in (h, h, n)), _weights_32(sizes)]
    return _common_bytes(sizes, rows) + _total(regions) + _inner_backward_bytes(sizes, rows)


def _weights_32(sizes: BlockSizes) -> int:
    """Bytes of the larger weight, transposed: of f32 rows, whose forward products take it so."""
    if sizes.element_bytes != 4:
        return 0
    return 4 * sizes.experts * sizes.columns * sizes.hidden_size


def _inner_backward_bytes(sizes: BlockSizes, rows: int) -> int:
    """Bytes for activations and their gradients, and with f32 rows for transposed copies.

    The tf32 matmuls of weight gradients read transposed copies. Those of tokens and of outputs'
    gradients share a place; that of activations replaces their gradients, and that of the first
    product's gradients replaces all three.
    """
    h, m, n, e = sizes.hidden_size, sizes.mlp_dim, sizes.columns, sizes.element_bytes
    if e != 4:
        return _total([rows * m * e, rows * m * e])
    copied = _copied_rows(sizes, rows)
    late = max(_total([rows * m * e, copied * m * e]), _total([copied * n * e]))
    return _total([copied * h * e]) + late


def _quantized_backward_bytes(sizes: BlockSizes, rows: int) -> int:
    """Returns `backward_bytes` for 8-bit matmuls.

    Quantized gradients of the first product replace those of outputs and activations. Operands of
    the first weight's gradient replace the first product and the gradients of activations. The
    transposed first weight, and operands of the second weight's gradient, replace the tokens, whose
    place later holds their gradients.
    """
    h, m, n, e = sizes.hidden_size, sizes.mlp_dim, sizes.columns, sizes.element_bytes
    first, tokens, outer, inner = (_quantized(sizes, rows, width) for width in (n, h, h, m))
    always = _total([rows * 4, rows * 4, _sent(sizes), 4 * sizes.experts, *tokens])
    narrow = max(_total([*outer, *inner]), _total(first))
    wide = max(_total([rows * n * e, rows * m * e]), _copies(sizes, rows, h, n))
    late = [_total([rows * h * e]), _total([sizes.experts * n * h]), _copies(sizes, rows, m, h)]
    return always + narrow + wide + max(late)


def _sent(sizes: BlockSizes) -> int:
    """Bytes of this rank's tokens, or of their gradients, that the call quantizes before it sends
    them. Those that came from other nodes are quantized already."""
    return sizes.tokens * sizes.packed_bytes if sizes.nodes == 1 else 0


def _quantized(sizes: BlockSizes, rows: int, width: int) -> list[int]:
    """Bytes of rows of 8 bits, and of their scales: of an expert's, or of 128 values of a row."""
    scales = sizes.experts if sizes.scaling == "tensor" else rows * -(-width // _SCALED_VALUES)
    return [rows * width, 4 * scales]


def _copies(sizes: BlockSizes, rows: int, *widths: int) -> int:
    """Bytes of a weight gradient's operands as its product takes them: with rows along memory, and
    with scales of their own where those of rows lie along a row."""
    each = _copied_rows(sizes, rows)
    regions = [width * each for width in widths]
    if sizes.scaling == "block":
        blocks = [-(-width // _SCALED_VALUES) for width in widths]
        regions += [4 * count * (each // _PADDED_TO) for count in blocks]
    return _total(regions)


def _copied_rows(sizes: BlockSizes, rows: int) -> int:
    """Values of a line of a copy with rows along memory."""
    return (rows + (_PADDED_TO - 1) * min(sizes.experts, rows)) // _PADDED_TO * _PADDED_TO


def largest_bytes(sizes: BlockSizes, rows: int) -> int:
    """Returns bytes of the larger call with W = `rows`, whatever is saved."""
    return max(forward_bytes(sizes, rows, 0), backward_bytes(sizes, rows))


def _common_bytes(sizes: BlockSizes, rows: int) -> int:
    """Control, and where calls have parts the plan of one."""
    control = _total([_CONTROL_BYTES + 16 * sizes.experts])
    if sizes.parts(rows) == 0:
        return control
    part, ranks = sizes.part_tokens(rows), sizes.ep_size
    slots, experts = 4 * part * sizes.top_k, 4 * sizes.experts
    # Its indices without the slots that stay out, then the nine arrays of its plan.
    counts = 4 * ranks * packed_columns(ranks)  # at most
    plan = [slots, slots, slots, counts, 4 * (ranks * part + 1)]
    return control + _total([*plan, 4 * rows, 4 * rows, experts, experts, 4])


def _total(regions: list[int]) -> int:
    return sum(align_up(size, _REGION_BYTES) for size in regions)
