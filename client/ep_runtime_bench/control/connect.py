"""From `connect` to the end of the first handler, fresh client processes on a warm daemon.

On GPUs also what NCCL communicators cost beside it: processes with them and without, in turn.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ep_runtime import env
from ep_runtime_bench.base.daemon import warm_daemon
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.base.timing import median
from ep_runtime_bench.control import beside_cost
from ep_runtime_client.cli.tables import Column

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
_WITHOUT = Column("without_ms", "EP_RUNTIME_NCCL=0", "count")


def run(options: BenchOptions) -> list[BenchReport]:
    """Runs fresh processes one after the other; the first warms the page cache and the daemon."""
    clients = GPU_CLIENTS if options.on_gpus else CLIENTS
    with warm_daemon() as address, tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "nccl.log"
        told = beside_cost.told(log) if options.on_gpus else {}
        found = [_client(address, options, told) for _ in range(clients + 1)][1:]
        if not options.on_gpus:
            return [_stages(options, found, [])]
        channels = beside_cost.channels(log)
        without = [_client(address, options, {"EP_RUNTIME_NCCL": "0"}) for _ in range(clients)]
    title = f"NCCL communicators beside the windows of {options.devices} GPUs, the last process"
    facts = beside_cost.rows(found[-1]["nccl"] | channels, without[-1]["nccl"])
    return [
        _stages(options, found, without),
        BenchReport("communicators", title, beside_cost.COLUMNS, facts),
    ]


def _stages(
    options: BenchOptions, found: list[dict[str, Any]], without: list[dict[str, Any]]
) -> BenchReport:
    samples, plain = ([one["stages"] for one in some] for some in (found, without))
    rows = [
        _row(stage, *(_of(some, (stage,)) for some in (samples, plain))) for stage in samples[0]
    ]
    ours = (_of(some, OURS) for some in (samples, plain))
    rows.append(_row("connect to end of first handler", *ours))
    kind = "GPUs" if options.on_gpus else "CPU devices"
    title = (
        f"first call on a warm daemon: {options.devices} {kind}"
        f", {len(samples)} fresh processes; the last line sums {' + '.join(OURS)}"
    )
    return BenchReport("connect", title, (*COLUMNS, _WITHOUT) if plain else COLUMNS, rows)


def _of(samples: list[dict[str, float]], stages: tuple[str, ...]) -> list[float]:
    return [sum(sample[stage] for stage in stages) for sample in samples]


def _row(stage: str, samples: list[float], without: list[float]) -> dict[str, Any]:
    return {
        "stage": stage,
        "median_ms": round(median(samples), 2),
        "min_ms": round(min(samples), 2),
        "max_ms": round(max(samples), 2),
        **({"without_ms": round(median(without), 2)} if without else {}),
    }


def _client(address: str, options: BenchOptions, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "ep_runtime_bench.control.first_call"]
    transport = "nvlink" if options.on_gpus else "memfd"
    sizes = json.dumps(dataclasses.asdict(options.sizes))
    words = ["--devices", str(options.devices), "--transport", transport, "--sizes", sizes]
    done = subprocess.run(
        [*command, "--address", address, *words],
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT_S,
        check=False,
        env=env.inherited() | environment,
    )
    if done.returncode:
        raise RuntimeError(f"the client ended with exit code {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
