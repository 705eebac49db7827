"""Joules of a step, from NVML's energy counters before and after many steps. Imports no JAX."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from ep_runtime import env

MEASURED_S = 1.0  # counters move every 20 to 100 ms
ROUND = 10


def joules_per_step(devices: int, run: Callable[[int], object], step_s: float) -> float | None:
    """Returns the joules that all devices use in a step; None if a counter is missing.

    Args:
        devices: number of GPUs, or 0 on CPU.
        run: runs this number of steps, a multiple of ROUND, and waits for them; the number is the
            same in every process with the same `step_s`.
        step_s: seconds of a step.
    """
    before = total_joules(devices)
    if before is None:
        return None
    steps = ROUND * math.ceil(MEASURED_S / step_s / ROUND)
    run(steps)
    after = total_joules(devices)
    return None if after is None else (after - before) / steps


def total_joules(devices: int) -> float | None:
    """Returns the joules that this process's first GPUs used since their driver was loaded."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        return None
    try:
        read = nvml.nvmlDeviceGetTotalEnergyConsumption
        drawn = [read(handle) for handle in _handles(nvml, devices)]
        return sum(drawn) / 1e3 if drawn else None
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any, devices: int) -> list[Any]:
    """Returns NVML's handles of the GPUs that CUDA_VISIBLE_DEVICES names."""
    visible = env.visible_devices()
    names = visible.split(",") if visible else [str(index) for index in range(devices)]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdigit()
        else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names[:devices]
    ]
