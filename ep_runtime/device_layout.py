"""Flags of a window in device memory, behind its lanes, as `csrc/cuda/device/device_group.h` says.

On a GPU ranks meet by flags in each other's windows and not on the board. Flags of one lane, each
part of a source written by that source alone: calls [N] lines, counts [N] lines, entries
[N][blocks of prepare] words, ready [N][T] words. Behind all lanes the verdicts of groups with
on_overflow="error": [2][W] lines. Letters: `board.py`.
"""

from __future__ import annotations

from ep_runtime.board_abi import PAGE_BYTES
from ep_runtime.layout import align_up
from ep_runtime.specs import GroupSpec

FLAG_LINE_BYTES = 128
MAX_PREPARE_BLOCKS = 64
VERDICT_SLOTS = 2


def on_device(spec: GroupSpec) -> bool:
    """Whether the group's windows are memory of GPUs."""
    return spec.transport in ("nvlink", "nccl")


def flag_bytes(spec: GroupSpec) -> int:
    """Bytes behind the lanes of one world rank's window."""
    ready = align_up(spec.staged_tokens * 4, FLAG_LINE_BYTES)
    source = 2 * FLAG_LINE_BYTES + MAX_PREPARE_BLOCKS * 4 + ready
    lane = align_up(spec.ranks_per_node * source, PAGE_BYTES)
    verdicts = VERDICT_SLOTS * spec.world_size * FLAG_LINE_BYTES
    return align_up(spec.lanes * lane + verdicts, PAGE_BYTES)
