"""Trace and compile time of a whole model: our ops against stock collectives, in one run.

The program is the gradient of an unrolled transformer with one registered layer per block. Every
sample starts from empty caches; the subjects take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.bench import compile_model as model
from ep_runtime_client.bench.options import BenchOptions, BenchReport
from ep_runtime_client.bench.timing import median
from ep_runtime_client.cli.render import Column
from ep_runtime_client.session import Session

STOCK = "stock"
# Whole programs compile for seconds: more samples than this say no more.
MAX_REPEATS = 3
MAX_EXPERTS = 16
COLUMNS = (
    Column("model", "MODEL"),
    Column("layers", "LAYERS", "count"),
    Column("trace_s", "TRACE S", "count"),
    Column("compile_s", "COMPILE S", "count"),
    Column("total_s", "TOTAL S", "count"),
    Column("ratio_to_stock", "X STOCK", "count"),
    Column("hlo_lines", "HLO LINES", "count", wide=True),
)

# () -> seconds to trace, seconds to compile, lines of the compiled program.
Sample = Callable[[], tuple[float, float, int]]


def run(options: BenchOptions) -> BenchReport:
    """Compiles the model on every transport and on stock collectives."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    jax.config.update("jax_enable_compilation_cache", False)
    repeats = min(options.repeats, MAX_REPEATS)
    with ep.connect("embedded") as session:
        mesh = Mesh(np.array(jax.devices("cpu")[: options.devices]), ("ep",))
        samples = _subjects(options, session, mesh)
        taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in samples}
        for _ in range(repeats):
            for name, sample in samples.items():
                taken[name].append(sample())
    rows = [_row(name, options, taken) for name in taken]
    title = (
        f"compile time of a gradient: {options.model_layers} layers, {options.devices} CPU "
        f"devices, medians of {repeats}"
    )
    return BenchReport("compile", title, COLUMNS, rows)


def _subjects(options: BenchOptions, session: Session, mesh: Mesh) -> dict[str, Sample]:
    num_experts = max(options.devices, min(options.num_experts, MAX_EXPERTS))
    num_experts -= num_experts % options.devices
    top_k = min(options.top_k, num_experts, 2)
    layers = options.model_layers
    spec = ep.LayerSpec("layer", top_k=top_k, num_experts=num_experts, hidden_size=model.HIDDEN)
    rows = NamedSharding(mesh, PartitionSpec("ep"))
    x = jax.device_put(np.ones((options.devices, model.SEQ, model.HIDDEN), np.float32), rows)
    weights = model.blocks(layers, spec)
    samples: dict[str, Sample] = {}
    for transport in options.transports:
        group = session.create_group(
            f"bench-{transport}",
            mesh,
            ep_axis="ep",
            num_experts=num_experts,
            hidden_size=model.HIDDEN,
            max_tokens_per_rank=model.SEQ,
            max_top_k=top_k,
            max_token_dtype="float32",
            alignment=8,
            transport=transport,
        )
        names = [ep.LayerSpec(f"layer{i}", top_k=top_k) for i in range(layers)]
        moes = [model.runtime_moe(layer) for layer in group.register_layers(names)]
        samples[transport] = _sample(moes, weights, x)
    capacity = model.SEQ * top_k  # no drops, as the groups above
    samples[STOCK] = _sample([model.stock_moe(mesh, top_k, capacity)] * layers, weights, x)
    return samples


def _sample(moes: Sequence[model.Moe], weights: Sequence[model.Block], x: jax.Array) -> Sample:
    def sample() -> tuple[float, float, int]:
        jax.clear_caches()
        program = jax.jit(jax.grad(lambda weights, x: model.loss(moes, weights, x)))
        started = time.perf_counter()
        lowered = program.lower(weights, x)
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
        return traced - started, done - traced, len((compiled.as_text() or "").splitlines())

    return sample


def _row(
    name: str, options: BenchOptions, taken: Mapping[str, Sequence[tuple[float, float, int]]]
) -> dict[str, Any]:
    trace, compile_, lines = zip(*taken[name], strict=True)
    total = median([a + b for a, b, _ in taken[name]])
    stock = median([a + b for a, b, _ in taken[STOCK]])
    return {
        "model": name,
        "layers": options.model_layers,
        "trace_s": round(median(trace), 3),
        "compile_s": round(median(compile_), 3),
        "total_s": round(total, 3),
        "ratio_to_stock": round(total / stock, 2),
        "hlo_lines": lines[0],
    }
