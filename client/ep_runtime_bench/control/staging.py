"""Staging memory of one rank: what a daemon holds with 1 layer and with 1,000, and by formula.

On GPUs the group is of the size asked for; on CPU of few tokens, since its windows are paid for
in host memory at once. The line of 8 ranks is what the same settings take there, allocated nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime import specs
from ep_runtime_bench.base.daemon import warm_daemon
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.cli.tables import Column
from ep_runtime_client.groups import estimate
from ep_runtime_client.jobs.members import Member, start_jax

LAYERS = (1, 1000)
CPU_TOKENS = 64
RANKS = 8  # of the line that is computed
TIMEOUT_S = 30.0
COLUMNS = (
    Column("transport", "TRANSPORT"),
    Column("ranks", "RANKS", "count"),
    Column("tokens", "T", "count"),
    Column("layers", "LAYERS", "count"),
    Column("bytes_per_rank", "BYTES/RANK", "count"),
    Column("size", "", "bytes"),
    Column("known", "KNOWN"),
)


def run(options: BenchOptions) -> BenchReport:
    """Asks a daemon of its own what it holds for a group."""
    rows = [*_held(options), _computed(options)]
    title = (
        f"staging: H={options.hidden} {options.dtype}, top-{options.top_k} of "
        f"{options.num_experts} experts, 2 lanes"
    )
    return BenchReport("staging", title, COLUMNS, rows)


def _settings(options: BenchOptions, tokens: int) -> dict[str, Any]:
    return {
        "ep_axis": "ep",
        "num_experts": options.num_experts,
        "hidden_size": options.hidden,
        "max_tokens_per_rank": tokens,
        "max_top_k": options.top_k,
        "max_token_dtype": options.dtype,
    }


def _held(options: BenchOptions) -> Iterator[dict[str, Any]]:
    """One row per number of layers, as the daemon lists its windows."""
    platform, transport = ("gpu", "nvlink") if options.on_gpus else ("cpu", "memfd")
    tokens = max(options.tokens) if options.on_gpus else options.tokens_per_rank or CPU_TOKENS
    start_jax(options.devices, Member(), platform)
    with warm_daemon() as address, ep.connect(address) as session:
        mesh = Mesh(np.array(jax.devices(platform)[: options.devices]), ("ep",))
        settings: dict[str, Any] = {"transport": transport, **_settings(options, tokens)}
        group = session.create_group("bench", mesh, **settings)
        for layers in LAYERS:
            names = (f"layer/{i}" for i in range(layers))
            group.register_layers(ep.LayerSpec(name, top_k=options.top_k) for name in names)
            with source.open_source(address, timeout_s=TIMEOUT_S) as daemon:
                held = [row["bytes"] for row in daemon.buffers() if row["world_rank"] >= 0]
            if len(held) != options.devices or len({*held}) != 1:
                raise RuntimeError(f"a window per rank was expected, the daemon holds {held}")
            yield _row(transport, options.devices, tokens, layers, int(held[0]), "held")
        group.close()


def _computed(options: BenchOptions) -> dict[str, Any]:
    tokens = max(options.tokens)
    settings = _settings(options, tokens)
    spec = specs.make_group_spec(
        name="bench", mesh_axes=(("ep", RANKS),), transport="nvlink", **settings
    )
    size = estimate.staging_bytes(spec)
    return _row("nvlink", RANKS, tokens, None, size, "computed")


def _row(
    transport: str, ranks: int, tokens: int, layers: int | None, size: int, known: str
) -> dict[str, Any]:
    case = {"transport": transport, "ranks": ranks, "tokens": tokens, "layers": layers}
    return {**case, "bytes_per_rank": size, "size": size, "known": known}
