"""From `connect` to the end of the first handler, fresh client processes on a warm daemon."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

from ep_runtime_client.bench.daemon import warm_daemon
from ep_runtime_client.bench.options import BenchOptions, BenchReport
from ep_runtime_client.bench.timing import median
from ep_runtime_client.cli.render import Column

CLIENTS = 5
GPU_CLIENTS = 2  # each takes ten seconds and more to start JAX
CLIENT_TIMEOUT_S = 120.0
# What the runtime answers for; JAX's import, backend, tracing and compiling stand beside it.
OURS = ("connect", "create_group", "register_layer", "first_call")
COLUMNS = (
    Column("stage", "STAGE"),
    Column("median_ms", "MEDIAN MS", "count"),
    Column("min_ms", "MIN MS", "count"),
    Column("max_ms", "MAX MS", "count"),
)


def run(options: BenchOptions) -> BenchReport:
    """Runs fresh processes one after the other; the first warms the page cache and the daemon."""
    clients = GPU_CLIENTS if options.on_gpus else CLIENTS
    with warm_daemon() as address:
        samples = [_client(address, options) for _ in range(clients + 1)][1:]
    rows = [_row(stage, [sample[stage] for sample in samples]) for stage in samples[0]]
    rows.append(
        _row(
            "connect to end of first handler",
            [sum(sample[stage] for stage in OURS) for sample in samples],
        )
    )
    kind = "GPUs" if options.on_gpus else "CPU devices"
    title = (
        f"first call on a warm daemon: {options.devices} {kind}"
        f", {clients} fresh processes; the last line sums {' + '.join(OURS)}"
    )
    return BenchReport("connect", title, COLUMNS, rows)


def _row(stage: str, samples: list[float]) -> dict[str, Any]:
    return {
        "stage": stage,
        "median_ms": round(median(samples), 2),
        "min_ms": round(min(samples), 2),
        "max_ms": round(max(samples), 2),
    }


def _client(address: str, options: BenchOptions) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "ep_runtime_client.bench.first_call"]
    transport = "nvlink" if options.on_gpus else "memfd"
    sizes = json.dumps(dataclasses.asdict(options.sizes))
    words = ["--devices", str(options.devices), "--transport", transport, "--sizes", sizes]
    done = subprocess.run(
        [*command, "--address", address, *words],
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the client ended with exit code {done.returncode}:\n{done.stderr}")
    milliseconds: dict[str, float] = json.loads(done.stdout)
    return milliseconds
