"""Losses that read `MoEStats.routing`, and the precision of the router's matmul."""

from __future__ import annotations

from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.special import softmax

import ep_runtime as ep
from ep_runtime_client.ops.routing import matmul as routing_matmul
from ep_runtime_client.ops.routing.matmul import router_logits

LAYERS, BATCH, SEQUENCE, HIDDEN, EXPERTS, TOP_K = 2, 4, 8, 16, 8, 2


def balance_of_layers(routings: Any) -> jax.Array:
    """Transformers' load_balancing_loss_func: one mean over the tokens of all layers."""
    experts = routings.logits.shape[-1]
    chosen = jax.nn.one_hot(routings.topk_idx, experts)  # [layers, ..., K, E]
    load = chosen.reshape(-1, *chosen.shape[-2:]).mean(0)
    shares = jax.nn.softmax(routings.logits).reshape(-1, experts).mean(0)
    return experts * (load * shares).sum()


def drawn() -> Any:
    shape = (LAYERS, BATCH, SEQUENCE, EXPERTS)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_z_loss_is_its_formula() -> None:
    logits = drawn()[0]
    wanted = 0.1 * (np.log(np.exp(np.float64(logits)).sum(-1)) ** 2).mean()
    np.testing.assert_allclose(ep.z_loss(ep.route(logits, TOP_K), coeff=0.1), wanted, rtol=1e-5)


def test_balance_per_sequence_is_its_formula() -> None:
    logits = drawn()[0]
    scores = 1 / (1 + np.exp(-np.float64(logits)))
    shares = scores / scores.sum(-1, keepdims=True)
    chosen = np.argsort(-scores, -1, kind="stable")[..., :TOP_K]
    wanted = 0.0
    for sequence in range(BATCH):
        counts = np.bincount(chosen[sequence].ravel(), minlength=EXPERTS)
        load = EXPERTS / (TOP_K * SEQUENCE) * counts
        wanted += (load * shares[sequence].mean(0)).sum() / BATCH
    routing = ep.route(logits, TOP_K, router=ep.Router("sigmoid"))
    got = ep.sequence_aux_loss(routing, coeff=0.1)
    np.testing.assert_allclose(got, 0.1 * wanted, rtol=1e-5)


LOSSES = {"z": ep.z_loss, "balance": ep.aux_loss, "by sequence": ep.sequence_aux_loss}


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_are_in_no_loss(name: str) -> None:
    """Masks the routing or the loss; a sequence without tokens does not count either."""
    logits, mask = drawn()[0], np.ones((BATCH, SEQUENCE), bool)
    mask[:, 5:], mask[2] = False, False
    odd = np.where(mask[..., None], logits, np.nan)
    kept = logits[[0, 1, 3], :5]

    def of_logits(logits: Any, coeff: Any, *masks: Any) -> Any:
        routing = ep.route(logits, TOP_K, token_mask=masks[0])
        return LOSSES[name](routing, coeff=coeff, **({"token_mask": mask} if masks[1] else {}))

    run = jax.jit(jax.value_and_grad(of_logits, argnums=(0, 1)), static_argnums=3)
    want, (grads, of_coeff) = run(kept, 0.1, None, False)
    assert want.dtype == jnp.float32
    np.testing.assert_allclose(want, 0.1 * of_coeff, rtol=1e-6)
    for given, masks in ((odd, (mask, False)), (odd, (mask, True)), (logits, (None, True))):
        value, (found, _) = run(given, jnp.bfloat16(0.1), *masks)
        np.testing.assert_allclose(value, want, rtol=5e-3)  # a coefficient of bfloat16
        np.testing.assert_array_equal(found[~mask], 0)
        np.testing.assert_allclose(found[mask].reshape(kept.shape), grads, rtol=1e-2, atol=1e-7)
    assert LOSSES[name](ep.route(odd, TOP_K, token_mask=0 * mask > 0), coeff=0.1) == 0


def test_losses_name_what_a_routing_lacks() -> None:
    idx, weights, probs, logits = ep.route(drawn()[0, 0], TOP_K)
    with pytest.raises(ValueError, match=r"a routing of tokens \[B, S\], got probs \[8, 8\]"):
        ep.sequence_aux_loss(ep.Routing(idx, weights, probs), coeff=0.1)
    with pytest.raises(ValueError, match="sequence_aux_loss needs routing.probs"):
        ep.sequence_aux_loss(ep.Routing(idx, weights, None, logits), coeff=0.1)
    with pytest.raises(ValueError, match="z_loss needs routing.logits"):
        ep.z_loss(ep.Routing(idx, weights, probs), coeff=0.1)


def test_balance_of_layers_is_its_formula() -> None:
    logits = drawn()
    flat = np.float64(logits).reshape(-1, EXPERTS)
    chosen = np.argsort(-flat, -1, kind="stable")[:, :TOP_K]
    load = np.stack([np.bincount(slot, minlength=EXPERTS) for slot in chosen.T]) / len(flat)
    wanted = EXPERTS * (load * softmax(flat, axis=-1).mean(0)).sum()
    np.testing.assert_allclose(balance_of_layers(ep.route(logits, TOP_K)), wanted, rtol=1e-5)


def test_a_scan_over_layers_stacks_what_they_read(
    make_group: fakes.MakeGroup,
) -> None:
    group = make_group(
        axes={"ep": 2},
        transport="memfd",
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=16,
    )
    stack = group.register_layer_stack("blocks", LAYERS, top_k=TOP_K)
    params = ep.init_moe_params(jax.random.key(0), stack, 8)
    routers = jax.random.normal(jax.random.key(1), (LAYERS, HIDDEN, EXPERTS))
    x = jax.random.normal(jax.random.key(2), (BATCH, SEQUENCE, HIDDEN))

    def layer(x: Any, index: Any, router: Any) -> Any:
        block = ep.MoEParams(router, params.wi, params.wo)
        y, _, stats = ep.moe(stack[index], x, block, return_stats=True)
        return x + y, stats.routing

    def losses(routing: Any) -> Any:
        return ep.z_loss(routing, coeff=1.0) + ep.sequence_aux_loss(routing, coeff=1.0)

    def total(routings: Any) -> Any:
        per_layer = jax.vmap(losses)(routings)
        return per_layer.sum() + balance_of_layers(routings)

    def scanned(routers: Any) -> Any:
        steps = (jnp.arange(LAYERS), routers)
        return total(jax.lax.scan(lambda x, each: layer(x, *each), x, steps)[1])

    def looped(routers: Any) -> Any:
        y, routings = x, []
        for index in range(LAYERS):
            y, routing = layer(y, index, routers[index])
            routings.append(routing)
        return total(jax.tree.map(lambda *each: jnp.stack(each), *routings))

    got, want = (jax.jit(jax.value_and_grad(f))(routers) for f in (scanned, looped))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-5)
    assert (np.abs(got[1]).max((1, 2)) > 0).all()


TOKENS, WIDTH, COLUMNS = 64, 256, 8
BF16, F32 = jnp.bfloat16, jnp.float32


def draw(dtype: Any, *shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def worst(found: Any, wanted: Any) -> float:
    wanted = np.asarray(wanted, np.float64)
    return float(np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("router_dtype", [BF16, F32])
@pytest.mark.parametrize("lead", [(TOKENS,), (8, TOKENS // 8)])
def test_products_of_bf16_have_the_accuracy_of_f32(router_dtype: Any, lead: Any) -> None:
    x, router = draw(BF16, *lead, WIDTH), draw(router_dtype, WIDTH, COLUMNS, seed=1)
    grad = draw(F32, *lead, COLUMNS, seed=2)
    x64, router64, grad64 = (np.asarray(a, np.float64) for a in (x, router, grad))
    assert worst(jax.jit(routing_matmul._narrow)(x, router), x64 @ router64) < 1e-6
    d_x, d_router = jax.jit(routing_matmul._narrow_grads)(x, router, grad)
    flat = x64.reshape(-1, WIDTH).T @ grad64.reshape(-1, COLUMNS)
    assert (d_x.dtype, d_router.dtype) == (x.dtype, router.dtype)
    assert worst(d_x, grad64 @ router64.T) < 2**-8  # the result's own rounding
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
    operands = draw(x_dtype, TOKENS, WIDTH), draw(router_dtype, WIDTH, COLUMNS)

    def loss(x: Any, router: Any) -> Any:
        return jnp.sin(router_logits(x, router)).sum()

    for platform, wide in (("cuda", not narrow), ("cpu", True)):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*operands)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("HIGHEST" in text) == wide, platform


def test_gradients_elsewhere_are_those_of_the_f32_matmul() -> None:
    operands = draw(BF16, TOKENS, WIDTH), draw(F32, WIDTH, COLUMNS)
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
    x = draw(BF16, TOKENS, WIDTH)
    router = draw(F32, WIDTH, COLUMNS)

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
    x, router = draw(BF16, TOKENS, WIDTH), draw(F32, WIDTH, COLUMNS)

    def local(x: Any, router: Any) -> Any:
        return jax.lax.psum(jnp.sin(router_logits(x, router)).sum(), "ep")

    specs: dict[str, Any] = {"in_specs": (PartitionSpec("ep"), PartitionSpec())}
    mapped = jax.shard_map(local, mesh=mesh, out_specs=PartitionSpec(), **specs)
    found = jax.jit(jax.grad(mapped, argnums=(0, 1)))(x, router)
    wanted = jax.grad(lambda x, r: jnp.sin(router_logits(x, r)).sum(), argnums=(0, 1))(x, router)
    for got, want in zip(found, wanted, strict=True):
        assert worst(got, want) < 2**-7
