"""Programs with products of experts: rows [R, C, K'], two experts per slab."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

AGAIN = 20
SIZES = np.int32([[5, 80], [0, 33], [96, 0], [0, 0]])


def drawn(features: int) -> tuple[Any, Any, Any, Any]:
    """x [4, 96, K'], kernel [8, K', K'], bias [8, K'] and SIZES; rows outside groups are NaN."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 96, features)).astype(jnp.bfloat16)
    for slab, used in enumerate(SIZES.sum(-1)):
        x[slab, used:] = np.nan
    kernel = (rng.standard_normal((8, features, features)) / 8).astype(jnp.bfloat16)
    bias = rng.standard_normal((8, features)).astype(jnp.bfloat16)
    return x, kernel, bias, SIZES


def multiply(x: Any, kernel: Any, sizes: Any, bias: Any, **options: Any) -> Any:
    return ep.grouped_gemm(x, kernel, sizes, bias=bias, **options)


def scanned(x: Any, kernel: Any, sizes: Any, bias: Any, **options: Any) -> Any:
    """Three products in a row, with remat."""

    def step(x: Any, scale: Any) -> Any:
        return jnp.tanh(multiply(x, kernel * scale, sizes, bias, **options)), None

    scales = jnp.asarray([1, 0.5, 2], x.dtype)
    return jax.lax.scan(jax.checkpoint(step), x, scales)[0]


def loss(product: Any, x: Any, kernel: Any, bias: Any, sizes: Any) -> Any:
    out = product(x, kernel, sizes, bias)
    mine = jnp.arange(x.shape[1]) < sizes.sum(-1)[:, None]
    return jnp.sin(jnp.where(mine[..., None], out, 0).astype(jnp.float32)).sum()


def graded(product: Any) -> Any:
    """Returns the loss, and gradients of x, kernel and bias."""
    return jax.jit(jax.value_and_grad(functools.partial(loss, product), argnums=(0, 1, 2)))


def same_every_time(run: Any, operands: Any) -> Any:
    """Returns a program's results, and checks replays of its captured graph."""
    got = jax.block_until_ready(run(*operands))
    for _ in range(AGAIN):
        again = run(*operands)
    jax.tree.map(np.testing.assert_array_equal, jax.block_until_ready(again), got)
    return got


def spread(gpus: list[Any], mode: str, product: Any, operands: Any) -> Any:
    """Runs `graded` with slabs and experts spread over the GPUs; checks that two runs agree."""
    mesh, spec = Mesh(np.array(gpus), ("ep",)), PartitionSpec("ep")
    whole: Any = functools.partial(loss, product)

    def part(*blocks: Any) -> Any:
        return jax.lax.psum(loss(product, *blocks), "ep")

    if mode == "shard_map":
        whole = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    run = jax.jit(jax.value_and_grad(whole, argnums=(0, 1, 2)))
    put = [jax.device_put(x, NamedSharding(mesh, spec)) for x in operands]
    got = jax.block_until_ready(run(*put))
    jax.tree.map(np.testing.assert_array_equal, jax.block_until_ready(run(*put)), got)
    return got
