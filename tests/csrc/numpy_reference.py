"""The reference of the custom calls for one EP group, in NumPy and exact to the last bit.

Plans are those of `references.movement`. Sums run in fp32 (fp64 for f64) in the order the contract
fixes, so results are compared exactly.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from references.movement import ReferencePlan


def dispatch(
    plan: ReferencePlan, tokens: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """tokens [N, T, H], weights [N, T, K] -> recv [N, C, H] (0 where undefined), [N, C]."""
    used = plan.source >= 0
    out = used.astype(np.float32)
    if weights is not None:
        out[used] = weights.reshape(-1)[plan.source[used]]
    return _of_tokens(plan, tokens), out


def _of_tokens(plan: ReferencePlan, tokens: np.ndarray) -> np.ndarray:
    """tokens [N, T, H] -> the token of every row [N, C, H]; 0 for rows without a token."""
    rows, used = np.zeros((*plan.source.shape, tokens.shape[-1]), tokens.dtype), plan.source >= 0
    rows[used] = tokens.reshape(-1, tokens.shape[-1])[plan.source[used] // plan.slab.shape[-1]]
    return rows


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
    plan: ReferencePlan, rows: np.ndarray, weights: np.ndarray | None, precision: str
) -> np.ndarray:
    """rows [N, C, H], weights [N, C] -> [N, T, H]."""
    wide = _wide(rows.dtype)
    ranks, tokens, _ = plan.slab.shape
    partial = np.zeros((ranks, tokens, ranks, rows.shape[-1]), wide)
    for source, token, slot in np.argwhere(plan.slab >= 0):
        at = plan.slab[source, token, slot], plan.row[source, token, slot]
        value = rows[at].astype(wide)
        if weights is not None:
            value = wide(weights[at]) * value
        partial[source, token, at[0]] += value
    if precision == "fast":
        partial = partial.astype(rows.dtype).astype(wide)
    elif precision == "fp8":
        partial = through_fp8(partial)
    total = np.zeros((ranks, tokens, rows.shape[-1]), wide)
    for dest in range(ranks):
        total += partial[:, :, dest]
    return total.astype(rows.dtype)


def dispatch_bwd(
    plan: ReferencePlan, d_recv: np.ndarray, d_weights: np.ndarray, precision: str
) -> tuple[np.ndarray, np.ndarray]:
    """d_recv [N, C, H], d_weights [N, C] -> d_tokens [N, T, H], d_topk_weights [N, T, K]."""
    d_topk = np.where(plan.slab >= 0, d_weights[plan.slab, plan.row], np.float32(0))
    return combine(plan, d_recv, None, precision), d_topk


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
    plan: ReferencePlan, grad: np.ndarray, rows: np.ndarray | None, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """grad [N, T, H], rows [N, C, H], weights [N, C] -> d_rows [N, C, H], d_weights [N, C]."""
    wide, used = _wide(grad.dtype), plan.source >= 0
    given = _of_tokens(plan, grad).astype(wide)
    d_rows = given if weights is None else weights[..., None].astype(wide) * given
    d_weights = np.zeros(used.shape, np.float32)
    if rows is not None:
        d_weights[used] = halving_sum(given[used] * rows[used].astype(wide))
    return d_rows.astype(grad.dtype), d_weights
