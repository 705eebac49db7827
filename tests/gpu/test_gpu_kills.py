"""Kills processes with GPUs anywhere in a training step, over windows and in two domains.

A dose is shared out among jobs, so that several may run at once (`pytest -n 4`): each has daemons
of its own, and they share the GPUs.
"""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import step_kills, training_job
from gpu.jobs import layouts
from gpu.test_gpu_nccl import nodes, two_domains  # noqa: F401 - a fixture is found by name
from harness import DaemonProcess

from ep_runtime_client.cli.daemon import source

JOBS = 4  # more processes delay each other: a GPU runs its processes in turns
_LAYOUT = "one GPU each, visible alone"
_SIZES = {"hidden": 64, "inner": 64}
# A lane has room for experts' weights, and every rank has slots for copies of all experts.
_COPIED = {**_SIZES, "tokens": 1024, "spare_experts": training_job.EXPERTS}
at_once = pytest.mark.parametrize("job", range(JOBS))


@at_once
@pytest.mark.slow
@pytest.mark.doses(ci=0, full=50)
def test_a_kill_in_a_step_over_windows_ends_the_others_with_its_name_and_saves_no_nan(
    job_gpus: int,
    address: str,
    admin: source.Source,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    dose: int,
    job: int,
) -> None:
    sizes = _COPIED if job % 2 else _SIZES
    settings = json.dumps({**sizes, "transport": layouts.TRANSPORT})
    place = step_kills.Place(
        job=functools.partial(
            layouts.job,
            layout=_LAYOUT,
            gpus=job_gpus,
            EP_RUNTIME_ADDRESS=address,
            EP_RUNTIME_JOB="training",
            TEST_SETTINGS=settings,
        ),
        memory=lambda: [row["buffer_id"] for row in admin.buffers()],
        states=lambda: [row["state"] for row in admin.groups()],
        folder=tmp_path,
        name=f"{job_gpus} GPUs",
        apart=_jobs_on_a_gpu() > 1,
    )
    took = step_kills.strike_in_steps(place, dose, random.Random(job))
    step_kills.check(took, place.name, record_property, formed_s=_formed_s())


@at_once
@pytest.mark.slow
@pytest.mark.doses(ci=0, full=50)
def test_a_kill_in_a_step_of_two_domains_ends_the_others_with_its_name_and_saves_no_nan(
    job_gpus: int,
    nodes: list[DaemonProcess],  # noqa: F811
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    dose: int,
    job: int,
) -> None:
    settings = json.dumps({**_SIZES, "transport": "memfd" if layouts.TRIAL else "nccl"})
    place = step_kills.Place(
        job=functools.partial(
            two_domains,
            nodes=nodes,
            gpus=job_gpus,
            layout=_LAYOUT,
            TEST_SETTINGS=settings,
        ),
        memory=lambda: [b.buffer_id for node in nodes for b in node.ask("ListBuffers").buffers],
        states=lambda: [state for node in nodes for state in node.group_states().values()],
        folder=tmp_path,
        name=f"two domains of {job_gpus // 2}",
        apart=True,
    )
    took = step_kills.strike_in_steps(place, dose, random.Random(job))
    step_kills.check(took, place.name, record_property, formed_s=_formed_s())


def _formed_s() -> float:
    """CUDA and NCCL start one after the other in the processes that share a GPU."""
    return step_kills.FORMED_S * _jobs_on_a_gpu()


def _jobs_on_a_gpu() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
