"""One process of `ep-runtime demo --processes P`."""

from __future__ import annotations

import importlib
from typing import Any

from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.jobs.members import Member, run_member


def work(order: dict[str, Any], member: Member) -> int:
    """Runs this process's part; returns its exit code."""
    job = importlib.import_module("ep_runtime_client.demo.job")
    return int(job.run(DemoConfig(**order).of_process(member.index), member))


if __name__ == "__main__":
    run_member(work, "ep-runtime demo")
