"""The router's matmul against f64, as GPUs compute it and as all others do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_runtime_client.ops.routing import matmul as routing_matmul
from ep_runtime_client.ops.routing.matmul import router_logits

TOKENS, HIDDEN, EXPERTS = 64, 256, 8
BF16, F32 = jnp.bfloat16, jnp.float32


def draw(dtype: Any, *shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def worst(found: Any, wanted: Any) -> float:
    wanted = np.asarray(wanted, np.float64)
    return float(np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("router_dtype", [BF16, F32])
@pytest.mark.parametrize("lead", [(TOKENS,), (8, TOKENS // 8)])
def test_products_of_bf16_have_the_accuracy_of_f32(router_dtype: Any, lead: Any) -> None:
    x, router = draw(BF16, *lead, HIDDEN), draw(router_dtype, HIDDEN, EXPERTS, seed=1)
    grad = draw(F32, *lead, EXPERTS, seed=2)
    x64, router64, grad64 = (np.asarray(a, np.float64) for a in (x, router, grad))
    assert worst(jax.jit(routing_matmul._narrow)(x, router), x64 @ router64) < 1e-6
    d_x, d_router = jax.jit(routing_matmul._narrow_grads)(x, router, grad)
    flat = x64.reshape(-1, HIDDEN).T @ grad64.reshape(-1, EXPERTS)
    assert (d_x.dtype, d_router.dtype) == (x.dtype, router.dtype)
    assert worst(d_x, grad64 @ router64.T) < 2**-8  # its own rounding
    assert worst(d_router, flat) < (2**-8 if router_dtype == BF16 else 2e-5)


def test_an_f32_is_the_sum_of_three_bf16() -> None:
    values = draw(F32, 4096)
    parts = jax.jit(routing_matmul._parts, static_argnums=1)(values, 3)
    total = sum(np.asarray(part, np.float64) for part in parts)
    np.testing.assert_array_equal(total, np.asarray(values, np.float64))


@pytest.mark.parametrize(
    ("x_dtype", "router_dtype", "narrow"),
    [(BF16, BF16, True), (BF16, F32, True), (F32, F32, False), (F32, BF16, False)],
)
def test_gpus_multiply_tokens_of_bf16_without_f32(
    x_dtype: Any, router_dtype: Any, narrow: bool
) -> None:
    operands = draw(x_dtype, TOKENS, HIDDEN), draw(router_dtype, HIDDEN, EXPERTS)

    def loss(x: Any, router: Any) -> Any:
        return jnp.sin(router_logits(x, router)).sum()

    for platform, wide in (("cuda", not narrow), ("cpu", True)):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*operands)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("HIGHEST" in text) == wide, platform


def test_gradients_elsewhere_are_those_of_the_f32_matmul() -> None:
    operands = draw(BF16, TOKENS, HIDDEN), draw(F32, HIDDEN, EXPERTS)
    found, wanted = (
        jax.grad(lambda x, r, f=f: jnp.sin(f(x, r)).sum(), argnums=(0, 1))(*operands)
        for f in (router_logits, routing_matmul._wide)
    )
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("explicit", [False, True])
def test_tokens_stay_apart_and_the_router_gets_all_gradients(explicit: bool) -> None:
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("ep",), axis_types=(kind,))
    x = draw(BF16, TOKENS, HIDDEN)
    router = draw(F32, HIDDEN, EXPERTS)

    def loss(x: Any, router: Any) -> Any:
        return jnp.sin(router_logits(x, router)).sum()

    wanted = jax.grad(loss, argnums=(0, 1))(x, router)
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("ep")))
    whole = jax.device_put(router, NamedSharding(mesh, PartitionSpec()))
    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(spread, whole)
    for got, want in zip(found, wanted, strict=True):
        assert worst(got, want) < 2**-7


def test_inside_a_shard_map_the_router_gets_the_gradients_of_all_shards() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("ep",))
    x, router = draw(BF16, TOKENS, HIDDEN), draw(F32, HIDDEN, EXPERTS)

    def local(x: Any, router: Any) -> Any:
        return jax.lax.psum(jnp.sin(router_logits(x, router)).sum(), "ep")

    specs: dict[str, Any] = {"in_specs": (PartitionSpec("ep"), PartitionSpec())}
    mapped = jax.shard_map(local, mesh=mesh, out_specs=PartitionSpec(), **specs)
    found = jax.jit(jax.grad(mapped, argnums=(0, 1)))(x, router)
    wanted = jax.grad(lambda x, r: jnp.sin(router_logits(x, r)).sum(), argnums=(0, 1))(x, router)
    for got, want in zip(found, wanted, strict=True):
        assert worst(got, want) < 2**-7
