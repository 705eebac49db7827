"""Computes the sizes of a block call's workspace: rows, parts and bytes.

`ep.moe` on GPUs is one block call forward and one backward. The workspace is memory that a call
uses for the experts' rows only while it runs. It has W rows, a factor of the even share, instead of
the C rows of the worst case. If any rank gets more than W rows, the call runs its tokens in parts,
with the same results and without dropping rows. `csrc/` computes the same bytes.

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
# More than the ranks of any mesh, so that the workspace then holds all rows of a group.
MAX_FACTOR = 1024.0
MAX_BYTES = 1 << 60
KEEPS = ("first", "nothing")
# How 8-bit matmuls scale operands; "none" for matmuls without quantization.
Scaling = Literal["none", "tensor", "block"]

# Alignment of experts' zones in a workspace, for any alignment of slabs. Matmuls here support zones
# of any size, and padding rows would cost time and memory.
ROW_ALIGNMENT = 1

_TILE_ROWS = 128  # rows of a matmul's tile; W and the saved rows are multiples unless C is less
_REGION_BYTES = 1024  # size to which each region is rounded up
_CONTROL_BYTES = 4096  # bytes of flags; 16 bytes for each expert follow
_SCALED_VALUES = 128  # values of a row that share a scale, with block scales
_PADDED_TO = 128  # in a transposed copy, each expert's rows are padded to a multiple of this
_COPIED = 16  # copies of rows are multiples of this many bytes

# Chunks of tokens between nodes. A chunk has at least so many rows of an expert, because matmuls of
# fewer rows take longer.
_CHUNKS = (2, 4, 8)
_CHUNK_ROWS = 2048
_CHUNK_S = 0.5e-3  # of a chunk's launches forward and backward, on an H200
_LINK = 50e9  # bytes/s of the network between nodes, in each direction
_MEMORY = 4e12  # bytes/s of an H200's memory


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Inputs for the sizes of a layer's block calls on one rank.

    Attributes:
        tokens: T; in a group across nodes D * T, the tokens of D ranks that one rank forwards
            within its node.
        top_k: K.
        ep_size: N; in a group across nodes, the ranks of one node.
        experts: L, with slots for copies of other ranks' experts.
        capacity: C of the call.
        alignment: rows to which an expert's zone is aligned in the workspace.
        hidden_size, mlp_dim: H, M.
        gated: the first matmul has a gate column for each of its M columns.
        element_bytes: bytes of an element of a row; matmuls of 4-byte elements use tf32.
        scaling: how 8-bit matmuls scale operands.
        nodes: D; 1 if rows stay within a node.
        lane_rows: rows of a lane, in which a rank receives the sums of its tokens.
        spare: slots among the experts, whose weights the calls keep in their workspaces.
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
    spare: int = 0

    @property
    def columns(self) -> int:
        """Columns of the first matmul's output: 2 * M if gated, else M."""
        return self.mlp_dim * (2 if self.gated else 1)

    @property
    def product_activates(self) -> bool:
        """Whether the first matmul's kernel also computes the activation.

        It needs gated rows, and 16-bit operands or block scales. With block scales, no block may
        have columns of both the gate and up.
        """
        if self.scaling == "block":
            return self.gated and self.mlp_dim % _SCALED_VALUES == 0
        return self.gated and self.scaling == "none" and self.element_bytes == 2

    @property
    def packed_bytes(self) -> int:
        """Bytes of a token, or its gradient, that is quantized before it is sent.

        The 8-bit values come first, then the scales of their blocks. 0 if rows are sent without
        quantization: with tensor scales, and if the sizes are not multiples of a copy.
        """
        scales = 4 * -(-self.hidden_size // _SCALED_VALUES)
        if self.scaling != "block" or self.hidden_size % _COPIED or scales % _COPIED:
            return 0
        return self.hidden_size + scales

    def node_chunks(self, on_overflow: str) -> int:
        """Chunks of the tokens, each of which crosses between nodes while experts process another.

        A scale of all rows of an expert would differ between chunks, so with tensor scales, as in
        groups on one node, there is one chunk; and with `on_overflow` "error", because the host
        waits for prepare's verdict.
        """
        if self.nodes == 1 or self.scaling == "tensor" or on_overflow == "error":
            return 1
        tokens, row = self.tokens // self.nodes, self.hidden_size * self.element_bytes
        most = self.even_share // (self.experts * _CHUNK_ROWS)
        # Tokens cross forward and backward, gradients of sums backward, and sums return from both.
        # Each chunk adds its gradients of weights to f32 sums.
        reached = (self.nodes - 1) * (1 - (1 - 1 / self.nodes) ** self.top_k)  # of other nodes
        crossing = tokens * (3 * (self.packed_bytes or row) + 2 * row) * reached / _LINK
        weights = self.experts * self.hidden_size * (self.columns + self.mlp_dim)
        adding = 2 * 4 * weights / _MEMORY

        def saved(count: int) -> float:
            return (1 - 1 / count) * crossing - (count - 1) * (_CHUNK_S + adding)

        counts = [count for count in _CHUNKS if count <= most and tokens % count == 0]
        return max([1, *counts], key=saved)

    @property
    def even_share(self) -> int:
        """Rows that each rank receives if routing is even, without alignment: T * K.

        T is one rank's own tokens, also in a group across nodes.
        """
        return self.tokens // self.nodes * self.top_k

    @property
    def least_rows(self) -> int:
        """The smallest W: one token of each rank fits with any routing."""
        least = self.experts * self.alignment + self._rows_of_token
        return min(self.capacity, align_up(least, _TILE_ROWS))

    @property
    def _rows_of_token(self) -> int:
        """Most rows of one rank if each rank has one token, without alignment.

        Counts all K slots, even if a rank has fewer experts, because a slot may repeat an expert.
        """
        return self.ep_size * self.top_k

    def rows_of_factor(self, factor: float) -> int:
        """Returns the rows of `factor` even shares with aligned zones, at most C."""
        rows = factor * self.even_share
        if rows >= self.capacity:  # also for infinite or huge floats
            return self.capacity
        return min(self.capacity, align_up(ceil(rows) + self._padding, _TILE_ROWS))

    @property
    def _padding(self) -> int:
        return self.experts * (self.alignment - 1)

    def part_tokens(self, rows: int) -> int:
        """Returns P, tokens of each rank in one part of a call with W = `rows`.

        With P tokens of each rank and any routing, no rank gets more than `rows` rows, or more sums
        than its lane holds. 0 if no call needs parts: `rows` is C and a lane holds all sums.
        """
        sums = min(self.top_k, self.ep_size - 1)  # a token's sums from other ranks
        # Made even, because the sums of half of the tokens may take two rows each.
        summed = self.lane_rows // sums // 2 * 2 if sums > 0 else self.tokens
        if rows < self.capacity:
            return min((rows - self._padding) // self._rows_of_token, summed)
        return summed if summed < self.tokens else 0

    def parts(self, rows: int) -> int:
        """Returns ceil(T / P), the parts of a call whose rows do not fit; 0 if rows always fit."""
        part = self.part_tokens(rows)
        return -(-self.tokens // part) if part else 0


class Workspace(NamedTuple):
    """Sizes of a layer's block calls on one rank.

    Attributes:
        rows: W, rows that a call holds at once.
        kept_rows: rows of the first matmul's output that forward saves for backward.
        part_tokens: P, tokens of each rank in one part; 0 if no call needs parts.
        parts: parts of a call with more than W rows; 0 if no call needs parts.
        forward_bytes, backward_bytes: bytes of the workspace of the forward and backward call.
        kept_bytes: bytes of the saved rows, from forward to backward.
    """

    rows: int
    kept_rows: int
    part_tokens: int
    parts: int
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int


def check_setting(workspace: Setting) -> Setting:
    """Checks and normalizes the group setting, so that a factor never equals bytes.

    Args:
        workspace: "auto"; a float over 0 as a factor of the even share (values above the worst
            case are reduced to it); or an int over 0 as bytes.

    Returns:
        "auto", a float of at most MAX_FACTOR, or an int above it.

    Raises:
        InvalidArgumentError: `workspace` is none of these.
    """
    if isinstance(workspace, str) and workspace == "auto":
        return "auto"
    number = isinstance(workspace, Real) and not isinstance(workspace, bool)
    if not number or not workspace > 0:  # also refuses NaN
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
    """Raises InvalidArgumentError unless `ep.moe` supports these settings."""
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
    """Computes the sizes of a layer's block calls.

    Args:
        sizes: sizes of the layer and of the call's tokens.
        workspace: the group setting, as `check_setting` returns it. If it is bytes, W is the
            largest number of rows with which both calls fit.
        keep: "first" saves rows of the first matmul's output for backward, "nothing" saves none.
        keep_factor: limit of the saved rows in even shares; at most W rows are saved.

    Returns:
        Workspace.

    Raises:
        InvalidArgumentError: `workspace` has too few bytes for a call, in which case the message
            has the minimum; or `keep` or `keep_factor` is invalid.

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
    """Returns W, the number of rows of the workspace."""
    if isinstance(workspace, int):
        return _rows_in_bytes(sizes, workspace)
    factor = AUTO_FACTOR if isinstance(workspace, str) else workspace
    return max(sizes.rows_of_factor(factor), sizes.least_rows)


def _rows_in_bytes(sizes: BlockSizes, limit: int) -> int:
    """Returns the most rows whose calls fit `limit` bytes: C, or the largest multiple of a tile."""

    def fits(rows: int) -> bool:
        return largest_bytes(sizes, rows) <= limit

    least = sizes.least_rows
    if fits(sizes.capacity):  # needs no parts, so may use fewer bytes than fewer rows would
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
    """Returns the bytes of the forward call's workspace with W = `rows`.

    The workspace has tokens (which the experts' outputs later replace), activations, and the
    first matmul's output. An array outside the workspace has all rows of this output that are
    saved. Other rows of it are not stored if the matmul also computes the activation. Block scales
    add this rank's quantized tokens; f32 rows add a transposed weight.
    """
    h, m, n, e = sizes.hidden_size, sizes.mlp_dim, sizes.columns, sizes.element_bytes
    whole = kept_rows == rows and sizes.parts(rows) == 0
    unused = whole or sizes.product_activates
    narrow = e if sizes.scaling == "none" else 1
    regions = [rows * 4, rows * h * e, 0 if unused else rows * n * e, *_slots(sizes, narrow)]
    if sizes.scaling == "none":
        regions += [_weights_32(sizes), rows * m * e]
        return _common_bytes(sizes, rows) + _total(regions)
    # Quantized activations reuse the memory of quantized tokens, unless one kernel reads and writes
    # them.
    each = [_total(_quantized(sizes, rows, width)) for width in (h, m)]
    narrow = sum(each) if sizes.product_activates else max(each)
    regions += [_sent(sizes), 4 * sizes.experts]
    return _common_bytes(sizes, rows) + _total(regions) + narrow


def backward_bytes(sizes: BlockSizes, rows: int) -> int:
    """Returns the bytes of the backward call's workspace with W = `rows`.

    The workspace has:
    - combine weights of rows and their gradients
    - tokens
    - gradients of outputs, later of tokens
    - gradients of the first matmul's output
    - activations and their gradients
    - with f32 rows, the transposed copies for weight gradients
    """
    h, n, e = sizes.hidden_size, sizes.columns, sizes.element_bytes
    if sizes.scaling != "none":
        slots = _total(_slots(sizes, 4))  # gradients may be f32
        return _common_bytes(sizes, rows) + slots + _quantized_backward_bytes(sizes, rows)
    regions = [rows * 4, rows * 4, *(rows * width * e for width in (h, h, n)), _weights_32(sizes)]
    regions += _slots(sizes, e)
    return _common_bytes(sizes, rows) + _total(regions) + _inner_backward_bytes(sizes, rows)


def _slots(sizes: BlockSizes, value_bytes: int) -> list[int]:
    """Returns the bytes of the slots of both weights, and later of their gradients."""
    if sizes.spare == 0:
        return []
    widths = (sizes.columns, sizes.mlp_dim)
    return [sizes.spare * sizes.hidden_size * width * value_bytes for width in widths]


def _weights_32(sizes: BlockSizes) -> int:
    """Returns the bytes of the larger weight, which f32 forward matmuls read transposed."""
    if sizes.element_bytes != 4:
        return 0
    return 4 * sizes.experts * sizes.columns * sizes.hidden_size


def _inner_backward_bytes(sizes: BlockSizes, rows: int) -> int:
    """Returns bytes of activations and their gradients, and with f32 rows of transposed copies.

    The tf32 matmuls of weight gradients read transposed copies. The copies of tokens and of
    outputs' gradients use the same memory, one after the other. The copy of activations replaces
    their gradients. The copy of the first matmul's gradients replaces activations and this copy.
    """
    h, m, n, e = sizes.hidden_size, sizes.mlp_dim, sizes.columns, sizes.element_bytes
    if e != 4:
        return _total([rows * m * e, rows * m * e])
    copied = _copied_rows(sizes, rows)
    late = max(_total([rows * m * e, copied * m * e]), _total([copied * n * e]))
    return _total([copied * h * e]) + late


def _quantized_backward_bytes(sizes: BlockSizes, rows: int) -> int:
    """Returns `backward_bytes` for 8-bit matmuls.

    Arrays share memory if one is written after the last read of the other:
    - quantized gradients of the first matmul's output, with those of outputs and activations;
    - operands of the first weight's gradient, with the first matmul's output and the gradients of
      activations;
    - tokens, the transposed first weight, operands of the second weight's gradient, and gradients
      of tokens.
    """
    h, m, n, e = sizes.hidden_size, sizes.mlp_dim, sizes.columns, sizes.element_bytes
    first, tokens, outer, inner = (_quantized(sizes, rows, width) for width in (n, h, h, m))
    always = _total([rows * 4, rows * 4, _sent(sizes), 4 * sizes.experts, *tokens])
    narrow = max(_total([*outer, *inner]), _total(first))
    wide = max(_total([rows * n * e, rows * m * e]), _copies(sizes, rows, h, n))
    late = [_total([rows * h * e]), _total([sizes.experts * n * h]), _copies(sizes, rows, m, h)]
    return always + narrow + wide + max(late)


def _sent(sizes: BlockSizes) -> int:
    """Returns bytes of this rank's tokens, or gradients, that the call quantizes before sending.

    0 between nodes, because tokens from other nodes arrive quantized.
    """
    return sizes.tokens * sizes.packed_bytes if sizes.nodes == 1 else 0


def _quantized(sizes: BlockSizes, rows: int, width: int) -> list[int]:
    """Returns bytes of 8-bit rows, and of their scales per expert or per 128 values of a row."""
    scales = sizes.experts if sizes.scaling == "tensor" else rows * -(-width // _SCALED_VALUES)
    return [rows * width, 4 * scales]


def _copies(sizes: BlockSizes, rows: int, *widths: int) -> int:
    """Returns the bytes of transposed operands of a weight gradient's matmul.

    With block scales, the copies have separate scales, because blocks run along the rows.
    """
    each = _copied_rows(sizes, rows)
    regions = [width * each for width in widths]
    if sizes.scaling == "block":
        blocks = [-(-width // _SCALED_VALUES) for width in widths]
        regions += [4 * count * (each // _PADDED_TO) for count in blocks]
    return _total(regions)


def _copied_rows(sizes: BlockSizes, rows: int) -> int:
    """Returns the length of a line of a transposed copy, with each expert's rows padded."""
    return (rows + (_PADDED_TO - 1) * min(sizes.experts, rows)) // _PADDED_TO * _PADDED_TO


def largest_bytes(sizes: BlockSizes, rows: int) -> int:
    """Returns the larger workspace of forward and backward, with W = `rows` and no saved rows."""
    return max(forward_bytes(sizes, rows, 0), backward_bytes(sizes, rows))


def _common_bytes(sizes: BlockSizes, rows: int) -> int:
    """Returns the bytes of control data, and of one part's plan if calls have parts."""
    control = _total([_CONTROL_BYTES + 16 * sizes.experts])
    if sizes.parts(rows) == 0:
        return control
    part, ranks = sizes.part_tokens(rows), sizes.ep_size
    slots, experts = 4 * part * sizes.top_k, 4 * sizes.experts
    # The part's indices, without slots of other parts, then the nine arrays of its plan.
    counts = 4 * ranks * packed_columns(ranks)  # the upper limit
    plan = [slots, slots, slots, counts, 4 * (ranks * part + 1)]
    return control + _total([*plan, 4 * rows, 4 * rows, experts, experts, 4])


def _total(regions: list[int]) -> int:
    return sum(align_up(size, _REGION_BYTES) for size in regions)
