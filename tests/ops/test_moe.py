"""The MoE block and its experts against a dense computation over all experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ep_runtime import specs
from ep_runtime_client import ops
from ep_runtime_client.moe import MoEParams, MoEStats, init_moe_params, moe

MakeGroup = Callable[..., fakes.LocalGroup]

HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 8, 3


def dense(
    x: Any, params: MoEParams, activation: Callable[..., Any] = jax.nn.silu, gated: bool = True
) -> Any:
    """Every expert on every token, weighted by the router."""
    logits = x @ params.router
    if params.router_bias is not None:
        logits = logits + params.router_bias
    routing = ops.route(logits, TOP_K)
    spread = (jax.nn.one_hot(routing.topk_idx, EXPERTS) * routing.topk_weights[..., None]).sum(-2)
    inner = jnp.einsum("...h,ehm->...em", x, params.wi.reshape(*params.wi.shape[:2], -1))
    if params.wi_bias is not None:
        inner = inner + params.wi_bias.reshape(EXPERTS, -1)
    if gated:
        gate, up = jnp.split(inner, 2, axis=-1)
        inner = activation(gate) * up
    else:
        inner = activation(inner)
    out = jnp.einsum("...em,emh->...eh", inner, params.wo)
    if params.wo_bias is not None:
        out = out + params.wo_bias
    return jnp.einsum("...eh,...e->...h", out, spread), ops.aux_loss(routing, coeff=0.1)


def graded(function: Callable[..., Any]) -> Callable[..., Any]:
    """(y, aux) and gradients of x and parameters."""

    def run(x: Any, params: Any) -> Any:
        out, pull = jax.vjp(function, x, params)
        return out, pull((jnp.cos(out[0]), jnp.ones(())))

    return jax.jit(run)


def assert_close(got: Any, want: Any, tolerance: float = 3e-4) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def make_params(layer: Any, *, gated: bool = True, biases: bool = True) -> MoEParams:
    params = init_moe_params(jax.random.key(0), layer, INNER, gated=gated, use_bias=biases)
    if not biases:
        return params
    keys = jax.random.split(jax.random.key(1), 3)
    return dataclasses.replace(
        params,
        wi_bias=jax.random.normal(keys[0], params.wi_bias.shape),
        wo_bias=jax.random.normal(keys[1], params.wo_bias.shape),
        router_bias=jax.random.normal(keys[2], (EXPERTS,)),
    )


def draw(*lead: int) -> Any:
    return jax.random.normal(jax.random.key(7), (*lead, HIDDEN))


@pytest.fixture
def group(make_group: MakeGroup) -> fakes.LocalGroup:
    fakes.require_native()
    return make_group(
        transport="memfd",
        debug=True,
        axes={"dp": 2, "ep": 4},
        outer_axes="dp",
        num_experts=EXPERTS,
        max_top_k=TOP_K,
        max_tokens_per_rank=256,
    )


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_gated_block_with_biases(group: fakes.LocalGroup, early: bool) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer), draw(16, 5)
    options = {"aux_loss_coeff": 0.1, "apply_topk_weights_early": early}
    got = graded(lambda x, p: moe(layer, x, p, **options))(x, params)
    assert_close(got, graded(dense)(x, params))


def test_many_blocks_per_expert(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer), draw(2048)
    got = graded(lambda x, p: moe(layer, x, p, aux_loss_coeff=0.1))(x, params)
    assert_close(got, graded(dense)(x, params), tolerance=2e-3)


def test_ungated_activations_and_fused_kernels(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    x = draw(64)
    plain = make_params(layer, gated=False, biases=False)
    got = jax.jit(lambda x: moe(layer, x, plain, activation="relu", gated=False)[0])(x)
    assert_close(got, dense(x, plain, jax.nn.relu, gated=False)[0])
    gated = make_params(layer, biases=False)
    fused = dataclasses.replace(gated, wi=gated.wi.reshape(EXPERTS, HIDDEN, 2 * INNER))
    want = dense(x, gated, jnp.tanh)[0]
    for params, activation in (
        (fused, jnp.tanh),
        (gated, lambda gate, up: jnp.tanh(gate) * up),
        (MoEParams.from_separate(**gated.to_separate()), "tanh"),
    ):
        run = jax.jit(lambda x, p=params, a=activation: moe(layer, x, p, activation=a)[0])
        assert_close(run(x), want)


def test_inside_a_manual_shard_map_losses_and_stats_are_global(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer), draw(64)
    rows = PartitionSpec(("dp", "ep"))
    experts_on_ep = MoEParams(*[PartitionSpec()] + [PartitionSpec("ep")] * 4, PartitionSpec())

    def local(x: Any, params: Any) -> Any:
        return moe(layer, x, params, aux_loss_coeff=0.1, return_stats=True)

    mapped = jax.shard_map(
        local,
        mesh=group.mesh,
        in_specs=(rows, experts_on_ep),
        out_specs=(rows, PartitionSpec(), MoEStats(PartitionSpec(), PartitionSpec(), rows)),
    )
    y, aux, stats = jax.jit(mapped)(x, params)
    wanted_y, wanted_aux, wanted = jax.jit(
        lambda x, p: moe(layer, x, p, aux_loss_coeff=0.1, return_stats=True)
    )(x, params)
    assert_close((y, aux), (wanted_y, wanted_aux))
    for left, right in zip(stats, wanted, strict=True):
        np.testing.assert_array_equal(left, right)
    got = graded(lambda x, p: mapped(x, p)[:2])(x, params)
    assert_close(got, graded(dense)(x, params))


def test_stats_capacity_and_compute_dtype(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer, biases=False), draw(64)
    run = jax.jit(lambda x: moe(layer, x, params, capacity=16, return_stats=True))
    _, _, stats = run(x)
    routing = ops.route(x @ params.router, TOP_K)
    slots = np.bincount(np.asarray(routing.topk_idx).ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(stats.tokens_per_expert, slots)
    plan = ops.prepare(layer, routing.topk_idx, capacity=16)
    assert int(stats.dropped) == (np.asarray(plan.arrays.dst_row) < 0).sum() > 0
    np.testing.assert_array_equal(stats.num_recv, np.asarray(plan.arrays.num_recv)[:, 0])
    y, _ = jax.jit(lambda x: moe(layer, x, params, compute_dtype=jnp.bfloat16))(x)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, dense(x, params)[0], rtol=0.1, atol=0.1)


def test_poison_past_the_zones_reaches_no_value_and_no_gradient(group: fakes.LocalGroup) -> None:
    """The group is in debug mode: undefined rows are NaN, in every pass."""
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer), draw(64)
    routing = ops.route(x @ params.router, TOP_K)
    sent = ops.dispatch(layer, x, routing.topk_idx, routing.topk_weights)
    assert np.isnan(np.asarray(sent.tokens)).any()
    got = graded(lambda x, p: moe(layer, x, p, aux_loss_coeff=0.1))(x, params)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(got))


def test_routing_and_stats_gather_no_tokens(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    sharded = NamedSharding(group.mesh, PartitionSpec(("dp", "ep")))
    x = jax.device_put(draw(64), sharded)
    params = make_params(layer)
    text = (
        jax.jit(lambda x, p: moe(layer, x, p, aux_loss_coeff=0.1, return_stats=True))
        .lower(x, params)
        .compile()
        .as_text()
    )
    assert " all-gather" not in text
    assert " all-to-all" not in text
    assert " collective-permute" not in text


def test_parameters_from_a_spec_need_no_layer() -> None:
    spec = specs.LayerSpec("moe", top_k=2, num_experts=4, hidden_size=6)
    params = init_moe_params(jax.random.key(0), spec, 5, param_dtype=jnp.bfloat16)
    assert params.wi.shape == (4, 6, 2, 5)
    assert params.wo.shape == (4, 5, 6)
    assert (params.wi.dtype, params.router.dtype) == (jnp.bfloat16, jnp.float32)
    again = MoEParams.from_separate(**params.to_separate())
    jax.tree.map(np.testing.assert_array_equal, params, again)
    with pytest.raises(ValueError, match="needs num_experts and hidden_size"):
        init_moe_params(jax.random.key(0), specs.LayerSpec("moe", top_k=2), 5)
