"""`ep-runtime demo --processes P`: P processes of this module with D / P devices each.

Imports no JAX until a process starts to work.
"""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from pathlib import Path
from typing import Any

from ep_runtime_client.daemons import addresses
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.jobs.members import Member, Members, reserved_coordinator, run_member
from ep_runtime_client.sessions import connect


def run(config: DemoConfig) -> int:
    """Runs the demo's processes; returns the exit code of the first one that failed, else 0."""
    if config.address is None and connect.choose(None).kind == addresses.EMBEDDED:
        config = dataclasses.replace(config, address=addresses.NODE)
    with (
        tempfile.TemporaryDirectory(prefix="ep-runtime-demo-") as directory,
        reserved_coordinator() as coordinator,
        Members(
            "ep_runtime_client.demo.processes",
            dataclasses.asdict(config),
            processes=config.processes,
            directory=Path(directory),
            coordinator=coordinator,
            may_die=config.processes - 1 if config.survive else None,
        ) as started,
    ):
        return started.wait()


def _work(order: dict[str, Any], member: Member) -> int:
    job = importlib.import_module("ep_runtime_client.demo.job")
    return int(job.run(DemoConfig(**order), member))


if __name__ == "__main__":
    run_member(_work, "ep-runtime demo")
