"""Processes killed anywhere in a training step: the others know it, end, and saved no NaN.

The job that starts then is the next one's victim, and finds the memory of the one before.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import step_kills
from harness import memfds_of
from multiprocess.launch import Job

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import children


@pytest.mark.parametrize(
    ("processes", "devices"),
    [(2, 4), pytest.param(4, 1, marks=pytest.mark.slow)],
    ids=["2x4", "4x1"],
)
def test_a_kill_in_a_step_ends_the_others_with_its_name_and_saves_no_nan(
    address: str,
    admin: source.Source,
    daemon: children.Child,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    dose: int,
    processes: int,
    devices: int,
) -> None:
    name = f"{processes} x {devices}"
    more = {"EP_RUNTIME_ADDRESS": address, "EP_RUNTIME_JOB": "training"}
    place = step_kills.Place(
        job=functools.partial(Job, processes=processes, devices=devices, **more),
        memory=lambda: memfds_of(daemon.pid),
        states=lambda: [row["state"] for row in admin.groups()],
        folder=tmp_path,
        name=name,
    )
    worst = step_kills.kill_in_steps(place, dose, random.Random(dose))
    step_kills.check(worst, name, record_property)
