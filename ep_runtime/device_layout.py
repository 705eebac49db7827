"""Layout of windows in device memory: rows of a lane, and flags.

Flags lie behind the lanes, as `csrc/cuda/device/device_group.h` says.

On a GPU ranks meet by flags in each other's windows and not on the board. Flags of one lane, each
part of a source written by that source alone: calls [N] lines, counts [N] lines, entries
[N][blocks of prepare] words, ready [N][T] words. Behind all lanes the verdicts of groups with
on_overflow="error": [2][W] lines. Letters: `board.py`.
"""

from __future__ import annotations

import functools

from ep_runtime.board_abi import PAGE_BYTES
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layout import align_up, packed_columns
from ep_runtime.specs import MAX_EXPERTS, GroupSpec

FLAG_LINE_BYTES = 128
MAX_PREPARE_BLOCKS = 64
VERDICT_SLOTS = 2
# Up to this many ranks a lane has room for all their rows.
LEAST_SOURCES = 4
# Shares of nodes that need a token, by uniform routing, above which all rows cross.
COUNTED_SHARE = 0.95
COUNTED_SHARE_OF_RANKS = 0.75  # of nodes of one rank, which overlap more (`rails.py`)
# Limits of the kernels, as in device_group.h.
MAX_RANKS = 32
MAX_TOP_K = 32
MIN_LANES = 2


def on_device(spec: GroupSpec) -> bool:
    """Whether the group's windows are memory of GPUs."""
    return spec.transport in ("nvlink", "nccl")


def check_limits(spec: GroupSpec) -> None:
    """Raises InvalidArgumentError for a group on GPUs with sizes that kernels do not support."""
    if not on_device(spec):
        return
    # Between nodes the daemons say later which ranks share windows.
    together = spec.ranks_per_node if spec.transport == "nvlink" or spec.node_size else 1
    most = f'transport="{spec.transport}" on GPUs takes at most'
    for argument, got, limit, of in (
        ("ep_axis", together, MAX_RANKS, "ranks that share windows"),
        ("max_top_k", spec.max_top_k, MAX_TOP_K, "experts of a token"),
        ("num_experts", together * spec.experts_per_rank, MAX_EXPERTS, "experts of those ranks"),
    ):
        if got > limit:
            raise InvalidArgumentError(
                f"{argument}: {most} {limit} {of}, got {got}", argument=argument
            )
    if spec.lanes < MIN_LANES:
        raise InvalidArgumentError(
            f'lanes must be at least {MIN_LANES} with transport="{spec.transport}" on GPUs, got '
            f"{spec.lanes}",
            argument="lanes",
        )


def counts_rows(spec: GroupSpec, top_k: int) -> bool:
    """Whether ranks of nodes of GPUs send each other the rows they must, and not always all.

    The host must read counts for it, some 50 us in which 50 GB/s carry 2.5 MB. So all rows cross
    where uniform routing needs almost all of them.
    """
    share = 1 - (1 - 1 / spec.num_nodes) ** top_k
    enough = COUNTED_SHARE_OF_RANKS if spec.ranks_per_node == 1 else COUNTED_SHARE
    return spec.transport == "nccl" and share < enough


def lane_rows(spec: GroupSpec) -> int:
    """Staged rows that one lane of a window holds, of the widest dtype, of all sources together.

    Room for all tokens of every rank, on a device of every other one, whose rows do not travel.
    Where ranks map each other's windows it does not grow with them past max_top_k: what a rank
    sums of its own tokens comes from so many ranks a token, and rows that a rank receives go
    through the lane in parts where they are more (`csrc/core/memory/layout.h`, LaneRoom). With
    fewer than 4 slots a token it is as with 4: little skew would make parts, and rows are few.

    Between nodes that count their rows it does not grow with nodes either. For the tokens of all
    nodes a rank gets at most T * K sums if nodes are equally full. There is room for half as many
    more; calls with more go in parts.
    """
    # Rounded up to 2, because fp32 partials of half the tokens use the space of all 2-byte rows.
    tokens, ranks = align_up(spec.staged_tokens, 2), spec.ranks_per_node
    apart = tokens * (ranks - 1 if on_device(spec) else ranks)
    counted = counts_rows(spec, spec.max_top_k)
    if not counted and (spec.transport != "nvlink" or spec.node_size):
        return apart
    slots = max(spec.max_top_k, LEAST_SOURCES) * align_up(spec.max_tokens_per_rank, 2)
    # Parts are shared out with up to a row of every rank in excess.
    return min(apart, max(slots * 3 // 2 if counted else slots, 4 * ranks))


@functools.lru_cache(maxsize=256)
def packs(spec: GroupSpec, tokens: int) -> bool:
    """Whether a lane lacks room for all rows of calls with so many staged tokens of a rank."""
    return (spec.ranks_per_node - 1) * align_up(tokens, 2) > lane_rows(spec)


def count_columns(spec: GroupSpec, tokens: int) -> int:
    """Returns the length of a plan's recv_count for so many staged tokens of a rank.

    Four, and if rows are packed counts of all pairs of ranks; between nodes also of each node's.
    """
    if not packs(spec, tokens):
        return 4
    columns = packed_columns(spec.ranks_per_node)
    return columns + (spec.num_nodes * (columns - 4) if spec.node_size else 0)


def flag_bytes(spec: GroupSpec) -> int:
    """Bytes behind the lanes of one world rank's window."""
    ready = align_up(spec.staged_tokens * 4, FLAG_LINE_BYTES)
    source = 2 * FLAG_LINE_BYTES + MAX_PREPARE_BLOCKS * 4 + ready
    lane = align_up(spec.ranks_per_node * source, PAGE_BYTES)
    verdicts = VERDICT_SLOTS * spec.world_size * FLAG_LINE_BYTES
    return align_up(spec.lanes * lane + verdicts, PAGE_BYTES)
