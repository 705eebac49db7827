"""Weights that multiply tokens before the experts, against every expert on every token in f64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hlo_scan
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_moe import Dense, in_f64, worst_error
from fakes import MakeGroup
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep

HIDDEN, INNER, EXPERTS, TOP_K = 32, 32, 8, 3
MESHES: dict[str, tuple[dict[str, int], str | tuple[str, ...]]] = {
    "dp2 ep4": ({"dp": 2, "ep": 4}, "dp"),
    "ep4 tp2": ({"ep": 4, "tp": 2}, ()),
}
ON_TP = ep.MoEParams(None, P("ep", None, None, "tp"), P("ep", "tp"))


@pytest.fixture
def layer(make_group: MakeGroup, request: pytest.FixtureRequest) -> Any:
    axes, outer = MESHES[getattr(request, "param", "dp2 ep4")]
    group = make_group(
        transport="memfd",
        debug=True,
        axes=axes,
        outer_axes=outer,
        alignment=32,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_top_k=TOP_K,
        max_tokens_per_rank=64,
    )
    return group.register_layer("moe", top_k=TOP_K)


def make_params(layer: Any, *, biases: bool = False) -> ep.MoEParams:
    key = jax.random.key(0)
    params = ep.init_moe_params(key, layer, INNER, use_bias=biases, use_router=False)
    if not biases:
        return params
    shapes = {"wi_bias": (EXPERTS, 2, INNER), "wo_bias": (EXPERTS, HIDDEN)}
    drawn = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
    return dataclasses.replace(params, **drawn)


def draw(*lead: int) -> tuple[Any, Any, Any]:
    """Draws tokens, experts (some slots unused, some repeated in a token) and weights."""
    keys = jax.random.split(jax.random.key(5), 3)
    idx = jax.random.randint(keys[1], (*lead, TOP_K), -2, EXPERTS).clip(-1)
    assert (idx < 0).any()
    assert ((idx[..., 0] == idx[..., 1]) & (idx[..., 0] >= 0)).any()
    weights = 2 * jax.random.normal(keys[2], idx.shape)
    return jax.random.normal(keys[0], (*lead, HIDDEN)), idx, weights


def graded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns (y, gradients of x, parameters and weights) of a function.

    The cotangent does not depend on y: experts' outputs are large here, and so are errors of 8 bits
    beside 2 pi.
    """

    def run(*operands: Any) -> Any:
        y, pull = jax.vjp(function, *operands)
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return run


def block(layer: Any, idx: Any, **options: Any) -> Callable[..., Any]:
    def run(x: Any, params: Any, weights: Any) -> Any:
        routing = ep.Routing(idx, weights)
        options.setdefault("weights_at", "input")
        return ep.moe(layer, x, params, routing=routing, **options)[0]

    return run


def dense(idx: Any) -> Callable[..., Any]:
    def run(x: Any, params: Any, weights: Any) -> Any:
        parts = [
            Dense(1).experts(x * weights[..., k, None], params, slot, jnp.ones(slot.shape))
            for k in range(TOP_K)
            for slot in [idx[..., k, None]]
        ]
        return jnp.sum(jnp.stack(parts), 0)

    return run


@pytest.mark.parametrize(
    ("layer", "lead", "biases"),
    [("dp2 ep4", (16, 4), True), ("ep4 tp2", (64,), False)],
    ids=["biases", "tp"],
    indirect=["layer"],
)
def test_values_and_gradients(layer: Any, lead: tuple[int, ...], biases: bool) -> None:
    (x, idx, weights), params = draw(*lead), make_params(layer, biases=biases)
    if "tp" in layer.mesh.shape:
        specs = {name: NamedSharding(layer.mesh, getattr(ON_TP, name)) for name in ("wi", "wo")}
        placed = {name: jax.device_put(getattr(params, name), at) for name, at in specs.items()}
        params = dataclasses.replace(params, **placed)
    got = jax.jit(graded(block(layer, idx)))(x, params, weights)
    assert worst_error(got, in_f64(graded(dense(idx)), x, params, weights)) < 1e-5
    np.testing.assert_array_equal(np.asarray(got[1][2])[np.asarray(idx) < 0], 0)
    # It matters here which operand is weighted, because experts are not linear.
    late = jax.jit(block(layer, idx, weights_at=None))(x, params, weights)
    assert worst_error(late, np.asarray(got[0], np.float64)) > 0.1


def test_a_recipe_stays_near_f64_and_adds_no_pass_over_the_slabs(layer: Any) -> None:
    (x, idx, weights), params = draw(64), make_params(layer)
    recipe = ep.recipes.MXFP8()
    run = graded(block(layer, idx, recipe=recipe, capacity=352))  # no other dim has this size
    program = jax.jit(run).lower(x, params, weights).compile()
    got = program(x, params, weights)
    assert worst_error(got, in_f64(graded(dense(idx)), x, params, weights)) < 0.15
    assert hlo_scan.maps_of(program.as_text(), 352) == []


def test_dropped_slots_have_no_gradient(layer: Any) -> None:
    (x, idx, weights), params = draw(64), make_params(layer, biases=True)

    def loss(weights: Any) -> Any:
        y, _, stats = ep.moe(
            *(layer, x, params),
            routing=ep.Routing(idx, weights),
            weights_at="input",
            capacity=32,
            return_stats=True,
        )
        return jnp.sin(y).sum(), stats.dropped

    grad, dropped = jax.jit(jax.grad(loss, has_aux=True))(weights)
    assert dropped > 0
    assert int((grad == 0).sum()) == int(dropped) + int((idx < 0).sum())
    assert np.isfinite(np.asarray(grad)).all()


def test_a_router_of_the_block_weighs_its_tokens_too(layer: Any) -> None:
    """Llama-4: a sigmoid of the logit, not normalised."""
    x, params = draw(64)[0], make_params(layer)
    w = 0.3 * jax.random.normal(jax.random.key(9), (HIDDEN, EXPERTS))
    router = ep.Router("sigmoid", normalize_weights=False)
    routing = ep.route(x @ w, TOP_K, router=router)
    got = jax.jit(
        lambda x: ep.moe(
            layer,
            x,
            dataclasses.replace(params, router=w),
            router=router,
            weights_at="input",
        )[0]
    )(x)
    want = in_f64(dense(routing.topk_idx), x, params, routing.topk_weights)
    assert worst_error(got, want) < 1e-5


def test_weights_are_multiplied_at_a_place_with_a_name(layer: Any) -> None:
    x, idx, weights = draw(64)
    for where in (layer, ep.LayerSpec("moe", top_k=TOP_K, num_experts=8, hidden_size=HIDDEN)):
        with pytest.raises(ValueError, match="weights_at must be .* \"input\", got 'early'"):
            block(where, idx, weights_at="early")(x, make_params(layer), weights)
