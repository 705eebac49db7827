"""What the custom calls mean, written slowly in numpy for one EP group.

Arrays have a leading rank dim. Only the drop rule comes from the package (`layout.kept_rows`).
Sums run in fp32 (fp64 for f64) in the order the contract fixes, so results are compared exactly.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from ep_runtime.layout import align_up, kept_rows


@dataclasses.dataclass(frozen=True)
class Row:
    """One kept row of a slab."""

    dest: int
    row: int
    expert: int
    source: int
    token: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Routed:
    """Every kept row, plus sizes: what all other functions read."""

    rows: list[Row]
    ranks: int
    tokens: int
    top_k: int
    capacity: int
    kept: np.ndarray  # [N, L]
    group_sizes: np.ndarray  # [N, L]
    num_recv: np.ndarray  # [N]


def route(
    topk_idx: np.ndarray,
    num_experts: int,
    capacity: int,
    alignment: int,
    row_alignment: int | None = None,
) -> Routed:
    """topk_idx [N, T, K] -> the kept rows; zones lie aligned to `row_alignment` if it is given."""
    ranks, tokens, top_k = topk_idx.shape
    local = num_experts // ranks
    rows = []
    kept = np.zeros((ranks, local), np.int32)
    sizes = np.zeros_like(kept)
    num_recv = np.zeros(ranks, np.int32)
    for dest in range(ranks):
        wanted = [
            [tuple(at) for at in np.argwhere(topk_idx == dest * local + e)] for e in range(local)
        ]
        demand = [len(slots) for slots in wanted]
        num_recv[dest] = sum(align_up(n, alignment) for n in demand)
        kept[dest] = kept_rows(demand, capacity, alignment)
        base = 0
        for e in range(local):
            for position, (source, token, slot) in enumerate(wanted[e][: kept[dest, e]]):
                rows.append(Row(dest, base + position, e, source, token, slot))
            sizes[dest, e] = align_up(int(kept[dest, e]), row_alignment or alignment)
            base += sizes[dest, e]
    return Routed(rows, ranks, tokens, top_k, capacity, kept, sizes, num_recv)


def plan_arrays(routed: Routed) -> tuple[np.ndarray, ...]:
    """The nine plan arrays, each with a leading rank dim."""
    n, t, k, c = routed.ranks, routed.tokens, routed.top_k, routed.capacity
    dst_rank = np.full((n, t, k), -1, np.int32)
    dst_row = np.full((n, t, k), -1, np.int32)
    recv_count = np.zeros((n, n, 4), np.int32)
    staged_start = np.zeros((n, n * t + 1), np.int32)
    staged_row = np.full((n, c), -1, np.int32)
    staged_slot = np.full((n, c), -1, np.int32)
    for r in routed.rows:
        dst_rank[r.source, r.token, r.slot] = r.dest
        dst_row[r.source, r.token, r.slot] = r.row
    for dest in range(n):
        mine = sorted(
            (r for r in routed.rows if r.dest == dest),
            key=lambda r: (r.source, r.token, r.slot),
        )
        starts = []
        last = None
        for i, r in enumerate(mine):
            staged_row[dest, i], staged_slot[dest, i] = r.row, r.slot
            recv_count[dest, r.source, 1] += 1
            if (r.source, r.token) != last:
                last = (r.source, r.token)
                starts.append(i)
                recv_count[dest, r.source, 0] += 1
                recv_count[dest, r.source, 2] += r.token < (t + 1) // 2
        staged_start[dest] = len(mine)
        staged_start[dest, : len(starts)] = starts
    sizes = (routed.kept, routed.group_sizes, routed.num_recv[:, None])
    return (dst_rank, dst_row, recv_count, staged_start, staged_row, staged_slot, *sizes)


def used_rows(routed: Routed) -> np.ndarray:
    """[N, C] 1 row kept here, 0 padding of a zone, -1 past the last zone."""
    state = np.full((routed.ranks, routed.capacity), -1)
    for dest in range(routed.ranks):
        state[dest, : routed.group_sizes[dest].sum()] = 0
    for r in routed.rows:
        state[r.dest, r.row] = 1
    return state


def dispatch(
    routed: Routed, tokens: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """tokens [N, T, H], weights [N, T, K] -> recv [N, C, H] (0 where undefined), [N, C]."""
    recv = np.zeros((routed.ranks, routed.capacity, tokens.shape[-1]), tokens.dtype)
    out = np.zeros((routed.ranks, routed.capacity), np.float32)
    for r in routed.rows:
        recv[r.dest, r.row] = tokens[r.source, r.token]
        out[r.dest, r.row] = 1 if weights is None else weights[r.source, r.token, r.slot]
    return recv, out


def _wide(dtype: np.dtype) -> type:
    return np.float64 if dtype == np.float64 else np.float32


def through_fp8(sums: np.ndarray) -> np.ndarray:
    """f32 [..., H] as e4m3 with an f32 scale per 128 values, and back."""
    hidden = sums.shape[-1]
    smallest, largest = np.float32(2.0**-126), np.float32(448)
    blocks = np.pad(sums, [(0, 0)] * (sums.ndim - 1) + [(0, -hidden % 128)])
    blocks = blocks.reshape(*sums.shape[:-1], -(-hidden // 128), 128)
    finite = np.isfinite(blocks)
    size = np.where(finite, np.abs(blocks), 0)
    amax = size.max(-1, keepdims=True)
    scale = np.where(amax < smallest, np.float32(1), np.maximum(amax / largest, smallest))
    values = np.where(finite & (size >= smallest), blocks, 0) * (np.float32(1) / scale)
    data = np.where(finite, np.clip(values, -largest, largest), np.nan)
    rounded = data.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return rounded.reshape(*sums.shape[:-1], blocks.shape[-2] * 128)[..., :hidden]


def combine(
    routed: Routed, rows: np.ndarray, weights: np.ndarray | None, precision: str
) -> np.ndarray:
    """rows [N, C, H], weights [N, C] -> [N, T, H]."""
    wide = _wide(rows.dtype)
    shape = (routed.ranks, routed.tokens, routed.ranks, rows.shape[-1])
    partial = np.zeros(shape, wide)
    for r in sorted(routed.rows, key=lambda r: r.slot):
        value = rows[r.dest, r.row].astype(wide)
        if weights is not None:
            value = wide(weights[r.dest, r.row]) * value
        partial[r.source, r.token, r.dest] += value
    if precision == "fast":
        partial = partial.astype(rows.dtype).astype(wide)
    elif precision == "fp8":
        partial = through_fp8(partial)
    total = np.zeros((routed.ranks, routed.tokens, rows.shape[-1]), wide)
    for dest in range(routed.ranks):
        total += partial[:, :, dest]
    return total.astype(rows.dtype)


def dispatch_bwd(
    routed: Routed, d_recv: np.ndarray, d_weights: np.ndarray, precision: str
) -> tuple[np.ndarray, np.ndarray]:
    """d_recv [N, C, H], d_weights [N, C] -> d_tokens [N, T, H], d_topk_weights [N, T, K]."""
    d_topk = np.zeros((routed.ranks, routed.tokens, routed.top_k), np.float32)
    for r in routed.rows:
        d_topk[r.source, r.token, r.slot] = d_weights[r.dest, r.row]
    return combine(routed, d_recv, None, precision), d_topk


def halving_sum(values: np.ndarray) -> np.ndarray:
    """Sum over the last dim by the halving tree that both transports use."""
    sums = values.copy()
    width = sums.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        sums[..., : width - half] += sums[..., half:width]
        width = half
    return sums[..., 0]


def combine_bwd(
    routed: Routed, grad: np.ndarray, rows: np.ndarray | None, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """grad [N, T, H], rows [N, C, H], weights [N, C] -> d_rows [N, C, H], d_weights [N, C]."""
    wide = _wide(grad.dtype)
    d_rows = np.zeros((routed.ranks, routed.capacity, grad.shape[-1]), grad.dtype)
    d_weights = np.zeros((routed.ranks, routed.capacity), np.float32)
    for r in routed.rows:
        g = grad[r.source, r.token].astype(wide)
        scale = wide(1) if weights is None else wide(weights[r.dest, r.row])
        d_rows[r.dest, r.row] = (scale * g).astype(grad.dtype)
        if rows is not None:
            products = g * rows[r.dest, r.row].astype(wide)
            d_weights[r.dest, r.row] = halving_sum(products)
    return d_rows, d_weights
