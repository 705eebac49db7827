"""The control plane: many layers in one call, one small RPC, the start of the command line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime.v1 import session_service_pb2
from ep_runtime_bench.base.daemon import warm_daemon
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.base.timing import median, quantile
from ep_runtime_client.cli.tables import Column
from ep_runtime_client.sessions.session import Session

UNARY_CALLS = 2000
UNARY_WARMUP = 100
CLI_STARTS = 10
REGISTRATIONS = 3
CLI_TIMEOUT_S = 30.0
COLUMNS = (
    Column("what", "WHAT"),
    Column("samples", "SAMPLES", "count"),
    Column("p50_ms", "P50 MS", "count"),
    Column("p99_ms", "P99 MS", "count"),
)


def run(options: BenchOptions) -> BenchReport:
    """Measures against a daemon of its own."""
    jax.config.update("jax_platforms", "cpu")
    with warm_daemon() as address:
        with ep.connect(address) as session:
            rows = [
                _row(
                    f"register_layers, {options.num_layers:,} layers in one call",
                    [_register(session, options.num_layers, i) for i in range(REGISTRATIONS)],
                ),
                _row("unary RPC (GetServerInfo)", _unary(session)),
            ]
        for words in (["--help"], ["version"], ["groups", "--address", address]):
            starts = [_first_output(words) for _ in range(CLI_STARTS)]
            rows.append(_row(f"first output of ep-runtime {words[0]}", starts))
    return BenchReport("control", "control plane", COLUMNS, rows)


def _row(what: str, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "what": what,
        "samples": len(seconds),
        "p50_ms": round(median(seconds) * 1e3, 3),
        "p99_ms": round(quantile(seconds, 0.99) * 1e3, 3),
    }


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _register(session: Session, num_layers: int, index: int) -> float:
    """Seconds to register that many new layers in a new group."""
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("ep",))
    group = session.create_group(
        f"bench-{index}",
        mesh,
        ep_axis="ep",
        num_experts=1,
        hidden_size=8,
        max_tokens_per_rank=8,
        max_top_k=1,
    )
    layers = [ep.LayerSpec(f"layer/{i}", top_k=1) for i in range(num_layers)]
    seconds = _seconds(lambda: group.register_layers(layers))
    group.close()
    return seconds


def _unary(session: Session) -> list[float]:
    control = session.control
    request = session_service_pb2.GetServerInfoRequest()
    samples = [
        _seconds(lambda: control.call(control.sessions.GetServerInfo, request))
        for _ in range(UNARY_WARMUP + UNARY_CALLS)
    ]
    return samples[UNARY_WARMUP:]


def _first_output(words: Sequence[str]) -> float:
    """Seconds from the start of the command to the first byte that it writes."""
    command = [sys.executable, "-P", "-m", "ep_runtime_client.cli", *words]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None  # it is a pipe
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        _, errors = process.communicate(timeout=CLI_TIMEOUT_S)
    if process.returncode:
        raise RuntimeError(f"ep-runtime {words} ended with {process.returncode}: {errors!r}")
    return seconds
