"""Figures of grouped math: program size, compile time, bytes gathered, time against dense experts.

    python tests/bench/grouped_figures.py [FIGURE ...]

FIGUREs: ops, bytes, partitionings, compile, time; all of them without one.
With client and tests on PYTHONPATH. Prints one JSON line per figure.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_bench.base.options import BenchOptions
from ep_runtime_bench.compile import compile as compile_bench
from ep_runtime_bench.one_device import cpu_gemm as gemm_bench

AXES = (("dp", 2), ("fsdp", 2), ("ep", 2))
LAYERS, TOKENS, HIDDEN, MLP, TOP_K = 2, 64, 256, 512, 2
RECIPES: dict[str, Callable[[], Any]] = {
    "bf16": ep.recipes.BF16,
    "fp8": ep.recipes.TensorScaling,
    "fp8-block": ep.recipes.BlockScaling,
    "mxfp8": ep.recipes.MXFP8,
}
# Of one layer's router, wi and wo.
SPECS = ep.MoEParams(
    PartitionSpec(), PartitionSpec("ep", "fsdp"), PartitionSpec("ep", None, "fsdp")
)
# What remat keeps: the default, and everything that would gather a kernel once more.
SAVED = (("ep_plan", "ep_recv"), ("ep_plan", "ep_recv", "ep_wi", "ep_wo"))
_COLLECTIVE = r"= (\(.*?\)|\S+) {}(?:-start)?\("
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", re.MULTILINE)


def say(what: str, **figures: Any) -> None:
    """One line of JSON."""
    sys.stdout.write(f"{json.dumps({'what': what, **figures})}\n")
    sys.stdout.flush()


def step_of(
    session: ep.Session,
    num_experts: int,
    recipe: Any,
    saved: tuple[str, ...] = SAVED[0],
    *,
    partitioning: Literal["auto", "rule"] = "auto",
    told: ep.MoEParams | None = SPECS,
) -> Any:
    """Lowered gradient of a scanned stack of MoE blocks whose weights lie over ep and fsdp.

    `told` is what the block is told of that. Forward and backward are loops of their own; under
    remat each gathers the weights of its layer.
    """
    devices = np.array(jax.devices("cpu")[:8]).reshape([size for _, size in AXES])
    mesh = Mesh(devices, [axis for axis, _ in AXES])
    group = session.create_group(
        f"figures-{num_experts}-{recipe}-{partitioning}",
        mesh,
        ep_axis="ep",
        outer_axes=("dp", "fsdp"),
        num_experts=num_experts,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=TOP_K,
        alignment=32,
        transport="xla",
        partitioning=partitioning,
    )
    stack = group.register_layer_stack("blocks", LAYERS, top_k=TOP_K)
    params, tokens = _operands(mesh, stack[0])

    def loss(params: Any, x: Any) -> Any:
        def block(x: Any, each: Any) -> Any:
            number, weights = each
            y, _ = ep.moe(stack[number], x, weights, recipe=recipe, params_spec=told)
            return x + y, None

        block = jax.checkpoint(block, policy=ep.remat_policy(saved))
        x, _ = jax.lax.scan(block, x, (jnp.arange(LAYERS), params))
        return (x.astype(jnp.float32) ** 2).sum()

    layouts = jax.tree.map(lambda leaf: leaf.sharding, (params, tokens))
    return jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=layouts).lower(params, tokens)


def _operands(mesh: Mesh, layer: ep.EpLayer) -> tuple[Any, Any]:
    """Shapes of the stacked parameters and of the tokens, with their layouts."""
    shapes = jax.eval_shape(
        lambda key: ep.init_moe_params(key, layer, MLP, param_dtype="bfloat16"), jax.random.key(0)
    )

    def placed(shape: jax.ShapeDtypeStruct, spec: PartitionSpec, *lead: int) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((*lead, *shape.shape), shape.dtype, sharding=sharding)

    def stacked(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> Any:
        return placed(shape, PartitionSpec(None, *spec), LAYERS)

    params = jax.tree.map(stacked, shapes, SPECS)
    tokens = jax.ShapeDtypeStruct((8 * TOKENS, HIDDEN), jnp.bfloat16)
    return params, placed(tokens, PartitionSpec(("dp", "fsdp", "ep")))


def gathered(text: str, kind: str = "all-gather") -> Counter[str]:
    """Bytes of the results of all collectives of a kind on one device, by dtype."""
    found: Counter[str] = Counter()
    for shape in re.findall(_COLLECTIVE.format(kind), text):
        for dtype, bits, dims in _ARRAY.findall(shape):
            sizes = [int(size) for size in dims.split(",") if size]
            found[dtype] += prod(sizes) * int(bits or 8) // 8
    return found


def ops(session: ep.Session) -> None:
    """The number of operations in a step's program at 8 and 256 experts."""
    for name in ("bf16", "fp8"):
        for num_experts in (8, 256):
            lowered = step_of(session, num_experts, RECIPES[name]())
            traced = lowered.as_text().count(" = stablehlo.")
            compiled = len(_INSTRUCTION.findall(lowered.compile().as_text() or ""))
            say("ops of a step", recipe=name, experts=num_experts, traced=traced, compiled=compiled)


def bytes_gathered(session: ep.Session) -> None:
    """What FSDP gathers for one layer in one step, per recipe."""
    for saved in SAVED:
        base = 0
        for name, recipe in RECIPES.items():
            program = step_of(session, 8, recipe(), saved).compile()
            found = gathered(program.as_text() or "")
            base = base or found.total()
            ratio = round(found.total() / base, 3)
            figures = {"bytes": dict(found), "ratio_to_bf16": ratio}
            say("bytes all-gathered per layer and step", recipe=name, saved=saved, **figures)


def partitionings(session: ep.Session) -> None:
    """What one layer moves in one step where nothing tells the block how its weights lie."""
    for name, recipe in RECIPES.items():
        for partitioning in ("auto", "rule"):
            how: Any = {"partitioning": partitioning, "told": None}
            text = step_of(session, 8, recipe(), **how).compile().as_text() or ""
            kinds = ("all-gather", "all-reduce", "reduce-scatter")
            moved = {kind: gathered(text, kind).total() for kind in kinds}
            say("bytes moved per layer and step", recipe=name, partitioning=partitioning, **moved)


def compile_time(options: BenchOptions) -> None:
    """Trace and compile time of a 24-layer training step, against stock collectives."""
    report = compile_bench.run(options)
    for row in report.rows:
        say("compile time", title=report.title, **row)


def time_of_gemms(options: BenchOptions) -> None:
    """Grouped GEMM and quantization, as full as the slab is, against all experts dense."""
    report = gemm_bench.run(options)
    for row in report.rows:
        say("grouped GEMM", title=report.title, **row)


def _sessions() -> Iterator[ep.Session]:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    with ep.connect("none") as session:
        yield session


def main(figures: list[str]) -> None:
    """Prints the figures asked for."""
    chosen = figures or ["ops", "bytes", "partitionings", "compile", "time"]
    for session in _sessions():
        if "ops" in chosen:
            ops(session)
        if "bytes" in chosen:
            bytes_gathered(session)
        if "partitionings" in chosen:
            partitionings(session)
    if "compile" in chosen:
        compile_time(BenchOptions(mesh=AXES, num_experts=256, repeats=1))
    if "time" in chosen:
        time_of_gemms(BenchOptions())


if __name__ == "__main__":
    main(sys.argv[1:])
