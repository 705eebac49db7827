"""Compiles programs for four H200s on a machine without GPUs, up to the point of running.

    python tests/gpu/tools/compile_ahead.py [transport ...]

Needs JAX's CUDA plugin with its libraries (ep-runtime[cuda13]) and this package built with
EP_RUNTIME_CUDA=ON; no GPU, no driver. Writes a line for each program, with the calls of ours that a
device runs and what it holds of its memory. A program that XLA refuses ends this with a traceback,
one that ends XLA with a signal. The exit code is 1 where a program runs a call more or less often
than it was traced, or one that no scope of ours is around, or no block call where its name says so;
and where block calls hold more memory on four times as many devices, whose worst case is four times
as many rows.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import pkgutil
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the real one asks the driver

import custom_calls
import fakes
import jax
import jax.numpy as jnp
import numpy as np
from gpu.jobs.gpu_programs import (
    EXPERTS,
    HIDDEN,
    PROGRAMS,
    TOKENS,
    TOP_K,
    donated,
    layers_on,
    stages,
)
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime import native
from ep_runtime_client import ops
from ep_runtime_client.moe.bodies import cuda as block
from ep_runtime_client.ops.kernels import ffi

DEVICES, COUNT, MANY = 4, 3, 16
# What a scan saves for its backward pass; None saves everything.
KEPT = {
    "all": None,
    "plan and rows": ep.remat_policy(("ep_plan", "ep_recv")),
    "plan": ep.remat_policy(("ep_plan",)),
}
# (keep of moe, saved by a checkpoint) of programs with block calls.
BLOCKS = {
    ("first", "all"): None,
    ("first", "plan and first product"): ep.remat_policy(),
    ("first", "plan"): KEPT["plan"],
    ("nothing", "all"): None,
    ("nothing", "plan"): KEPT["plan"],
}
TRANSPORTS = ("nvlink", "nccl", "xla")
BLOCK_TRANSPORTS = TRANSPORTS[:2]
BLOCK, TF32 = "block", "in tf32"  # begins and ends names of programs
ONCE = "quantized once"  # ends the name of a program whose weights come so, and what it never runs
OF_WEIGHTS = {
    "ep_quantize_weights_v1",
    "ep_quantize_blocks_v1",
    "ep_transpose_weights_v1",
}
RECIPES = (None, ep.recipes.TensorScaling(), ep.recipes.BlockScaling(), ep.recipes.MXFP8())
# The facts XLA reads from a device while it compiles.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  device_memory_size: 150000000000 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } device_description_str: "NVIDIA H200"
"""


@functools.cache
def devices(count: int) -> np.ndarray:
    """Fakes that many devices, and registers our calls for them as on GPUs."""
    topology = topologies.get_topology_desc(
        "cuda", platform="cuda", target_config=_H200, topology=f"1x1x{count}"
    )
    jax_devices, real = jax.devices, {"cuda": topology.devices}
    jax.devices = lambda backend=None: real.get(backend) or jax_devices(backend)
    ffi.ensure_registered("cuda")
    jax.devices = jax_devices
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        found = importlib.import_module(module.name)
        for name, told in (("ensure_registered", None), ("register_for_gpus", ("9.0",))):
            if hasattr(found, name):
                setattr(found, name, lambda *_, told=told: told)
    return np.array(topology.devices)


def nodes_of(transport: str) -> dict[str, int]:
    return {"node_size": 1} if transport == "nccl" else {}


def scanned(
    devices: np.ndarray,
    transport: str,
    recipe: Any,
    policy: Any,
    *,
    separate: bool = False,
    keep: Any = "first",
    once: bool = False,
    dtype: Any = jnp.bfloat16,
) -> tuple[Any, tuple[Any, ...]]:
    """A scan over layers, with its gradients; and its operands. `separate`: gate and up are a
    pair. `once`: weights come quantized."""
    tokens, hidden, width, mesh = 128, 256, 128, Mesh(devices, ("ep",))
    group = fakes.local_group(
        mesh=mesh,
        transport=transport,
        num_experts=4 * mesh.size,
        hidden_size=hidden,
        max_tokens_per_rank=tokens,
        max_token_dtype=jnp.dtype(dtype).name,
        alignment=128,
        **nodes_of(transport),
    )
    stack = group.register_layer_stack("moe", COUNT, top_k=TOP_K)

    def quantized(params: Any) -> Any:
        return ep.quantize_params(params, recipe, layer=stack[0], weights_only=True)

    def loss(x: Any, params: Any, params8: Any = None) -> Any:
        if params8 is not None:
            params = ep.straight_through(params, params8)

        def step(x: Any, each: Any) -> Any:
            y, _ = ep.moe(stack[each[0]], x, each[1], recipe=recipe, keep=keep)
            return x + y, None

        kept = jax.checkpoint(step, policy=policy) if policy else step
        return jax.lax.scan(kept, x, (jnp.arange(COUNT), params))[0].astype(jnp.float32).sum()

    def array(spec: PartitionSpec, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    experts, each = PartitionSpec(None, "ep"), group.spec.num_experts
    half = array(experts, COUNT, each, hidden, width)
    params = ep.MoEParams(
        array(PartitionSpec(), COUNT, hidden, each),
        (half, half) if separate else array(experts, COUNT, each, hidden, 2, width),
        array(experts, COUNT, each, width, hidden),
    )
    x, lies = array(PartitionSpec("ep"), tokens * mesh.size, hidden), NamedSharding(mesh, experts)
    made = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), each)
        for each in ([jax.eval_shape(quantized, params)] if once else [])
    ]
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), (x, params, *made)


def programs(devices: np.ndarray, transport: str) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    def group(name: str, mesh: Mesh, **more: Any) -> fakes.LocalGroup:
        given = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS}
        return fakes.local_group(
            name=f"{name}-{transport}",
            mesh=mesh,
            transport=transport,
            max_top_k=TOP_K,
            **nodes_of(transport),
            **given,
            **more,
        )

    layers = layers_on(devices, group)
    rows, count = NamedSharding(layers.mesh, PartitionSpec("ep")), TOKENS * layers.mesh.size
    operands = tuple(
        jax.ShapeDtypeStruct((count, width), dtype, sharding=rows)
        for width, dtype in ((HIDDEN, jnp.float32), (TOP_K, jnp.int32), (TOP_K, jnp.float32))
    )
    # "donated" is two programs in a row; with two nodes XLA merges gathers of equal rows.
    left_out = {donated, stages} if transport == "nccl" else {donated}
    for program in PROGRAMS:
        if program not in left_out:
            yield program.__name__, functools.partial(program, layers), operands
    # Transports move rows in different ways, which recipes do not change: one covers every policy.
    kept = KEPT if transport == TRANSPORTS[0] else {"all": None}
    for (name, policy), recipe in itertools.product(kept.items(), RECIPES):
        run, given = scanned(devices, transport, recipe, policy)
        yield f"scanned {type(recipe).__name__}, keeps {name}", lambda run=run: run, given
    if transport == TRANSPORTS[0]:
        for recipe in RECIPES[:2]:
            run, given = scanned(devices, transport, recipe, None, separate=True)
            yield f"scanned {type(recipe).__name__}, a pair", lambda run=run: run, given
        for recipe in RECIPES[1:]:
            run, given = scanned(devices, transport, recipe, KEPT["plan"], once=True)
            yield f"scanned {type(recipe).__name__}, {ONCE}", lambda run=run: run, given
    if transport in BLOCK_TRANSPORTS:
        for (keep, name), policy in BLOCKS.items():
            run, given = scanned(devices, transport, None, policy, keep=keep)
            yield f"{BLOCK}, keep={keep}, keeps {name}", lambda run=run: run, given
            way = {"keep": keep, "separate": keep == "nothing", "dtype": jnp.float32}
            run, given = scanned(devices, transport, None, policy, **way)
            yield f"{BLOCK}, keep={keep}, keeps {name}, {TF32}", lambda run=run: run, given


def faults(name: str, before: custom_calls.Calls, text: str) -> list[str]:
    """Lists faults in the calls of a compiled program."""
    if name.endswith(ONCE):
        again = sorted({*before} & OF_WEIGHTS)
        return [f"weights come quantized, and {again} run"] if again else faults("", before, text)
    if name.startswith(BLOCK) and not {*block.TARGETS} <= {*before}:
        return [f"no block call among {sorted(before)}"]
    lines = custom_calls.differences(before, custom_calls.compiled(text))
    return lines + [f"in no scope: {line}" for line in custom_calls.without_scope(text)]


def growth() -> list[str]:
    """Lists faults in the memory of block calls on more devices."""
    wrong = []
    for (keep, name), policy in BLOCKS.items():
        held = []
        for count in (DEVICES, MANY):
            run, given = scanned(devices(count), "nvlink", None, policy, keep=keep)
            held.append(run.lower(*given).compile().memory_analysis().temp_size_in_bytes)
        say(f"block, keep={keep}, keeps {name}: {held} bytes on {DEVICES} and {MANY}\n")
        # A plan has three numbers per row of the worst case; the rows' H values are not counted.
        rows = MANY * 128 * TOP_K + 4 * 128
        if held[1] - held[0] > 3 * 4 * rows * (COUNT + 2):
            wrong.append(f"block, keep={keep}, keeps {name}: {held} bytes")
    return wrong


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(transports: list[str]) -> int:
    unknown = [name for name in transports if name not in TRANSPORTS]
    if unknown:
        sys.exit(f"unknown transports {unknown}; there are {TRANSPORTS}")
    if not native.library_path("cuda").exists():
        sys.exit("built without EP_RUNTIME_CUDA=ON")
    found, wrong = devices(DEVICES), 0
    for transport in transports or TRANSPORTS:
        for name, make, operands in programs(found, transport):
            say(f"{transport} {name}: ")
            started = time.monotonic()
            with jax.default_matmul_precision("default" if name.endswith(TF32) else "highest"):
                traced = make().trace(*operands)
                compiled = traced.lower().compile()
            calls = custom_calls.traced(traced.jaxpr, "cuda")
            held = compiled.memory_analysis().temp_size_in_bytes
            seconds = time.monotonic() - started
            say(f"{calls.total()} calls, {held / 2**20:.1f} MiB, {seconds:.1f} s\n")
            for line in faults(name, calls, compiled.as_text()):
                wrong += 1
                say(f"    {line}\n")
    if TRANSPORTS[0] in (transports or TRANSPORTS):
        wrong += len(growth())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
