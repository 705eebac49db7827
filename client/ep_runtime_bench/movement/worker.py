"""One process of `ep-runtime bench dispatch combine --processes P`."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

from ep_runtime_bench.base.options import BenchOptions
from ep_runtime_client.jobs.members import Member, run_member


def work(order: dict[str, Any], member: Member) -> int:
    """Measures, and leaves the samples for the parent."""
    said: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in order["options"].items()
    }
    options = BenchOptions(**said)
    name = "gpu_calls" if options.on_gpus else "cpu_calls"
    calls = importlib.import_module(f"ep_runtime_bench.movement.{name}")
    samples = calls.measure(options, order["address"], member)
    found = json.dumps([dataclasses.asdict(sample) for sample in samples])
    (Path(member.directory) / f"{member.index}.json").write_text(found)
    return 0


if __name__ == "__main__":
    run_member(work, "ep-runtime bench")
