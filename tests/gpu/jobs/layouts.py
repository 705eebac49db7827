"""Jobs of several processes on GPUs: the GPUs of each process, and the code before a script.

With TEST_GPU_TRIAL=1 CPU devices stand in for GPUs and memfd for every transport: that tries the
tests. TEST_GPU_TRANSPORT names another transport than nvlink. TEST_GPU_COUNT=8 takes eight GPUs,
where four are enough for what is checked otherwise. With TEST_GPU_RANKS=N jobs whose
processes drive one GPU each have N of them, which share the GPUs there are: that tries ranks on a
machine with fewer GPUs. The GPU runs its processes in turns then, so no time of theirs counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import pytest
from multiprocess import launch

TRIAL = os.environ.get("TEST_GPU_TRIAL", "") == "1"
TRANSPORT = "memfd" if TRIAL else os.environ.get("TEST_GPU_TRANSPORT", "nvlink")

COUNT = int(os.environ.get("TEST_GPU_COUNT", "4"))  # GPUs at most
RANKS = int(os.environ.get("TEST_GPU_RANKS", "0"))  # 0: one for each GPU

# CPU devices too: the reference runs there.
_GPUS = """
jax.config.update("jax_platforms", "cuda,cpu")
if "TEST_LOCAL_DEVICES" in os.environ:
    distributed["local_device_ids"] = json.loads(os.environ["TEST_LOCAL_DEVICES"])
"""

# How processes share GPUs: number of processes (None: one per GPU), and what gives each its own.
LAYOUTS: dict[str, tuple[int | None, str]] = {
    "one GPU each, visible alone": (None, "CUDA_VISIBLE_DEVICES"),
    "one GPU each, all visible": (None, "local_device_ids"),
    "two processes, own GPUs visible": (2, "CUDA_VISIBLE_DEVICES"),
    "two processes, all GPUs visible": (2, "local_device_ids"),
}
if COUNT == 8:
    LAYOUTS["four processes, own GPUs visible"] = (4, "CUDA_VISIBLE_DEVICES")


def job(
    script: str,
    layout: str,
    gpus: int,
    own: Sequence[Mapping[str, str]] = (),
    **environment: str,
) -> launch.Job:
    """Starts a job whose processes drive the first `gpus` GPUs as the layout says.

    Args:
        script, environment: as of `launch.Job`.
        layout: of LAYOUTS.
        gpus: of the whole job; with RANKS of them GPUs are shared.
        own: more variables of each process alone, in order.
    """
    count, told_by = LAYOUTS[layout]
    processes = count or gpus
    each = gpus // processes
    if RANKS and (each, told_by) != (1, "CUDA_VISIBLE_DEVICES"):
        pytest.skip("ranks that share GPUs have a process each, which sees no other GPU")
    parts = [range(index * each, (index + 1) * each) for index in range(processes)]
    settings: dict[str, Any] = {
        # The tests' own process holds memory of the GPUs too.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **environment,
    }
    more = own or [{}] * processes
    if TRIAL:
        return launch.Job(script, processes=processes, devices=each, own=more, **settings)
    told: list[dict[str, str]]
    if told_by == "local_device_ids":
        told = [{"TEST_LOCAL_DEVICES": json.dumps([*part])} for part in parts]
    else:
        visible = _visible(gpus)
        told = [{told_by: ",".join(visible[gpu] for gpu in part)} for part in parts]
    prologue = launch.prologue_of(_GPUS)
    both = [{**first, **second} for first, second in zip(told, more, strict=True)]
    return launch.Job(
        script, processes=processes, devices=each, prologue=prologue, own=both, **settings
    )


def _visible(gpus: int) -> list[str]:
    """Returns names of the GPUs this process sees, for CUDA_VISIBLE_DEVICES of other processes.
    With RANKS, names repeat until there are enough.
    """
    ours = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not RANKS:
        return ours or [str(gpu) for gpu in range(gpus)]
    there = ours or [str(device.local_hardware_id) for device in jax.local_devices(backend="gpu")]
    return [there[gpu % len(there)] for gpu in range(gpus)]
