"""`python stored_child.py TASK ARGUMENT`: a fresh process that loads what another one stored.

Prints one JSON value as its last line.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_NPROC", "32")

import fakes
import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec
from mode_programs import EXPERTS, TOP_K, draw, grads_of, loss, meant_grads, put

import ep_runtime as ep

SPEC = PartitionSpec(("dp", "ep"))
CAPACITY = 64
# All variants have rows of the same shape: only names and specs tell programs apart. The first
# variants are compiled as well.
COMPILED = ("base", "alignment")
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "alignment": {"alignment": 4},
    "layer alignment": {"layer_alignment": 4},
    "capacity of the group": {"recv_capacity_per_rank": 128},
    "layer name": {"layer_name": "other"},
    "group name": {"name": "other"},
    "max_top_k": {"max_top_k": 4},
    "tokens": {"max_tokens_per_rank": 64},
    "capacity of the call": {"capacity": 56},
    "top_k": {"top_k": 1},
    "group size": {"axes": {"dp": 4, "ep": 2}},
}


def open_group(**settings: Any) -> tuple[fakes.LocalGroup, Any]:
    """A group of a fixed name and its layer; None as the layer's name registers none."""
    defaults: dict[str, Any] = {
        "axes": {"dp": 2, "ep": 4},
        "name": "stored",
        "outer_axes": "dp",
        "transport": "memfd",
        "num_experts": EXPERTS,
        "max_tokens_per_rank": 8,
        "max_top_k": TOP_K,
    }
    name = settings.pop("layer_name", "moe")
    layer = {"top_k": settings.pop("top_k", TOP_K)}
    if "layer_alignment" in settings:
        layer["alignment"] = settings.pop("layer_alignment")
    group = fakes.local_group(**(defaults | settings))
    return group, group.register_layer(name, **layer) if name is not None else None


def _is_right(got: Any, x: Any, weights: Any) -> bool:
    pairs = zip(got, meant_grads(x, weights), strict=True)
    return all(np.allclose(a, b, rtol=2e-5, atol=2e-5) for a, b in pairs)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _product(layer: Any) -> Any:
    """The weight's layout is known when XLA partitions the program."""
    spec = layer.group_spec
    shapes = [(spec.num_slabs, 16, 16), (EXPERTS, 16, 8), (spec.num_slabs, EXPERTS // spec.ep_size)]
    specs = (
        PartitionSpec(spec.token_axes),
        PartitionSpec("ep", "dp"),
        PartitionSpec(spec.token_axes),
    )
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(layer.mesh, each))
        for shape, dtype, each in zip(
            shapes, (np.float32, np.float32, np.int32), specs, strict=True
        )
    ]
    return jax.jit(lambda *args: ep.grouped_gemm(*args, layer=layer)).lower(*operands)


def cache(directory: str) -> Any:
    """Lowers every variant's forward, its gradients, and a product that XLA partitions by our rule.

    Compiles some with the persistent cache on, counting its hits and misses.
    """
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    report = []
    for name, settings in VARIANTS.items():
        settings = dict(settings)
        capacity = settings.pop("capacity", CAPACITY)
        group, layer = open_group(**settings)
        top_k = layer.top_k
        x, idx, weights = (a[:, : a.shape[1] if a.shape[1] > 2 else top_k] for a in draw())
        operands = put(group, SPEC, x, idx, weights)

        def forward(*args: Any, layer: Any = layer, capacity: int = capacity) -> Any:
            return loss(layer, *args, capacity=capacity)

        lowered = [f.lower(*operands) for f in (jax.jit(forward), grads_of(forward))]
        lowered.append(_product(layer))
        said: dict[str, Any] = {
            "name": name,
            "texts": [_digest(each.as_text()) for each in lowered],
        }
        if name in COMPILED:
            jax.block_until_ready(operands)
            del events[:]
            programs = [each.compile() for each in lowered]
            said["hits"] = events.count("/jax/compilation_cache/cache_hits")
            said["misses"] = events.count("/jax/compilation_cache/cache_misses")
            said["right"] = _is_right(programs[1](*operands), x, weights)
        report.append(said)
        group.close()
    return report


def _outcome(run: Any, operands: Any) -> str:
    """ "right", "wrong", or the text of the error."""
    try:
        got = jax.block_until_ready(run(*operands))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "right" if _is_right(got, *draw()[::2]) else "wrong"


def load(directory: str) -> Any:
    """Runs an exported program and an executable at every stage of their layer's life."""
    stages: list[tuple[str, dict[str, Any]]] = [
        ("no layer", {"layer_name": None}),
        ("layer", {}),
        ("other alignment", {"alignment": 4}),
        ("again", {}),
    ]
    said: dict[str, dict[str, str]] = {"export": {}, "executable": {}}
    runs: dict[str, Any] = {}
    operands: list[Any] = []
    for stage, settings in stages:
        group, _ = open_group(**settings)
        operands = put(group, SPEC, *draw())
        if not runs:
            runs = _load_both(Path(directory))
        for kind, run in runs.items():
            said[kind][stage] = _outcome(run, operands)
        group.close()
    for kind, run in runs.items():
        said[kind]["closed"] = _outcome(run, operands)
    return said


def _load_both(directory: Path) -> dict[str, Any]:
    export = jax.export.deserialize((directory / "export").read_bytes())
    executable = pickle.loads((directory / "executable").read_bytes())
    return {
        "export": jax.jit(export.call),
        "executable": serialize_executable.deserialize_and_load(*executable),
    }


def main() -> int:
    jax.config.update("jax_num_cpu_devices", 8)
    task, argument = sys.argv[1:]
    sys.stdout.write(json.dumps({"cache": cache, "load": load}[task](argument)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
