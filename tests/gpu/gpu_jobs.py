"""Jobs of several processes on GPUs: which process drives which, and what runs before a script.

With TEST_GPU_TRIAL=1 CPU devices stand in for four GPUs and memfd for nvlink: that tries the tests.
"""

from __future__ import annotations

import json
import os
from typing import Any

from multiprocess import launch

TRIAL = os.environ.get("TEST_GPU_TRIAL", "") == "1"
TRANSPORT = "memfd" if TRIAL else "nvlink"

# CPU devices too: the reference runs there.
_GPUS = """
jax.config.update("jax_platforms", "cuda,cpu")
if "TEST_LOCAL_DEVICES" in os.environ:
    distributed["local_device_ids"] = json.loads(os.environ["TEST_LOCAL_DEVICES"])
"""

# How GPUs are shared out: processes (None: one for each GPU), and what tells a process its own.
LAYOUTS: dict[str, tuple[int | None, str]] = {
    "one GPU each, visible alone": (None, "CUDA_VISIBLE_DEVICES"),
    "one GPU each, all visible": (None, "local_device_ids"),
    "two processes, own GPUs visible": (2, "CUDA_VISIBLE_DEVICES"),
    "two processes, all GPUs visible": (2, "local_device_ids"),
}


def job(script: str, layout: str, gpus: int, **environment: str) -> launch.Job:
    """A job whose processes drive the first `gpus` GPUs as the layout says."""
    count, told_by = LAYOUTS[layout]
    processes = count or gpus
    each = gpus // processes
    parts = [range(index * each, (index + 1) * each) for index in range(processes)]
    settings: dict[str, Any] = {
        # The tests' own process holds memory of the GPUs too.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **environment,
    }
    if TRIAL:
        return launch.Job(script, processes=processes, devices=each, **settings)
    if told_by == "local_device_ids":
        own = [{"TEST_LOCAL_DEVICES": json.dumps([*part])} for part in parts]
    else:
        visible = _visible(gpus)
        own = [{told_by: ",".join(visible[gpu] for gpu in part)} for part in parts]
    prologue = launch.prologue_of(_GPUS)
    return launch.Job(
        script, processes=processes, devices=each, prologue=prologue, own=own, **settings
    )


def _visible(gpus: int) -> list[str]:
    """Names of the GPUs that this process sees, for CUDA_VISIBLE_DEVICES of others."""
    ours = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ours or [str(gpu) for gpu in range(gpus)]
