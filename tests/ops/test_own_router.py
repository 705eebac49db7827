"""The block with the caller's routing, against every expert on every token in f64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_moe import Dense, in_f64, worst_error
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime_client.moe.checks import specs_of

HIDDEN, INNER, EXPERTS, TOP_K, COEFF = 16, 24, 8, 3, 0.1
DENSE, SIGMOID = Dense(TOP_K), ep.Router("sigmoid")


@pytest.fixture
def group(make_group: fakes.MakeGroup) -> fakes.LocalGroup:
    return make_group(
        transport="memfd",
        debug=True,
        axes={"dp": 2, "ep": 4},
        outer_axes="dp",
        num_experts=EXPERTS,
        max_top_k=TOP_K,
        max_tokens_per_rank=64,
    )


@pytest.fixture
def layer(group: fakes.LocalGroup) -> Any:
    return group.register_layer("moe", top_k=TOP_K)


def make_params(layer: Any, **options: Any) -> ep.MoEParams:
    """Draws parameters with NumPy, because each draw of JAX is a program; biases are not zero."""
    rng = np.random.default_rng(0)
    made = jax.eval_shape(lambda: ep.init_moe_params(jax.random.key(0), layer, INNER, **options))

    def filled(each: Any) -> jax.Array:
        return jnp.asarray(rng.standard_normal(each.shape).astype(each.dtype) / np.float32(4))

    return jax.tree.map(filled, made)


def draw(*lead: int) -> tuple[Any, ep.Routing]:
    """Draws tokens, and a routing that `route` never gives: unused slots, any
    weights and shares.
    """
    rng = np.random.default_rng(7)
    idx = rng.integers(-2, EXPERTS, (*lead, TOP_K)).clip(-1).astype(np.int32)
    assert (idx < 0).any()
    weights, x = (rng.standard_normal(s).astype(np.float32) for s in (idx.shape, (*lead, HIDDEN)))
    probs = rng.random((*lead, EXPERTS), np.float32)
    return jnp.asarray(x), ep.Routing(*map(jnp.asarray, (idx, weights, probs)))


def balance(probs: Any, idx: Any) -> Any:
    """Computes the formula of `ep.aux_loss`."""
    slots = jax.nn.one_hot(idx, EXPERTS).sum(tuple(range(idx.ndim)))
    tokens = idx.size // TOP_K
    shares = probs.reshape(-1, EXPERTS).sum(0)
    return COEFF * EXPERTS / (TOP_K * tokens**2) * (shares * slots).sum()


def graded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function's results, and gradients of x, parameters, weights and probs."""

    def run(*operands: Any) -> Any:
        (y, aux), pull = jax.vjp(function, *operands)
        return (y, aux), pull((jnp.cos(y), jnp.ones_like(aux)))

    return run


@pytest.mark.parametrize(
    ("lead", "options"),
    [((16, 4), {"use_bias": True}), ((64,), {}), ((64,), {"weights_at": "hidden"})],
    ids=["biases", "plain", "early weights"],
)
def test_values_and_gradients(layer: Any, lead: tuple[int, ...], options: dict[str, Any]) -> None:
    weights_at = options.pop("weights_at", None)
    params, (x, routing) = make_params(layer, use_router=False, **options), draw(*lead)
    idx = routing.topk_idx

    def block(x: Any, params: Any, weights: Any, probs: Any) -> Any:
        own = ep.Routing(idx, weights, probs)
        return ep.moe(
            *(layer, x, params),
            routing=own,
            aux_loss_coeff=COEFF,
            weights_at=weights_at,
        )

    def dense(x: Any, params: Any, weights: Any, probs: Any) -> Any:
        return DENSE.experts(x, params, idx, weights), balance(probs, idx)

    operands = (x, params, routing.topk_weights, routing.probs)
    got, want = jax.jit(graded(block))(*operands), in_f64(graded(dense), *operands)
    assert worst_error(got, want) < 1e-5
    unused = np.asarray(idx) < 0
    np.testing.assert_array_equal(np.asarray(got[1][2])[unused], 0)


@pytest.mark.parametrize("value", [EXPERTS, -2])
def test_an_index_out_of_range_is_told_by_native_libraries_and_counts_nowhere(
    make_group: fakes.MakeGroup, transport: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_RUNTIME_DEBUG", "1")
    group = make_group(
        transport=transport, debug=True, axes={"ep": 4}, num_experts=EXPERTS, max_top_k=TOP_K
    )
    layer = group.register_layer("moe", top_k=TOP_K)
    params, (x, routing) = make_params(layer, use_router=False), draw(32)

    @jax.jit
    def block(idx: Any) -> Any:
        return ep.moe(layer, x, params, routing=routing._replace(topk_idx=idx), return_stats=True)

    unused = routing.topk_idx.at[5, 1].set(-1)
    y, _, stats = jax.block_until_ready(block(unused))
    assert stats.tokens_per_expert.sum() == (unused >= 0).sum()
    wrong = unused.at[5, 1].set(value)
    if transport == "memfd":
        text = rf"topk_idx must be in \[-1, {EXPERTS}\), got {value} at token 5 slot 1"
        with pytest.raises(ep.InvalidArgumentError, match=text), ep.translate_errors():
            jax.block_until_ready(block(wrong))
    else:
        got, _, counts = block(wrong)
        plain = [dataclasses.replace(each, routing=None) for each in (counts, stats)]
        jax.tree.map(np.testing.assert_array_equal, (got, plain[0]), (y, plain[1]))


@pytest.mark.parametrize(
    "options",
    [{}, {"recipe": ep.recipes.BlockScaling(), "capacity": 24}],
    ids=["plain", "fp8 with drops"],
)
def test_a_routing_like_the_routers_gives_the_same_bits(layer: Any, options: Any) -> None:
    params, (x, _) = make_params(layer), draw(64)
    without = dataclasses.replace(params, router=None)
    options = {"return_stats": True, "aux_loss_coeff": COEFF, **options}

    def own(x: Any) -> Any:
        routing = ep.route(x @ params.router, TOP_K, router=SIGMOID)
        return ep.moe(layer, x, without, routing=routing, **options)

    want = jax.jit(lambda x: ep.moe(layer, x, params, router=SIGMOID, **options))(x)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(own)(x), want)


def test_inside_a_manual_shard_map_the_routing_is_local(group: Any, layer: Any) -> None:
    params, (x, routing) = make_params(layer, use_router=False), draw(64)
    rows = P(("dp", "ep"))
    options = {"aux_loss_coeff": COEFF, "return_stats": True}

    def local(x: Any, params: Any, routing: Any) -> Any:
        return ep.moe(layer, x, params, routing=routing, **options)

    mapped = jax.shard_map(
        local,
        mesh=group.mesh,
        in_specs=(rows, P("ep"), rows),
        out_specs=(rows, P(), ep.MoEStats(P(), P(), rows, rows)),
    )
    y, aux, stats = jax.jit(mapped)(x, params, routing)
    want_y, want_aux, want_stats = jax.jit(local)(x, params, routing)
    np.testing.assert_allclose(y, want_y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(aux, want_aux, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, stats, want_stats)
    slots = np.bincount(np.asarray(routing.topk_idx).ravel() + 1, minlength=EXPERTS + 1)[1:]
    np.testing.assert_array_equal(stats.tokens_per_expert, slots)


def test_losses_of_the_stats_routing_reach_the_router(layer: Any) -> None:
    """A z-loss, and a balance loss per sequence, alone and with the block's output."""
    params, (x, _) = make_params(layer), draw(16, 4)

    def losses(routing: ep.Routing) -> Any:
        assert routing.logits is not None
        assert routing.probs is not None
        chosen = jax.nn.one_hot(routing.topk_idx, EXPERTS).sum((1, 2))
        per_sequence = (routing.probs.mean(1) * jax.lax.stop_gradient(chosen)).sum(-1).mean()
        return jnp.square(jax.nn.logsumexp(routing.logits, axis=-1)).mean() + per_sequence

    def of_stats(router: Any) -> Any:
        block = dataclasses.replace(params, router=router)
        stats = ep.moe(layer, x, block, return_stats=True)[2]
        return losses(stats.routing)

    def of_route(router: Any) -> Any:
        return losses(ep.route(x @ router, TOP_K))

    got, want = (jax.jit(jax.value_and_grad(f))(params.router) for f in (of_stats, of_route))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-6)
    assert np.abs(got[1]).max() > 0


def test_a_stacks_unused_routings_are_not_kept(make_group: fakes.MakeGroup) -> None:
    group = make_group(
        transport="memfd",
        axes={"ep": 2},
        num_experts=EXPERTS,
        max_top_k=TOP_K,
        max_tokens_per_rank=32,
    )
    stack = group.register_layer_stack("stack", 5, top_k=TOP_K)
    params, (x, _) = make_params(stack[0]), draw(64)

    def program(result: Callable[[ep.MoEStats], Any]) -> str:
        def one(x: Any, i: Any) -> Any:
            y, _, stats = ep.moe(stack[i], x, params, return_stats=True)
            return x + y, stats

        run = jax.jit(lambda x: result(jax.lax.scan(one, x, jnp.arange(5))[1]))
        return run.lower(x).compile().as_text()

    assert "f32[5,32," not in program(lambda stats: stats.tokens_per_expert)
    assert "f32[5,32," in program(lambda stats: (stats.tokens_per_expert, stats.routing))


def test_parameters_without_a_router(layer: Any) -> None:
    key = jax.random.key(0)
    params = ep.init_moe_params(key, layer, INNER)
    others = ep.init_moe_params(key, layer, INNER, use_router=False)
    assert others.router is None
    jax.tree.map(np.testing.assert_array_equal, others, dataclasses.replace(params, router=None))
    again = ep.MoEParams.from_separate(**others.to_separate())
    jax.tree.map(np.testing.assert_array_equal, again, others)
    rules = ep.sharding.rules("fsdp+ep", fsdp="dp", dp=None).on(layer.mesh)
    placed = rules.shardings(others, layer.mesh)
    assert (placed.router, placed.wi.spec) == (None, P("ep", "dp", None, None))
    assert specs_of(rules, others)["router"] is None


def test_a_layer_spec_stands_for_a_layer_with_a_routing_too() -> None:
    spec = ep.LayerSpec("moe", top_k=TOP_K, num_experts=EXPERTS, hidden_size=HIDDEN)
    params, (x, routing) = make_params(spec, use_router=False), draw(64)

    def loss(routing: ep.Routing) -> Any:
        y, aux, stats = ep.moe(spec, x, params, routing=routing, return_stats=True)
        return y.sum() + aux, stats

    grads, stats = jax.eval_shape(jax.grad(loss, has_aux=True, allow_int=True), routing)
    assert grads.topk_weights.shape == (64, TOP_K)
    assert jax.tree.map(jnp.shape, stats.routing) == jax.tree.map(jnp.shape, routing)
    with pytest.raises(ValueError, match=r"routing.topk_idx must be \[64, 3\]"):
        jax.eval_shape(loss, routing._replace(topk_idx=routing.topk_idx[:32]))
    with pytest.raises(ValueError, match=r"wi \[E, H, ...\] must fit H=16"):
        jax.eval_shape(
            lambda p: ep.moe(spec, x, p, routing=routing),
            make_params(
                ep.LayerSpec("moe", top_k=TOP_K, num_experts=4, hidden_size=HIDDEN),
                use_router=False,
            ),
        )


def test_what_does_not_fit_is_said_by_name(layer: Any) -> None:
    both, (x, routing) = make_params(layer), draw(64)
    params = dataclasses.replace(both, router=None)
    idx, weights, probs, _ = routing

    def refused(text: str, params: Any = params, routing: Any = routing, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            ep.moe(layer, x, params, routing=routing, **options)

    refused("got neither", routing=None)
    refused("params.router must be None with routing=.*got both", params=both)
    biased = dataclasses.replace(params, router_bias=jnp.zeros(EXPERTS))
    refused("params.router_bias must be None with routing=", params=biased)
    refused(r"routing must be ep.Routing\(topk_idx, .* got tuple", routing=(idx, weights))
    refused("^router must be left out with routing=", router=SIGMOID)
    refused("^expert_bias must be left out with routing=", expert_bias=jnp.zeros(EXPERTS))
    refused(
        r"topk_idx must be \[64, 3\]: .* got \[64, 2\]", routing=ep.Routing(idx[:, :2], weights)
    )
    refused(r"topk_weights must be \[64, 3\]: .* got None", routing=ep.Routing(idx, None))
    refused(r"topk_weights must be \[64, 3\]: .* got \[32", routing=ep.Routing(idx, weights[:32]))
    refused("topk_weights must be a float dtype, got int32", routing=ep.Routing(idx, idx))
    refused("topk_idx must be int32 .*, got float32", routing=ep.Routing(weights, weights))
    refused(
        r"probs must be \[64, 8\]: .* all experts, got \[64, 3\]",
        routing=ep.Routing(idx, weights, weights),
    )
    refused(r"logits must be \[64, 8\]", routing=ep.Routing(idx, weights, probs, weights))
    refused(
        r"aux_loss_coeff needs routing.probs \[64, 8\], got None",
        routing=ep.Routing(idx, weights),
        aux_loss_coeff=0.1,
    )
    with pytest.raises(ValueError, match="aux_loss needs routing.probs"):
        ep.aux_loss(ep.Routing(idx, weights), coeff=0.1)
