"""Programs of `grouped_gemm`, and the GPU kernels that they hold after lowering."""

from __future__ import annotations

import functools
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np

import ep_runtime as ep
from ep_runtime_client.ops.gemm import kernels_8, kernels_16, kernels_32

SIZES = np.int32([[5, 0, 40, 3], [1, 33, 2, 130]])
TARGETS = (*kernels_16.TARGETS, *kernels_32.TARGETS, *kernels_8.TARGETS)


def drawn(
    k: int = 160, n: tuple[int, ...] = (2, 128), dtype: Any = jnp.bfloat16, experts: int = 8
) -> Any:
    """lhs [2, 192, k], rhs [experts, k, *n], bias [experts, *n]; rows outside groups are NaN."""
    rng = np.random.default_rng(0)
    shapes = ((2, 192, k), (experts, k, *n), (experts, *n))
    lhs, rhs, bias = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    for slab, used in enumerate(SIZES.sum(-1)):
        lhs[slab, used:] = np.nan
    return lhs, rhs, bias


def loss(lhs: Any, rhs: Any, bias: Any, **options: Any) -> Any:
    mine = jnp.arange(lhs.shape[1]) < SIZES.sum(-1)[:, None]
    out = ep.grouped_gemm(lhs, rhs, SIZES, bias=bias, **options)
    mine = mine.reshape(*mine.shape, *([1] * (out.ndim - 2)))
    return jnp.sin(jnp.where(mine, out, 0).astype(jnp.float32)).sum()


def graded(**options: Any) -> Any:
    return jax.grad(functools.partial(loss, **options), argnums=(0, 1, 2))


def lowered(function: Any, *operands: Any, platform: str = "cuda") -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def calls(function: Any, *operands: Any, platform: str = "cuda") -> dict[str, int]:
    """Counts the calls of each of TARGETS in the program."""
    text = lowered(function, *operands, platform=platform)
    found = {name: text.count(f"@{name}(") for name in TARGETS}
    return {name: count for name, count in found.items() if count}


def spread(checked: bool, **options: Any) -> Any:
    """Results and gradients of (lhs, rhs, bias) inside a user's shard_map."""
    mesh, spec = fakes.mesh_of({"ep": 2}), jax.sharding.PartitionSpec("ep")
    mapped = jax.shard_map(
        lambda lhs, rhs, bias, sizes: ep.grouped_gemm(lhs, rhs, sizes, bias=bias, **options),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=checked,
    )
    return pulled(lambda *operands: mapped(*operands, SIZES))


def pulled(multiply: Any) -> Any:
    def run(*operands: Any) -> Any:
        out, pull = jax.vjp(multiply, *operands)
        return out, pull(jnp.cos(out))

    return run
