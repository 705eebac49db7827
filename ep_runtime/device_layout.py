"""Layout of windows in device memory: the rows of a lane, and the flags behind the lanes.

`csrc/cuda/device/device_group.h` has the same layout of flags. On a GPU, ranks synchronize through
flags in each other's windows, not on the board. Each lane has these flags, and each source writes
only its own part of them: calls [N] lines, counts [N] lines, entries [N][blocks of prepare] words,
ready [N][T] words. Verdicts of groups with on_overflow="error" follow all lanes: [2][W] lines.
Letters: `board.py`.
"""

from __future__ import annotations

import dataclasses
import functools

from ep_runtime.board_abi import PAGE_BYTES
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layout import align_up, packed_columns
from ep_runtime.specs import DTYPE_BYTES, MAX_EXPERTS, GroupSpec

FLAG_LINE_BYTES = 128
MAX_PREPARE_BLOCKS = 64
VERDICT_SLOTS = 2
# A lane has room for all rows of at least this many ranks.
LEAST_SOURCES = 4
# If uniform routing sends a token to more than this share of the nodes, all rows are sent.
COUNTED_SHARE = 0.95
COUNTED_SHARE_OF_RANKS = 0.75  # for nodes of one rank (see `rails.py`)
# Limits of the kernels, as in device_group.h.
MAX_RANKS = 32
MAX_TOP_K = 32
MIN_LANES = 2
# Copies of experts, as in copy_experts.cu and copy_experts.h.
COPY_CHUNK_BYTES = 64 << 10
MAX_SPARE = 256
# With fewer rows of an expert on average, computing rows takes less time than copying its weights.
LEAST_ROWS_COPIED = 1024


def on_device(spec: GroupSpec) -> bool:
    """Returns whether the group's windows are in GPU memory."""
    return spec.transport in ("nvlink", "nccl")


def maps_windows(spec: GroupSpec) -> bool:
    """Returns whether the ranks of an EP group are GPUs that map each other's windows."""
    return spec.transport == "nvlink" and not spec.node_size


def check_limits(spec: GroupSpec) -> None:
    """Raises InvalidArgumentError if the kernels do not support a group's sizes on GPUs."""
    if not on_device(spec):
        return
    # In a group across nodes, the daemons decide later which ranks share windows.
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
    """Returns whether ranks on different nodes count rows and send only the needed ones.

    Reading the counts costs the host some 50 us, in which a link of 50 GB/s carries 2.5 MB. So
    if uniform routing needs almost all rows, ranks send all of them.
    """
    share = 1 - (1 - 1 / spec.num_nodes) ** top_k
    enough = COUNTED_SHARE_OF_RANKS if spec.ranks_per_node == 1 else COUNTED_SHARE
    return spec.transport == "nccl" and share < enough


def lane_rows(spec: GroupSpec) -> int:
    """Returns the number of staged rows of the widest dtype in one lane, of all sources together.

    A lane has at most room for all tokens of each rank; on a device of each other rank, because
    a rank's rows to itself do not use the lane.

    If ranks map each other's windows, a lane does not grow beyond max_top_k ranks: a token's
    sums come from at most max_top_k ranks. If a rank receives more rows than fit, the call runs
    in parts (`csrc/core/memory/layout.h`, LaneRoom). Lanes are sized for at least 4 slots per
    token, because otherwise little skew would cause parts.

    If nodes count the rows that they send, the size of a lane does not depend on the number of
    nodes: a rank gets at most T * K sums for the tokens of all nodes, if nodes are equally full.
    A lane has room for half as many more; calls with more sums run in parts.
    """
    # Rounded up to 2, because fp32 partials of half the tokens use the space of all 2-byte rows.
    tokens, ranks = align_up(spec.staged_tokens, 2), spec.ranks_per_node
    apart = tokens * (ranks - 1 if on_device(spec) else ranks)
    counted = counts_rows(spec, spec.max_top_k)
    if not counted and not maps_windows(spec):
        return apart
    slots = max(spec.max_top_k, LEAST_SOURCES) * align_up(spec.max_tokens_per_rank, 2)
    # Dividing tokens into parts may add one row of each rank, so have room for these.
    return min(apart, max(slots * 3 // 2 if counted else slots, 4 * ranks))


def auto_spare(spec: GroupSpec) -> int:
    """Returns what spare_experts="auto" means for a spec without slots: L, or 0.

    L if block calls can copy experts and the group's largest calls have enough rows of each. 0 if
    `workspace` is given: calls that spread rows take room for all of them, whatever it says.
    """
    full = dataclasses.replace(spec, spare_experts=spec.experts_per_rank)
    copied = block_copies(full) and _has_rows(spec, spec.max_tokens_per_rank * spec.max_top_k)
    fits = spec.workspace == "auto" and 2 * spec.num_experts <= MAX_EXPERTS
    return full.spare_experts if copied and fits else 0


def spreads(spec: GroupSpec, slots: int, *, kernels: bool) -> bool:
    """Returns whether a call spreads the rows of overfull ranks over copies of their experts.

    If block calls can copy experts, calls without kernels do not spread. Nor do calls with too few
    rows of an expert, unless all calls of the group have too few.

    Args:
        spec: the group.
        slots: T * K of the call.
        kernels: whether the call has kernels.
    """
    if not block_copies(spec):
        return slots > 0 and composed_copies(spec)
    most = spec.max_tokens_per_rank * spec.max_top_k
    return slots > 0 and kernels and (_has_rows(spec, slots) or not _has_rows(spec, most))


def _has_rows(spec: GroupSpec, slots: int) -> bool:
    return slots >= LEAST_ROWS_COPIED * spec.experts_per_rank


def composed_copies(spec: GroupSpec) -> bool:
    """Returns whether a group has slots for copies of experts that block calls cannot fill."""
    return spec.spare_experts > 0 and spec.ep_size > 1 and not block_copies(spec)


def copied_chunks(spec: GroupSpec) -> int:
    """Returns the chunks of copied experts that a lane holds from each source; 0: none move so."""
    if not maps_windows(spec) or spec.spare_experts > MAX_SPARE or spec.ep_size == 1:
        return 0
    lane = lane_rows(spec) * spec.hidden_size * DTYPE_BYTES[spec.max_token_dtype]
    return min(lane // (spec.ep_size - 1) // COPY_CHUNK_BYTES, spec.max_tokens_per_rank)


def block_copies(spec: GroupSpec) -> bool:
    """Returns whether block calls can copy experts to the slots of a group.

    With fewer slots than experts a workspace might lack room for the rows, and calls in chunks do
    not support copies.
    """
    return spec.spare_experts >= spec.experts_per_rank and copied_chunks(spec) > 0


@functools.lru_cache(maxsize=256)
def packs(spec: GroupSpec, tokens: int) -> bool:
    """Returns whether a call with `tokens` staged tokens per rank may not fit a lane."""
    return (spec.ranks_per_node - 1) * align_up(tokens, 2) > lane_rows(spec)


def count_columns(spec: GroupSpec, tokens: int) -> int:
    """Returns the length of a plan's recv_count for `tokens` staged tokens per rank.

    The length is four, plus counts of all pairs of ranks if rows are packed. Between nodes,
    packed rows also need the counts of each node's pairs.
    """
    if not packs(spec, tokens):
        return 4
    columns = packed_columns(spec.ranks_per_node)
    return columns + (spec.num_nodes * (columns - 4) if spec.node_size else 0)


def flag_bytes(spec: GroupSpec) -> int:
    """Returns the number of bytes behind the lanes of one world rank's window."""
    ready = align_up(spec.staged_tokens * 4, FLAG_LINE_BYTES)
    source = 2 * FLAG_LINE_BYTES + MAX_PREPARE_BLOCKS * 4 + ready
    lane = align_up(spec.ranks_per_node * source, PAGE_BYTES)
    verdicts = VERDICT_SLOTS * spec.world_size * FLAG_LINE_BYTES
    return align_up(spec.lanes * lane + verdicts, PAGE_BYTES)
