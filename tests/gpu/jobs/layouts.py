"""Jobs of several processes on GPUs: which process drives which, and what runs before a script.

With TEST_GPU_TRIAL=1 CPU devices stand in for four GPUs and memfd for every transport: that tries
the tests. TEST_GPU_TRANSPORT names another transport than nvlink.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from multiprocess import launch

TRIAL = os.environ.get("TEST_GPU_TRIAL", "") == "1"
TRANSPORT = "memfd" if TRIAL else os.environ.get("TEST_GPU_TRANSPORT", "nvlink")

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


def job(
    script: str,
    layout: str,
    gpus: int,
    own: Sequence[Mapping[str, str]] = (),
    **environment: str,
) -> launch.Job:
    """A job whose processes drive the first `gpus` GPUs as the layout says.

    Args:
        script, environment: as of `launch.Job`.
        layout: of LAYOUTS.
        gpus: of the whole job.
        own: more variables of each process alone, in order.
    """
    count, told_by = LAYOUTS[layout]
    processes = count or gpus
    each = gpus // processes
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
    """Names of the GPUs that this process sees, for CUDA_VISIBLE_DEVICES of others."""
    ours = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ours or [str(gpu) for gpu in range(gpus)]
