"""Compares token movement with the reference, in each of a job's processes or in only one.

No collective of XLA's: a process makes its own shards, and compares those that it holds.
"""

from __future__ import annotations

import cases
import fakes
import jax
import movement
from gpu.jobs.layouts import TRANSPORT
from gpu.test_gpu_movement import TOLERANCE, fitted

import ep_runtime as ep

_CASES = {case.name: case for case in cases.CASES}


def run_cases(names: list[str]) -> list[str]:
    """Runs the named cases, each in its own group; returns their names."""
    with ep.connect(timeout_s=60) as session:
        for name in names:
            run_case(session, fitted(_CASES[name], len(jax.devices())))
    return names


def run_case(session: ep.Session, case: cases.Case) -> None:
    """Runs one case, fitted to the number of devices, in its own group."""
    settings = case.group_settings
    mesh = fakes.mesh_of(settings.pop("axes"))
    group = session.create_group(
        case.group_name, mesh, transport=TRANSPORT, op_timeout_s=60, **settings
    )
    movement.run_case(case, group, TOLERANCE, summed=False)
    group.check()
    group.close()
