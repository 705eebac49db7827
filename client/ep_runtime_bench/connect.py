"""Measures fresh client processes on a warm daemon, from `connect` to the end of the first call.

On GPUs it measures twice: with NCCL communicators for each group, and without.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

from ep_runtime import env
from ep_runtime_bench.base.clients import warm_daemon
from ep_runtime_bench.base.options import BenchOptions, BenchReport, ConnectSizes
from ep_runtime_client.cli.tables import Column

CLIENTS = 5
GPU_CLIENTS = 2  # each takes more than ten seconds to start JAX
CLIENT_TIMEOUT_S = 120.0
# Stages of the runtime itself, without JAX's import, backend, tracing and compiling.
OURS = ("connect", "create_group", "register_layer", "first_call")
COLUMNS = (
    Column("stage", "STAGE"),
    Column("median_ms", "MEDIAN MS", "count"),
    Column("min_ms", "MIN MS", "count"),
    Column("max_ms", "MAX MS", "count"),
)
_WITHOUT = Column("without_ms", "EP_RUNTIME_NCCL=0", "count")

Stages = dict[str, float]  # milliseconds by stage


def run(options: BenchOptions) -> BenchReport:
    """Runs fresh processes one after the other; the first warms the page cache and the daemon."""
    clients = GPU_CLIENTS if options.on_gpus else CLIENTS
    with warm_daemon() as address:
        found = [_client(address, options, {}) for _ in range(clients + 1)][1:]
        plain = [
            _client(address, options, {"EP_RUNTIME_NCCL": "0"})
            for _ in range(clients if options.on_gpus else 0)
        ]
    rows = [_row(stage, *(_of(some, (stage,)) for some in (found, plain))) for stage in found[0]]
    ours = (_of(some, OURS) for some in (found, plain))
    rows.append(_row("connect to end of first handler", *ours))
    kind = "GPUs" if options.on_gpus else "CPU devices"
    title = (
        f"first call on a warm daemon: {options.devices} {kind}"
        f", {len(found)} fresh processes; the last line sums {' + '.join(OURS)}"
    )
    return BenchReport("connect", title, (*COLUMNS, _WITHOUT) if plain else COLUMNS, rows)


def _of(samples: list[Stages], stages: tuple[str, ...]) -> list[float]:
    return [sum(sample[stage] for stage in stages) for sample in samples]


def _row(stage: str, samples: list[float], without: list[float]) -> dict[str, Any]:
    return {
        "stage": stage,
        "median_ms": round(median(samples), 2),
        "min_ms": round(min(samples), 2),
        "max_ms": round(max(samples), 2),
        **({"without_ms": round(median(without), 2)} if without else {}),
    }


def _client(address: str, options: BenchOptions, environment: dict[str, str]) -> Stages:
    said = (address, options.devices, options.on_gpus, dataclasses.asdict(options.sizes))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ep_runtime_bench.connect", json.dumps(said)],
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT_S,
        check=False,
        env=env.inherited() | environment,
    )
    if done.returncode:
        raise RuntimeError(f"the client ended with exit code {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


class _Watch:
    """Milliseconds between marks."""

    def __init__(self) -> None:
        self.stages: Stages = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages[stage] = (now - self._last) * 1e3
        self._last = now


def measure(address: str, devices: int, on_gpus: bool, sizes: ConnectSizes) -> Stages:
    """Runs one dispatch in a fresh process; imports count as a stage."""
    watch = _Watch()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import ep_runtime as ep
    from ep_runtime_client.jobs.members import Member, start_jax
    from ep_runtime_client.sessions import session  # noqa: F401 - loaded when first used

    watch.mark("import")
    platform = "gpu" if on_gpus else "cpu"
    start_jax(devices, Member(), platform)
    with ep.connect(address) as connected:
        watch.mark("connect")
        mesh = Mesh(np.array(jax.devices(platform)[:devices]), ("ep",))
        rows = NamedSharding(mesh, PartitionSpec("ep"))
        count = sizes.tokens * devices
        x = jax.device_put(np.ones((count, sizes.hidden), jnp.dtype(sizes.dtype)), rows)
        topk_idx = jax.device_put(sizes.topk_idx(count), rows)
        jax.block_until_ready((x, topk_idx))
        watch.mark("jax_backend")
        group = connected.create_group(
            "bench",
            mesh,
            ep_axis="ep",
            num_experts=sizes.num_experts,
            hidden_size=sizes.hidden,
            max_tokens_per_rank=sizes.tokens,
            max_top_k=sizes.top_k,
            max_token_dtype=sizes.dtype,
            alignment=sizes.alignment,
            transport="nvlink" if on_gpus else "memfd",
        )
        watch.mark("create_group")
        layer = group.register_layer("layer", top_k=sizes.top_k)
        watch.mark("register_layer")

        def forward(x: Any, topk_idx: Any) -> Any:
            return ep.dispatch(layer, x, topk_idx).tokens

        lowered = jax.jit(forward).lower(x, topk_idx)
        watch.mark("trace")
        compiled = lowered.compile()
        watch.mark("compile")
        jax.block_until_ready(compiled(x, topk_idx))
        watch.mark("first_call")
    watch.mark("close")
    return watch.stages


def main() -> int:
    address, devices, on_gpus, sizes = json.loads(sys.argv[1])
    found = measure(address, devices, on_gpus, ConnectSizes(**sizes))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
