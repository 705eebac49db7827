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
from dense_moe import Dense, graded, worst_error
from fakes import MakeGroup
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime import layer_specs
from ep_runtime_client.moe import resolve as moe_call
from ep_runtime_client.moe.api import MoEParams, init_moe_params, moe
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.programs.remat import remat_policy

F32 = jnp.dtype(jnp.float32)
HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 8, 3


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
    return make_group(
        transport="memfd",
        debug=True,
        axes={"dp": 2, "ep": 4},
        outer_axes="dp",
        num_experts=EXPERTS,
        max_top_k=TOP_K,
        max_tokens_per_rank=256,
    )


SIGMOID = ep.Router("sigmoid", scaling_factor=2.5)
IN_GROUPS = ep.Router(
    use_pre_softmax=True, num_groups=4, group_topk=2, group_score_topk=1, normalize_weights=True
)

# A call of moe, and its reference: tolerances are for f32 sums in another order.
OPTIONS: dict[str, tuple[dict[str, Any], Dense]] = {
    "weights before wo": ({"weights_at": "hidden"}, Dense(TOP_K)),
    "sigmoid with a bias": (
        {"router": SIGMOID, "expert_bias": True},
        Dense(TOP_K, router=SIGMOID),
    ),
    "best routing groups": (
        {"router": IN_GROUPS, "activation": "gelu"},
        Dense(TOP_K, jax.nn.gelu, router=IN_GROUPS),
    ),
}


def test_a_gated_block_with_biases(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer), draw(16, 5)
    run = jax.jit(graded(lambda x, p: moe(layer, x, p, aux_loss_coeff=0.1)))
    assert worst_error(run(x, params), Dense(TOP_K).graded(x, params)) < 1e-5
    # If wo has a bias, which is weighted too, weights are applied in combine in any case.
    early = jax.jit(lambda x, p: moe(layer, x, p, weights_at="hidden")[0])
    assert worst_error(early(x, params), Dense(TOP_K).graded(x, params)[0][0]) < 1e-5


def test_weights_wait_for_combine_unless_asked_or_faster_before(
    group: fakes.LocalGroup, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_xla = make_group(num_experts=EXPERTS, max_top_k=TOP_K)
    run, found = moe_call.run, []

    def seen(*args: Any) -> Any:
        found.append(args[3])
        return run(*args)

    monkeypatch.setattr(moe_call, "run", seen)

    def waits(group: fakes.LocalGroup = over_xla, **options: Any) -> bool:
        layer = group.register_layer("moe", top_k=TOP_K)
        params, x = make_params(layer, biases=False), draw(16, 5)
        jax.eval_shape(lambda x, p: moe(layer, x, p, **options)[0], x, params)
        return bool(found.pop() == "output")

    assert waits()
    assert not waits(weights_at="hidden")
    monkeypatch.setattr(activation_kernels, "supports", lambda *_: True)  # as on hosts with GPUs
    assert not waits()
    assert not waits(weights_at=None)
    assert waits(weights_at="output")
    assert waits(group)  # its windows are host memory


@pytest.mark.parametrize("name", OPTIONS)
def test_options_against_f64(group: fakes.LocalGroup, name: str) -> None:
    options, reference = OPTIONS[name]
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer, biases=False), draw(64)
    options = {"aux_loss_coeff": 0.1} | options
    if "expert_bias" in options:
        bias = 0.5 * jax.random.normal(jax.random.key(3), (EXPERTS,))
        options["expert_bias"] = bias
        reference = dataclasses.replace(reference, expert_bias=np.asarray(bias))
    got = jax.jit(graded(lambda x, p: moe(layer, x, p, **options)))(x, params)
    assert worst_error(got, reference.graded(x, params)) < 1e-5


def test_remat_keeps_what_the_router_chose(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer, biases=False), draw(64)

    def program(save: tuple[str, ...]) -> str:
        block = jax.checkpoint(lambda x, p: moe(layer, x, p)[0], policy=remat_policy(save))
        return str(
            jax.make_jaxpr(jax.grad(lambda x, p: block(x, p).sum(), argnums=(0, 1)))(x, params)
        )

    # The logits' matmul, again if they are not saved, and its two gradients.
    for save, matmuls, searches in (((), 4, 2 * TOP_K), (("ep_plan",), 3, TOP_K)):
        found = program(save)
        assert found.count("precision=(Precision.HIGHEST") == matmuls, save
        assert found.count(" argmax[") == searches, save


def test_the_expert_bias_has_no_gradient(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer, biases=False), draw(64)

    def loss(bias: Any) -> Any:
        y, aux = moe(layer, x, params, expert_bias=bias, router=SIGMOID)
        return jnp.sin(y).sum() + aux

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.ones(EXPERTS)), 0)


def test_ungated_activations_and_fused_kernels(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    x = draw(64)
    plain = make_params(layer, gated=False, biases=False)
    got = jax.jit(lambda x: moe(layer, x, plain, activation="relu", gated=False)[0])(x)
    reference = Dense(TOP_K, jax.nn.relu, gated=False)
    assert worst_error(got, reference.graded(x, plain)[0][0]) < 1e-5
    gated = make_params(layer, biases=False)
    fused = dataclasses.replace(gated, wi=gated.wi.reshape(EXPERTS, HIDDEN, 2 * INNER))
    want = Dense(TOP_K, jnp.tanh).graded(x, gated)[0][0]
    for params, activation in (
        (fused, jnp.tanh),
        (gated, lambda gate, up: jnp.tanh(gate) * up),
        (MoEParams.from_separate(**gated.to_separate()), "tanh"),
    ):
        run = jax.jit(lambda x, p=params, a=activation: moe(layer, x, p, activation=a)[0])
        assert worst_error(run(x), want) < 1e-5


@pytest.mark.parametrize("sizes", [(1, 2), (1, 1)])
def test_token_axes_of_one_device_replicate_losses_and_stats_too(
    make_group: MakeGroup, sizes: tuple[int, int]
) -> None:
    """A shard_map that checks its out_specs treats an axis of size 1 like any other."""
    group = make_group(axes=dict(zip(("dp", "ep"), sizes, strict=True)), outer_axes="dp")
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = init_moe_params(jax.random.key(0), layer, INNER), draw(16)

    def local(x: Any, params: Any) -> Any:
        _, aux, stats = moe(layer, x, params, aux_loss_coeff=0.1, return_stats=True)
        return aux, stats.tokens_per_expert, stats.dropped

    specs = MoEParams(PartitionSpec(), PartitionSpec("ep"), PartitionSpec("ep"))
    rows = PartitionSpec(("dp", "ep"))
    options = {"in_specs": (rows, specs), "out_specs": PartitionSpec()}
    found = jax.jit(jax.shard_map(local, mesh=group.mesh, **options))(x, params)
    wanted = jax.jit(local)(x, params)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, found[1:], wanted[1:])


def test_stats_capacity_and_compute_dtype(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer, biases=False), draw(64)
    run = jax.jit(lambda x: moe(layer, x, params, capacity=16, return_stats=True))
    _, _, stats = run(x)
    routing = ep.route(x @ params.router, TOP_K)
    slots = np.bincount(np.asarray(routing.topk_idx).ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(stats.tokens_per_expert, slots)
    plan = ep.prepare(layer, routing.topk_idx, capacity=16)
    assert int(stats.dropped) == (np.asarray(plan.arrays.dst_row) < 0).sum() > 0
    np.testing.assert_array_equal(stats.num_recv, np.asarray(plan.arrays.num_recv)[:, 0])
    run = jax.jit(graded(lambda x, p: moe(layer, x, p, compute_dtype=jnp.bfloat16)))
    (y, aux), (d_x, d_params) = run(x, params)
    assert {leaf.dtype for leaf in jax.tree.leaves((y, aux, d_x, d_params))} == {F32}
    want = Dense(TOP_K, coeff=0.0).graded(x, params)
    assert worst_error(((y, aux), (d_x, d_params)), want) < 0.02


def test_poison_past_the_zones_reaches_no_value_and_no_gradient(group: fakes.LocalGroup) -> None:
    """In debug mode undefined rows are NaN, in every pass."""
    layer = group.register_layer("moe", top_k=TOP_K)
    params, x = make_params(layer), draw(64)
    routing = ep.route(x @ params.router, TOP_K)
    sent = ep.dispatch(layer, x, routing.topk_idx, routing.topk_weights)
    assert np.isnan(np.asarray(sent.tokens)).any()
    got = jax.jit(graded(lambda x, p: moe(layer, x, p, aux_loss_coeff=0.1)))(x, params)
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
    spec = layer_specs.LayerSpec("moe", top_k=2, num_experts=4, hidden_size=6)
    params = init_moe_params(jax.random.key(0), spec, 5, param_dtype=jnp.bfloat16)
    assert params.wi.shape == (4, 6, 2, 5)
    assert params.wo.shape == (4, 5, 6)
    assert (params.wi.dtype, params.router.dtype) == (jnp.bfloat16, jnp.float32)
    again = MoEParams.from_separate(**params.to_separate())
    jax.tree.map(np.testing.assert_array_equal, params, again)
    with pytest.raises(ValueError, match="needs num_experts and hidden_size"):
        init_moe_params(jax.random.key(0), layer_specs.LayerSpec("moe", top_k=2), 5)


def test_a_layer_spec_stands_for_a_layer_in_eval_shape_alone() -> None:
    spec = layer_specs.LayerSpec("moe", top_k=2, num_experts=4, hidden_size=6)
    x = jnp.ones((8, 6), jnp.bfloat16)

    def loss(key: Any) -> Any:
        params = init_moe_params(key, spec, 5, use_bias=True)
        y, aux, stats = moe(spec, x, params, return_stats=True)
        return y.astype(jnp.float32).sum() + aux, (y, stats, params)

    def step(key: Any) -> Any:
        params = init_moe_params(key, spec, 5)
        return jax.grad(lambda p: moe(spec, x, p)[0].astype(jnp.float32).sum())(params)

    _, (y, stats, params) = jax.eval_shape(loss, jax.random.key(0))
    assert (y.shape, y.dtype) == ((8, 6), jnp.bfloat16)
    assert [leaf.shape for leaf in jax.tree.leaves(stats)][:3] == [(4,), (), (1,)]
    assert [leaf.shape for leaf in stats.routing] == [(8, 2), (8, 2), (8, 4), (8, 4)]
    grads = jax.eval_shape(step, jax.random.key(0))
    assert (grads.wi.shape, grads.wi.dtype) == (params.wi.shape, params.wi.dtype)
    with pytest.raises(Exception, match="moves no tokens"):
        jax.block_until_ready(loss(jax.random.key(0))[0])
    with pytest.raises(ValueError, match="must fit H=6"):
        moe(spec, jnp.ones((8, 5)), init_moe_params(jax.random.key(0), spec, 5))


def test_axes_on_gate_and_up_in_one_dim_are_refused_by_name(make_group: MakeGroup) -> None:
    group = make_group(axes={"ep": 4, "tp": 2}, num_experts=EXPERTS, transport="memfd")
    layer = group.register_layer("moe", top_k=TOP_K)
    params = make_params(layer, biases=False)
    fused = dataclasses.replace(params, wi=params.wi.reshape(EXPERTS, HIDDEN, -1))
    spec = MoEParams(*[PartitionSpec()] * 3)
    spec = dataclasses.replace(spec, wi=PartitionSpec("ep", None, "tp"))
    with pytest.raises(ValueError, match=r"whole on its last dim, got tp=2; .*\[E, H, 2, M\]"):
        moe(layer, draw(64), fused, params_spec=spec)
    with pytest.raises(ValueError, match="must be MoEParams of PartitionSpecs or rules"):
        moe(layer, draw(64), params, params_spec=PartitionSpec())
    wo_bias = jnp.zeros((EXPERTS, HIDDEN))
    with pytest.raises(ValueError, match="got wo_bias without wi_bias"):
        moe(layer, draw(64), dataclasses.replace(params, wo_bias=wo_bias))
    for recipe in ("fp8", (None,)):
        with pytest.raises(ValueError, match=r"one of ep.recipes.BF16\(\), .* or a pair"):
            moe(layer, draw(64), params, recipe=recipe)


def test_only_the_block_leaves_gradients_past_the_last_group_alone(make_group: MakeGroup) -> None:
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "max_top_k": TOP_K}
    group = make_group(transport="memfd", partitioning="shard_map", **sizes)
    layer = group.register_layer("block", top_k=TOP_K)
    params, x = make_params(layer, biases=False), draw(64)
    idx = jnp.zeros((64, TOP_K), jnp.int32)

    def block(x: jax.Array, params: MoEParams) -> jax.Array:
        return moe(layer, x, params)[0].sum()

    def by_hand(x: jax.Array, params: MoEParams) -> jax.Array:
        dispatched = ep.dispatch(layer, x, idx, jnp.ones(idx.shape))
        rows = dispatched.tokens * params.router.sum()
        return ep.combine(layer, dispatched, rows, weights=dispatched.weights).sum()

    def told(function: Callable[..., jax.Array]) -> list[bool]:
        text = jax.jit(jax.grad(function, argnums=(0, 1))).lower(x, params).as_text()
        calls = [line for line in text.splitlines() if "@ep_combine_bwd_v1(" in line]
        return ["clear_slack = 0" in line for line in calls]

    assert told(block) == [True]
    assert told(by_hand) == [False]
