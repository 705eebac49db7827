"""Times torch's matmuls of the work that gemm_main groups: one product, and a batch of 32."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

ROWS = 32768
GROUPS = 32
SHAPES = ((7168, 4096), (2048, 7168))
WARM, RUNS = 3, 11


def median_ms(run: Callable[[], object]) -> float:
    """Median time of a run on the device, in milliseconds."""
    for _ in range(WARM):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    pairs = zip(events, events[1:], strict=False)
    return statistics.median(before.elapsed_time(after) for before, after in pairs)


def time_shape(wide: int, narrow: int) -> None:
    """Prints times of the three products of [ROWS, wide] rows and [wide, narrow] weights."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randn(ROWS, wide, **options)
    grads = torch.randn(ROWS, narrow, **options)
    weights = torch.randn(GROUPS, wide, narrow, **options)
    batched_rows = rows.view(GROUPS, -1, wide)
    batched_grads = grads.view(GROUPS, -1, narrow)
    products = {
        "forward": (
            lambda: rows @ weights[0],
            lambda: torch.bmm(batched_rows, weights),
        ),
        "data grad": (
            lambda: grads @ weights[0].T,
            lambda: torch.bmm(batched_grads, weights.transpose(1, 2)),
        ),
        "weight grad": (
            lambda: rows.T @ grads,
            lambda: torch.bmm(batched_rows.transpose(1, 2), batched_grads),
        ),
    }
    for name, (one, batch) in products.items():
        work = 2e-9 * ROWS * wide * narrow
        speeds = [work / median_ms(run) for run in (one, batch)]
        sys.stdout.write(
            f"{name:11} {wide:5} {narrow:5}  one {speeds[0]:6.1f}  batch of {GROUPS} "
            f"{speeds[1]:6.1f} TFLOP/s\n"
        )


if __name__ == "__main__":
    for shape in SHAPES:
        time_shape(*shape)
