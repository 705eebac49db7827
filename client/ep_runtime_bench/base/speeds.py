"""Speeds of a step: tokens/s, TFLOP/s of a GPU, and its share of the card's peak. No JAX."""

from __future__ import annotations

import functools
from typing import Any

from ep_runtime_client.cli.machine import nvml
from ep_runtime_client.cli.tables import Column

# TFLOP/s of dense 16-bit matmuls from data sheets, by NVML's names.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
}
COLUMNS = (
    Column("tokens_per_s", "TOKENS/S", "count"),
    Column("tflops", "TFLOP/S", "count"),
    Column("mfu", "MFU", "share"),
    Column("joules", "JOULES", "count"),
)


@functools.cache
def gpu_name() -> str:
    """Returns the name of the machine's first GPU; "" if NVML finds none."""
    return next((gpu.name for gpu in nvml.probe().gpus), "")


def speeds(
    step_s: float, tokens: int, flops: float, joules: float | None, gpu: str
) -> dict[str, Any]:
    """Returns the values for COLUMNS.

    Args:
        step_s: seconds of a step.
        tokens: tokens of a step, on all devices.
        flops: FLOPs of a step, on one device.
        joules: joules of a step, on all devices; None without a counter.
        gpu: name of the GPU; MFU is None if PEAKS lacks it.
    """
    peak = PEAKS.get(gpu)
    return {
        "tokens_per_s": round(tokens / step_s),
        "tflops": round(flops / step_s / 1e12, 1),
        "mfu": peak and round(flops / step_s / 1e12 / peak, 3),
        "joules": joules and round(joules, 2),
    }
