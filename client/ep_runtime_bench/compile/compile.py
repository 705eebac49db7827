"""Trace and compile time of a whole model: our ops against stock collectives, in one run.

The program is a training step of an unrolled transformer with one registered layer per block, its
weights spread over the mesh. Every sample starts from empty caches; the subjects take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.base.timing import median
from ep_runtime_bench.compile import model
from ep_runtime_client.cli.tables import Column
from ep_runtime_client.sessions.session import Session

STOCK = "stock"
# Whole programs compile for seconds: more samples than this say no more.
MAX_REPEATS = 3
COLUMNS = (
    Column("model", "MODEL"),
    Column("layers", "LAYERS", "count"),
    Column("trace_s", "TRACE S", "count"),
    Column("compile_s", "COMPILE S", "count"),
    Column("total_s", "TOTAL S", "count"),
    Column("ratio_to_stock", "X STOCK", "count"),
    Column("cpu_s", "CPU S", "count"),
    Column("cpu_ratio_to_stock", "X STOCK CPU", "count"),
    Column("hlo_lines", "HLO LINES", "count", wide=True),
)


class Cost(NamedTuple):
    """Of one program, from empty caches.

    Attributes:
        trace_s: seconds to trace and lower.
        compile_s: seconds to compile.
        cpu_s: of both, all threads of this process together: other work on the machine changes it
            less than what a clock says.
        hlo_lines: lines of the compiled program.
    """

    trace_s: float
    compile_s: float
    cpu_s: float
    hlo_lines: int

    @property
    def total_s(self) -> float:
        return self.trace_s + self.compile_s


Sample = Callable[[], Cost]


def run(options: BenchOptions) -> BenchReport:
    """Compiles the model on every transport and on stock collectives."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    jax.config.update("jax_enable_compilation_cache", False)
    repeats = min(options.repeats, MAX_REPEATS)
    axes = dict(options.mesh or (("ep", options.devices),))
    with ep.connect("embedded") as session:
        devices = np.array(jax.devices("cpu")[: options.devices]).reshape([*axes.values()])
        samples = _subjects(options, session, Mesh(devices, [*axes]))
        taken: dict[str, list[Cost]] = {name: [] for name in samples}
        for _ in range(repeats):
            for name, sample in samples.items():
                taken[name].append(sample())
    rows = [_row(name, options, taken) for name in taken]
    shape = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    title = (
        f"compile time of a training step: {options.model_layers} layers of "
        f"{_num_experts(options, axes['ep'])} experts, CPU devices {shape}, medians of {repeats}"
    )
    return BenchReport("compile", title, COLUMNS, rows)


def _num_experts(options: BenchOptions, ranks: int) -> int:
    return max(ranks, options.num_experts - options.num_experts % ranks)


def _subjects(options: BenchOptions, session: Session, mesh: Mesh) -> dict[str, Sample]:
    num_experts = _num_experts(options, mesh.shape["ep"])
    top_k = min(options.top_k, num_experts, 2)
    layers, token_axes = options.model_layers, model.token_axes(mesh)
    spec = ep.LayerSpec("layer", top_k=top_k, num_experts=num_experts, hidden_size=model.HIDDEN)
    shape = (prod(mesh.shape[axis] for axis in token_axes), model.SEQ, model.HIDDEN)
    rows = NamedSharding(mesh, PartitionSpec(token_axes))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
    weights = model.blocks(layers, spec, mesh)
    samples: dict[str, Sample] = {}
    for transport in options.transports:
        group = session.create_group(
            f"bench-{transport}",
            mesh,
            ep_axis="ep",
            outer_axes=token_axes[:-1],
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
        samples[transport] = sample_of(moes, weights, x)
    capacity = model.SEQ * top_k  # no drops, as the groups above
    samples[STOCK] = sample_of([model.stock_moe(mesh, top_k, capacity)] * layers, weights, x)
    return samples


def sample_of(
    moes: Sequence[model.Moe],
    weights: Sequence[model.LayerWeights],
    x: jax.ShapeDtypeStruct,
) -> Sample:
    """Traces and compiles a training step of these blocks, from empty caches."""
    layouts = jax.tree.map(lambda weight: weight.sharding, weights)

    def sample() -> Cost:
        jax.clear_caches()
        program = jax.jit(partial(model.train_step, moes), out_shardings=layouts, donate_argnums=0)
        started, on_cpus = time.perf_counter(), time.process_time()
        lowered = program.lower(weights, x)
        traced = time.perf_counter()
        compiled = lowered.compile()
        done, cpu_s = time.perf_counter(), time.process_time() - on_cpus
        lines = len((compiled.as_text() or "").splitlines())
        return Cost(traced - started, done - traced, cpu_s, lines)

    return sample


def _row(name: str, options: BenchOptions, taken: Mapping[str, Sequence[Cost]]) -> dict[str, Any]:
    trace, compile_, cpu, lines = zip(*taken[name], strict=True)
    total = median([cost.total_s for cost in taken[name]])
    stock = taken[STOCK]
    return {
        "model": name,
        "layers": options.model_layers,
        "trace_s": round(median(trace), 3),
        "compile_s": round(median(compile_), 3),
        "total_s": round(total, 3),
        "ratio_to_stock": round(total / median([cost.total_s for cost in stock]), 2),
        "cpu_s": round(median(cpu), 3),
        "cpu_ratio_to_stock": round(median(cpu) / median([cost.cpu_s for cost in stock]), 2),
        "hlo_lines": lines[0],
    }
