"""The recipes of docs/post-training.md: values and gradients by every expert on every token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import doc_pages
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep

PAGE = doc_pages.ROOT / "docs/post-training.md"
HIDDEN, INNER, EXPERTS, TOP_K = 16, 40, 4, 2


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    """Returns the names that the page's recipes define."""
    names: dict[str, Any] = {"ep": ep, "jax": jax, "jnp": jnp, "dataclasses": dataclasses}
    for block in doc_pages.blocks(PAGE):
        if "recipe" in block.markers:
            exec(compile(block.code, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def layer(make_group: fakes.MakeGroup) -> Any:
    group = make_group(
        transport="xla",
        axes={"ep": 4},
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_top_k=TOP_K,
        max_tokens_per_rank=8,
    )
    return group.register_layer("moe", top_k=TOP_K)


@pytest.fixture
def params(layer: Any) -> ep.MoEParams:
    return ep.init_moe_params(jax.random.key(0), layer, INNER)


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (32, HIDDEN))


def dense(x: Any, params: ep.MoEParams, topk_idx: Any) -> Any:
    """Computes softmax over the logits of the given experts; -1 is no expert."""
    chosen = (topk_idx[..., None] == jnp.arange(EXPERTS)).any(-2)
    logits = jnp.dot(x, params.router, precision="highest")
    shares = jnp.where(chosen, jnp.exp(logits), 0)
    shares /= jnp.maximum(shares.sum(-1, keepdims=True), 1e-20)
    gate, up = jnp.moveaxis(jnp.einsum("th,ehgm->tegm", x, params.wi), 2, 0)
    return jnp.einsum("te,tem,emh->th", shares, jax.nn.silu(gate) * up, params.wo)


@pytest.mark.parametrize("is_todays", [True, False])
def test_replay_keeps_the_choice_and_grades_todays_router(
    recipe: dict[str, Any], layer: Any, params: ep.MoEParams, is_todays: bool
) -> None:
    x = tokens()
    _, _, stats = jax.jit(lambda x: ep.moe(layer, x, params, return_stats=True))(x)
    idx = stats.routing.topk_idx
    if not is_todays:  # an older router chose other experts, and left slots unused
        idx = jnp.where(jnp.arange(32)[:, None] % 3 == 0, jnp.array([[3, -1]]), (idx + 1) % EXPERTS)

    def graded(function: Callable[..., Any]) -> Any:
        def loss(params: ep.MoEParams, x: jax.Array) -> Any:
            y = function(x, params)
            return jnp.sin(y).sum(), y

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    got = graded(lambda x, params: recipe["replayed"](layer, x, params, idx)[0])
    wanted = graded(lambda x, params: dense(x, params, idx))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, wanted)
    assert np.abs(got[0][0].router).max() > 1e-3
    if is_todays:
        plain = graded(lambda x, params: ep.moe(layer, x, params)[0])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, plain)


def matmuls(function: Callable[..., Any], *operands: Any) -> set[tuple[int, ...]]:
    """Returns shapes of the products in the compiled gradient."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    lines = [line for line in text.splitlines() if " dot(" in line]
    shapes = (line.partition("[")[2].partition("]")[0] for line in lines)
    return {tuple(map(int, shape.split(","))) for shape in shapes}


def test_frozen_experts_have_no_product_for_a_weight_gradient(
    recipe: dict[str, Any], layer: Any, params: ep.MoEParams
) -> None:
    of_weights = {(HIDDEN, 2 * INNER), (INNER, HIDDEN)}
    of_router = jax.grad(lambda router, x: recipe["loss_of_router"](router, layer, x, params))
    assert not of_weights & matmuls(of_router, params.router, tokens())
    whole = jax.grad(lambda p, x: jnp.square(ep.moe(layer, x, p)[0]).mean())
    assert of_weights <= matmuls(whole, params, tokens())


def test_an_optimizer_that_freezes_experts_costs_none_of_their_gradients(
    recipe: dict[str, Any], layer: Any, params: ep.MoEParams
) -> None:
    tx = recipe["optimizer_of_router"](params)

    def step(params: ep.MoEParams, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.square(ep.moe(layer, x, p)[0] - 1).mean())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    assert not {(HIDDEN, 2 * INNER), (INNER, HIDDEN)} & matmuls(step, params, state, tokens())
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 2 * params.router.size + 1
    moved, _ = jax.jit(step)(params, state, tokens())
    # The first step of Adam moves every weight by its rate.
    np.testing.assert_allclose(np.abs(moved.router - params.router), 1e-2, rtol=1e-3)
    for name in ("wi", "wo"):
        np.testing.assert_array_equal(getattr(moved, name), getattr(params, name))


def test_an_average_of_weights_is_sharded_as_they_are(
    recipe: dict[str, Any], params: ep.MoEParams
) -> None:
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices("cpu")[:4])
    experts, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["ep"], []))
    place = dataclasses.replace(params, router=whole, wi=experts, wo=experts)
    params = jax.device_put(params, place)
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    average = jax.jit(recipe["averaged"])(params, other)
    for before, got, new in zip(*map(jax.tree.leaves, (params, average, other)), strict=True):
        np.testing.assert_allclose(got, 0.99 * before + 0.01 * new, rtol=1e-5, atol=1e-6)
        assert got.sharding.is_equivalent_to(before.sharding, before.ndim)


def test_adapters_are_merged_weights_and_leave_frozen_ones_without_a_product(
    recipe: dict[str, Any], layer: Any, params: ep.MoEParams
) -> None:
    x, scale, rank = tokens(), 2.0, 3
    adapters = recipe["init_adapters"](jax.random.key(2), params, rank)
    adapters = jax.tree.map(lambda a: a + 0.1, adapters)

    def apart(adapters: Any, x: jax.Array) -> jax.Array:
        return jnp.sin(recipe["with_adapters"](layer, x, params, adapters, scale)).sum()

    def whole(adapters: Any, x: jax.Array) -> jax.Array:
        return jnp.sin(ep.moe(layer, x, recipe["merged"](params, adapters, scale))[0]).sum()

    got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(adapters, x) for f in (apart, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4), got, wanted)
    shapes = matmuls(jax.grad(apart), adapters, x)
    assert not {(HIDDEN, 2 * INNER), (INNER, HIDDEN)} & shapes
    assert (HIDDEN, rank) in shapes
