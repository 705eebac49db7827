"""Dispatch and combine of one process with several CPU devices, per transport and row size.

Bytes are those of the rows delivered (dispatch) or read (combine): tokens x top_k x row. A
transport that sends a token once per rank moves fewer between ranks; its figure shows that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.bench.memcpy import Memcpy
from ep_runtime_client.bench.options import ROW_ITEM_BYTES, BenchOptions, BenchReport, Transport
from ep_runtime_client.bench.timing import in_turn, median
from ep_runtime_client.cli.render import Column
from ep_runtime_client.groups import Group
from ep_runtime_client.session import Session

WARMUP = 3
MEMCPY = "memcpy"
COLUMNS = (
    Column("op", "OP"),
    Column("row_bytes", "ROW BYTES", "count"),
    Column("tokens_per_rank", "TOKENS/RANK", "count"),
    Column("transport", "TRANSPORT"),
    Column("median_ms", "MEDIAN MS", "count"),
    Column("tokens_per_s", "TOKENS/S", "count"),
    Column("gb_per_s", "GB/S", "count"),
    Column("ratio_to_xla", "X XLA", "count"),
    Column("ratio_to_memcpy", "X MEMCPY", "count"),
    Column("min_ms", "MIN MS", "count", wide=True),
    Column("rows", "ROWS", "count", wide=True),
    Column("bytes", "BYTES", "bytes", wide=True),
)

Call = Callable[[], object]


def run(options: BenchOptions) -> BenchReport:
    """Measures every row size, all transports and memcpy in turn."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    rows: list[dict[str, Any]] = []
    with ep.connect("embedded") as session:
        mesh = Mesh(np.array(jax.devices("cpu")[: options.devices]), ("ep",))
        for row_bytes in options.row_bytes:
            rows += _measure_size(options, session, mesh, row_bytes)
    rows.sort(key=lambda row: options.benches.index(row["op"]))
    title = (
        f"token movement: {options.devices} CPU devices in one process, top-{options.top_k} of "
        f"{options.num_experts} experts, bf16, medians of {options.repeats}"
    )
    return BenchReport("movement", title, COLUMNS, rows)


@dataclasses.dataclass(frozen=True)
class _Size:
    """One row size: tokens of every device and what they add up to."""

    row_bytes: int
    tokens_per_rank: int
    tokens: int
    rows: int

    @property
    def total_bytes(self) -> int:
        return self.rows * self.row_bytes


def _measure_size(
    options: BenchOptions, session: Session, mesh: Mesh, row_bytes: int
) -> list[dict[str, Any]]:
    """Rows of one row size: every op, transport and memcpy."""
    tokens = options.tokens_for(row_bytes)
    everywhere = tokens * options.devices
    size = _Size(row_bytes, tokens, everywhere, everywhere * options.top_k)
    memcpy = Memcpy(size.total_bytes)
    groups = [
        _make_group(options, session, mesh, row_bytes, transport)
        for transport in options.transports
    ]
    calls = [_calls(options, group, row_bytes) for group in groups]
    rows = []
    for op in ("dispatch", "combine"):
        if op not in options.benches:
            continue
        subjects: dict[str, Call] = {
            transport: call[op] for transport, call in zip(options.transports, calls, strict=True)
        }
        seconds = in_turn({**subjects, MEMCPY: memcpy}, warmup=WARMUP, repeats=options.repeats)
        rows += [_row(op, name, size, seconds) for name in seconds]
    memcpy.close()
    for group in groups:
        group.close()
    return rows


def _row(op: str, name: str, size: _Size, samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    seconds = median(samples[name])
    xla = median(samples["xla"]) if "xla" in samples else None
    return {
        "op": op,
        "transport": name,
        "row_bytes": size.row_bytes,
        "tokens_per_rank": size.tokens_per_rank,
        "rows": size.rows,
        "bytes": size.total_bytes,
        "median_ms": round(seconds * 1e3, 3),
        "min_ms": round(min(samples[name]) * 1e3, 3),
        "tokens_per_s": round(size.tokens / seconds),
        "gb_per_s": round(size.total_bytes / seconds / 1e9, 3),
        "ratio_to_xla": None if xla is None else round(xla / seconds, 2),
        "ratio_to_memcpy": round(median(samples[MEMCPY]) / seconds, 3),
    }


def _make_group(
    options: BenchOptions, session: Session, mesh: Mesh, row_bytes: int, transport: Transport
) -> Group:
    return session.create_group(
        f"bench-{transport}-{row_bytes}",
        mesh,
        ep_axis="ep",
        num_experts=options.num_experts,
        hidden_size=row_bytes // ROW_ITEM_BYTES,
        max_tokens_per_rank=options.tokens_for(row_bytes),
        capacity_factor=2.0,
        max_top_k=options.top_k,
        alignment=16,
        transport=transport,
    )


def _calls(options: BenchOptions, group: Group, row_bytes: int) -> dict[str, Call]:
    """A compiled dispatch and combine on warm operands, each waiting for its result."""
    layer = group.register_layer("layer", top_k=options.top_k)
    tokens = options.tokens_for(row_bytes) * options.devices
    rng = np.random.default_rng(0)
    # The first K of a random order of experts: distinct and even.
    order = rng.random((tokens, options.num_experts)).argsort(axis=1)
    rows = NamedSharding(group.mesh, PartitionSpec("ep"))
    topk_idx = jax.device_put(order[:, : options.top_k].astype(np.int32), rows)
    values = rng.standard_normal((tokens, row_bytes // ROW_ITEM_BYTES), np.float32)
    x = jax.device_put(values.astype(jnp.bfloat16), rows)
    plan = jax.jit(functools.partial(ep.prepare, layer))(topk_idx)
    dispatch = jax.jit(lambda x, plan: ep.dispatch(layer, x, None, plan=plan))
    combine = jax.jit(lambda dispatched, y: ep.combine(layer, dispatched, y))
    dispatched = dispatch(x, plan)
    most = int(np.max(jax.device_get(dispatched.num_recv)))
    if most > group.capacity_per_rank:
        raise RuntimeError(f"{most} rows demanded, {group.capacity_per_rank} fit: rows are dropped")
    return {
        "dispatch": lambda: jax.block_until_ready(dispatch(x, plan)),
        "combine": lambda: jax.block_until_ready(combine(dispatched, dispatched.tokens)),
    }
