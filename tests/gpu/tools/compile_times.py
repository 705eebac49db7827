"""Trace and compile time of a whole model for four H200s that need not be here.

    python tests/gpu/tools/compile_times.py [layers [repeats]]

The model of `ep-runtime bench compile` in bf16, on our ops and on stock collectives, over two
meshes. Needs what `compile_ahead.py` needs. Writes seconds of CPU time, all threads together,
which other work on the machine changes little; the last column is ours over stock's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from math import prod
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
from gpu.tools.compile_ahead import devices, say
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime import native
from ep_runtime_bench.compile import compile as bench
from ep_runtime_bench.compile import model

MESHES = ({"ep": 4}, {"fsdp": 2, "ep": 2})
EXPERTS, TOP_K = 32, 2


def subjects(found: np.ndarray, axes: dict[str, int], layers: int) -> dict[str, bench.Sample]:
    """The model on a group over these axes, and beside it."""
    mesh = Mesh(found.reshape([*axes.values()]), [*axes])
    group = fakes.local_group(
        name="x".join(axes),
        mesh=mesh,
        outer_axes=tuple(axis for axis in axes if axis != "ep"),
        num_experts=EXPERTS,
        hidden_size=model.HIDDEN,
        max_tokens_per_rank=model.SEQ,
        max_top_k=TOP_K,
        max_token_dtype="bfloat16",
        transport="nvlink",
    )
    names = [f"layer{number}" for number in range(layers)]
    moes = [model.runtime_moe(group.register_layer(name, top_k=TOP_K)) for name in names]
    spec = ep.LayerSpec("layer", top_k=TOP_K, num_experts=EXPERTS, hidden_size=model.HIDDEN)
    weights = model.blocks(layers, spec, mesh, jnp.bfloat16)
    shape = (prod(axes.values()), model.SEQ, model.HIDDEN)
    tokens = NamedSharding(mesh, PartitionSpec(model.token_axes(mesh)))
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=tokens)
    stock = [model.stock_moe(mesh, TOP_K, model.SEQ * TOP_K)] * layers
    return {
        "ours": bench.sample_of(moes, weights, x),
        "stock": bench.sample_of(stock, weights, x),
    }


def main(layers: int = 24, repeats: int = 1) -> int:
    if not native.library_path("cuda").exists():
        sys.exit("built without EP_RUNTIME_CUDA=ON")
    found = devices()
    for axes in MESHES:
        totals: dict[str, list[float]] = {}
        for _ in range(repeats):
            for name, sample in subjects(found, axes, layers).items():
                totals.setdefault(name, []).append(cpu_s(sample))
        ours, stock = (min(totals[name]) for name in ("ours", "stock"))
        say(f"{layers} layers, {axes}: ours {ours:.1f} s, stock {stock:.1f} s")
        say(f", {ours / stock:.2f}\n")
    return 0


def cpu_s(work: Callable[[], Any]) -> float:
    """Of this process and those that it ran to the end, such as ptxas."""
    before = os.times()
    work()
    return sum(os.times()[:4]) - sum(before[:4])


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
