"""`python -m ep_runtime_bench.moe.client`: one MoE layer by one subject, in a fresh process.

Peaks of memory cover a process's whole life, so each subject and case has its own process. It
prints "ready" when JAX is up, "compiled" after compiling, and finally its measurements. After each
stage it waits for a line, so that the next process's start does not disturb a measurement.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_bench.base import clients, energy, model_config
from ep_runtime_bench.base.device_bench import AXIS
from ep_runtime_bench.base.moe_cases import (
    ENQUEUED,
    RECIPES,
    REMAT,
    ROUNDS,
    LayerOrder,
    Measured,
    Step,
)
from ep_runtime_bench.moe import stock_layer
from ep_runtime_bench.moe.measuring import (
    create_group,
    estimated_bytes,
    peak_bytes,
    planned_bytes,
    profiled,
)
from ep_runtime_client.cli import render
from ep_runtime_client.groups import estimate
from ep_runtime_client.jobs.members import Member, start_jax
from ep_runtime_client.ops.quantize.formats import recipes

WARMUP = 2
NUM_MASTERS = 4  # x, router, wi and wo have gradients
ENOUGH_S = 0.5  # per method of timing: slow subjects need no more samples
MOST_WARM = 50  # warm-up steps before the profile

Clock = Callable[[], float]
Operands = tuple[Any, ...]
Loss = Callable[..., jax.Array]


def measure(order: LayerOrder, told: Callable[[str], object], clock: Clock) -> Measured:
    """Builds, compiles and measures the subject; `told(stage)` returns when it may continue."""
    # Connect before JAX starts, because connect chooses XLA's threads.
    with nullcontext() if order.is_stock else ep.connect(order.address) as session:
        start_jax(order.devices, Member(), order.platform)
        mesh = Mesh(np.array(jax.devices(order.platform)[: order.devices]), (AXIS,))
        told(clients.READY)
        group = None if session is None else create_group(order, order.case, mesh, session)
        operands = make_operands(order, mesh)
        layer = None if group is None else group.register_layer("layer", top_k=order.case.top_k)
        if order.quantized == "step":
            operands = (*operands, _quantized(order, layer, operands))
        losses = _losses(order, mesh, layer)
        with ThreadPoolExecutor(len(losses)) as pool:
            made = pool.map(lambda loss: _compiled(loss, operands), losses.values())
            programs = dict(zip(losses, made, strict=True))
        jax.block_until_ready(operands)
        told(clients.COMPILED)
        peaks = _peaks(programs, operands, order)
        steps = [
            _timed(name, each, operands, (order, peaks[name]), clock)
            for name, each in programs.items()
        ]
        on_one = [each.addressable_shards[0].data.nbytes for each in operands[:NUM_MASTERS]]
        given_bytes = 2 * sum(on_one)
        if group is None:
            return Measured(steps, given_bytes=given_bytes)
        dropped = int(jax.jit(functools.partial(_run, order, layer))(*operands)[2].dropped)
        program, warm = programs[""], round(ENOUGH_S / steps[-1].enqueued_s)
        profile = profiled(program, lambda: program(*operands), min(MOST_WARM, warm))
        group.check()  # a failed call ends at once, so its time would look good
        windows = 0 if order.subject == "xla" else estimate.staging_bytes(group.spec)
        recipe = recipe_of(order.recipe)
        estimated = estimated_bytes(order, order.case, mesh, recipe)
        return Measured(steps, windows, profile, dropped, given_bytes, estimated)


def make_operands(order: LayerOrder, mesh: Mesh) -> Operands:
    """Makes x [N * T, H], router [H, E], wi [E, H, 2M] (ours [E, H, 2, M]) and wo [E, M, H]."""
    case, spread = order.case, NamedSharding(mesh, PartitionSpec(AXIS))
    whole = NamedSharding(mesh, PartitionSpec())
    inner = (2 * case.inner,) if order.is_stock else (2, case.inner)
    drawn = {
        "x": ((case.tokens * mesh.size, case.hidden), 1, spread),
        "router": ((case.hidden, case.num_experts), case.hidden, whole),
        "wi": ((case.num_experts, case.hidden, *inner), case.hidden, spread),
        "wo": ((case.num_experts, case.inner, case.hidden), case.inner, spread),
    }
    return tuple(
        jax.jit(_values, static_argnums=(0, 1, 2, 3), out_shardings=sharding)(
            seed, shape, fan_in, order.dtype
        )
        for seed, (shape, fan_in, sharding) in enumerate(drawn.values())
    )


def _values(seed: int, shape: tuple[int, ...], fan_in: int, dtype: str) -> jax.Array:
    """Makes uniform values of variance 1 / fan_in by hashing each index, without copies."""
    bits = jnp.full(shape, seed * 0x9E3779B9 & 0xFFFFFFFF, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        bits += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
        stride = stride * shape[dim] & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = (bits ^ bits >> 16) * jnp.uint32(factor)
    wide = ((bits ^ bits >> 16) >> 8).astype(jnp.float32) / (1 << 23) - 1
    return (wide * (3 / fan_in) ** 0.5).astype(dtype)


def _quantized(order: LayerOrder, layer: Any, operands: Operands) -> Any:
    """Quantizes the experts' weights as the recipe's matmuls read them."""
    recipe = recipe_of(order.recipe)
    assert recipe is not None  # no other order quantizes weights once

    def quantize(*arrays: jax.Array) -> Any:
        return ep.quantize_params(ep.MoEParams(*arrays), recipe, layer=layer, weights_only=True)

    return jax.jit(quantize)(*operands[1:])


def _run(order: LayerOrder, layer: Any, *operands: Any) -> Any:
    """Runs our layer on x, router, wi, wo and weights quantized before; returns (y, aux, stats)."""
    x, router, wi, wo, *given = operands
    params = ep.MoEParams(router, wi, wo)
    if given:
        params = ep.straight_through(params, *given)
    recipe = None if given else recipe_of(order.recipe)
    options: dict[str, Any] = {"recipe": recipe, "return_stats": True}
    options["weights_at"] = order.weights
    if order.config is not None:
        options["router"] = ep.Router.from_hf(order.config)
        options["activation"] = activation_of(order.config)
    return ep.moe(layer, x, params, **options)


def activation_of(config: Mapping[str, Any]) -> str | Callable[..., jax.Array]:
    """Returns the activation of a model's experts, clamped if its config has swiglu_limit."""
    name, limit = model_config.activation_of(config), config.get("swiglu_limit")
    if limit is None:
        return name
    is_gpt_oss = config["model_type"] == "gpt_oss"

    def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (
            (up + 1) * gate * jax.nn.sigmoid(1.702 * gate) if is_gpt_oss else jax.nn.silu(gate) * up
        )

    return clamped


def recipe_of(name: str) -> recipes.Recipe | None:
    """Returns the recipe with that name in RECIPES."""
    makers: dict[str, Callable[[], recipes.Recipe]] = {
        "bf16": recipes.BF16,
        "fp8": recipes.TensorScaling,
        "fp8-block": recipes.BlockScaling,
        "mxfp8": recipes.MXFP8,
    }
    return None if name == RECIPES[0] else makers[name]()


def _losses(order: LayerOrder, mesh: Mesh, layer: Any) -> dict[str, Loss]:
    """Returns loss functions by variant; plain JAX's if `layer` is None."""
    if layer is None:
        rows, whole = PartitionSpec(AXIS), PartitionSpec()
        settings: dict[str, Any] = {"in_specs": (rows, whole, rows, rows), "out_specs": rows}
        body = stock_layer.make_layer(order.subject, order.case)
        return {"": _loss(jax.shard_map(body, mesh=mesh, check_vma=False, **settings))}

    def block(*operands: Any) -> jax.Array:
        # The stats are not returned, so XLA does not compute them.
        return _run(order, layer, *operands)[0]

    return {REMAT: _loss(jax.checkpoint(block, policy=ep.remat_policy())), "": _loss(block)}


def _loss(block: Callable[..., jax.Array]) -> Loss:
    return lambda *operands: jnp.square(block(*operands).astype(jnp.float32)).sum()


def _compiled(loss: Loss, operands: Operands) -> Any:
    """Compiles the loss and its gradient in x, router, wi and wo."""
    step = jax.value_and_grad(loss, argnums=tuple(range(NUM_MASTERS)))
    return jax.jit(step).lower(*operands).compile()


def _peaks(
    programs: Mapping[str, Any], operands: Operands, order: LayerOrder
) -> dict[str, int | None]:
    """Returns by variant the most bytes that the fullest device held in the program's first steps.

    The program with the lowest need runs first, because a process's peak never falls. Measured
    before steps are enqueued, because several of these hold their results at once.
    """
    found = {}
    for name, program in sorted(programs.items(), key=lambda each: planned_bytes(each[1])):
        for _ in range(WARMUP):
            jax.block_until_ready(program(*operands))
        found[name] = peak_bytes(order.platform, order.devices)
    return found


def _timed(
    variant: str,
    program: Any,
    operands: Operands,
    measured: tuple[LayerOrder, int | None],
    clock: Clock,
) -> Step:
    order, peak = measured

    def run() -> float:
        started = clock()
        jax.block_until_ready(program(*operands))
        return clock() - started

    step_s = _until_enough(run, order.repeats, clock)

    def many() -> float:
        started, last = clock(), None
        for _ in range(ENQUEUED):
            last = program(*operands)
        jax.block_until_ready(last)
        return (clock() - started) / ENQUEUED

    enqueued_s = median(_until_enough(many, ROUNDS, clock))
    counted = order.devices if order.platform == "gpu" else 0
    joules = energy.joules_per_step(
        counted, lambda steps: [many() for _ in range(steps // ENQUEUED)], enqueued_s
    )
    render.err(
        f"{order.name}: {order.label}{' ' * bool(variant)}{variant}: "
        f"step p50 {median(step_s) * 1e3:.2f} ms, enqueued {enqueued_s * 1e3:.2f} ms"
    )
    return Step(variant, step_s, enqueued_s, peak, planned_bytes(program), joules)


def _until_enough(run: Callable[[], float], most: int, clock: Clock) -> list[float]:
    """Calls `run` up to `most` times, at least once, within about ENOUGH_S; returns its results."""
    ends = clock() + ENOUGH_S
    found = [run()]
    while len(found) < most and clock() < ends:
        found.append(run())
    return found


if __name__ == "__main__":
    sys.exit(clients.report(measure, LayerOrder.from_dict(json.loads(sys.argv[1]))))
