"""`ep.linen.MoEBlock`: the values of `ep.moe`, logical partitioning, scan, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import fakes
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError

HIDDEN, EXPERTS, MLP = 16, 4, 8
SPEC = ep.LayerSpec("block", top_k=2, num_experts=EXPERTS, hidden_size=HIDDEN)
RULES = ep.sharding.rules("fsdp+ep", tp=None, dp=None).logical
KEY = jax.random.key(0)


@pytest.fixture
def group(make_group: fakes.MakeGroup) -> fakes.LocalGroup:
    return make_group(axes={"ep": 2}, transport="memfd", num_experts=EXPERTS)


def tokens(group: fakes.LocalGroup) -> jax.Array:
    x = jax.random.normal(jax.random.key(1), (16, HIDDEN))
    return jax.device_put(x, NamedSharding(group.mesh, P("ep")))


def test_the_attributes_are_the_options_of_moe_with_their_defaults() -> None:
    own = {field.name: field.default for field in dataclasses.fields(ep.linen.MoEBlock)}
    for name, parameter in inspect.signature(ep.moe).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in (
            "expert_bias",
            "routing",
            "state",
            "token_mask",
        ):
            assert own[name] == parameter.default


def test_gate_and_up_may_be_parameters_of_their_own(group: fakes.LocalGroup) -> None:
    layer, x = group.register_layer("block", top_k=2), tokens(group)
    block = ep.linen.MoEBlock(layer, MLP, separate=True, use_bias=True)
    variables = block.init(KEY, x)
    made = variables["params"]
    assert {*made} == {"router", "wi_0", "wi_1", "wo", "wi_0_bias", "wi_1_bias", "wo_bias"}
    assert made["wi_0"].names == ("exp", "embed_moe", "mlp_moe")
    made = nn.meta.unbox(made)
    params = ep.MoEParams(
        made["router"],
        (made["wi_0"], made["wi_1"]),
        made["wo"],
        (made["wi_0_bias"], made["wi_1_bias"]),
        made["wo_bias"],
    )
    y = jax.jit(lambda variables: block.apply(variables, x)[0])(variables)
    wanted = jax.jit(lambda params: ep.moe(layer, x, params)[0])(params)
    np.testing.assert_array_equal(y, wanted)


def test_the_block_is_ep_moe_with_its_parameters(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("block", top_k=2)
    options: dict[str, Any] = {"aux_loss_coeff": 0.1, "activation": "gelu", "gated": False}
    block = ep.linen.MoEBlock(layer, MLP, use_bias=True, **options)
    x = tokens(group)
    variables = nn.meta.unbox(block.init(KEY, x))
    params = ep.MoEParams(**variables["params"])
    assert params.wi.shape == (EXPERTS, HIDDEN, MLP)

    @jax.jit
    @jax.value_and_grad
    def of_module(variables: Any) -> jax.Array:
        y, aux = block.apply(variables, x)
        return jnp.sin(y).sum() + aux

    @jax.jit
    @jax.value_and_grad
    def of_function(params: ep.MoEParams) -> jax.Array:
        y, aux = ep.moe(layer, x, params, **options)
        return jnp.sin(y).sum() + aux

    value, grads = of_module(variables)
    meant, meant_grads = of_function(params)
    np.testing.assert_array_equal(value, meant)
    jax.tree.map(np.testing.assert_array_equal, ep.MoEParams(**grads["params"]), meant_grads)


def test_logical_names_become_shardings_under_rules() -> None:
    block = ep.linen.MoEBlock(SPEC, MLP, use_bias=True)
    boxed = jax.eval_shape(block.init, KEY, jnp.zeros((4, HIDDEN)))
    names = nn.get_partition_spec(boxed)["params"]
    assert names["wi"] == P("exp", "embed_moe", None, "mlp_moe")
    assert names["router"] == P("embed", None)
    mesh = fakes.mesh_of({"fsdp": 2, "ep": 2})
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    made = jax.jit(block.init, out_shardings=shardings)(KEY, jnp.zeros((4, HIDDEN)))
    params = nn.meta.unbox(made)["params"]
    assert params["wi"].sharding.is_equivalent_to(NamedSharding(mesh, P("ep", "fsdp")), 4)
    assert params["wo_bias"].sharding.is_equivalent_to(NamedSharding(mesh, P("ep", "fsdp")), 2)


def test_a_stack_of_blocks_scans_with_remat_like_a_loop(group: fakes.LocalGroup) -> None:
    depth, x = 3, tokens(group)
    stack = group.register_layer_stack("stack", depth, top_k=2)

    class Residual(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, index: jax.Array) -> Any:
            y, aux = ep.linen.MoEBlock(stack, MLP, aux_loss_coeff=0.1, name="moe")(x, index)
            return x + y, aux

    scanned = nn.scan(
        nn.remat(Residual, policy=ep.remat_policy(), prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=depth,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()
    boxed = scanned.init(KEY, x, jnp.arange(depth))
    spec = nn.get_partition_spec(boxed)["params"]["moe"]["wo"]
    assert spec == P("layers", "exp", "mlp_moe", "embed_moe")
    variables = nn.meta.unbox(boxed)

    def loss(variables: Any) -> jax.Array:
        y, aux = scanned.apply(variables, x, jnp.arange(depth))
        return jnp.sin(y).sum() + aux.sum()

    def looped(variables: Any) -> jax.Array:
        y, total = x, jnp.zeros(())
        for i in range(depth):
            one = jax.tree.map(lambda a, i=i: a[i], variables["params"]["moe"])
            out, aux = ep.moe(stack[i], y, ep.MoEParams(**one), aux_loss_coeff=0.1)
            y, total = y + out, total + aux
        return jnp.sin(y).sum() + total

    value, grads = jax.jit(jax.value_and_grad(loss))(variables)
    meant, meant_grads = jax.jit(jax.value_and_grad(looped))(variables)
    np.testing.assert_allclose(value, meant, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, meant_grads
    )


def test_the_expert_bias_moves_in_its_own_collection(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("block", top_k=2)
    block = ep.linen.MoEBlock(
        layer, MLP, use_expert_bias=True, router=ep.Router("sigmoid"), return_stats=True
    )
    variables = nn.meta.unbox(block.init(KEY, tokens(group)))
    _, _, stats = block.apply(variables, tokens(group))
    load = stats.tokens_per_expert
    _, moved = block.apply(variables, load, 0.5, method="update_expert_bias", mutable="expert_bias")
    found = moved["expert_bias"]["expert_bias"]
    np.testing.assert_array_equal(found, 0.5 * np.sign(load.mean() - load))
    assert set(moved) == {"expert_bias"}
    plain = ep.linen.MoEBlock(layer, MLP)
    with pytest.raises(InvalidArgumentError, match="made with use_expert_bias=True"):
        plain.apply(plain.init(KEY, tokens(group)), load, 0.5, method="update_expert_bias")


DELAYED = ep.recipes.TensorScaling(delayed=True, history=3)
HISTORIES = {"wi_x_amax", "wi_w_amax", "wo_x_amax", "wo_w_amax"}


def test_a_mutable_collection_moves_the_state_of_a_delayed_recipe(group: fakes.LocalGroup) -> None:
    layer, x = group.register_layer("block", top_k=2), tokens(group)
    block = ep.linen.MoEBlock(layer, MLP, recipe=DELAYED, return_stats=True)
    variables = nn.meta.unbox(block.init(KEY, x))
    assert {*variables} == {"params", "amax_history"}
    state, histories = ep.init_moe_state(layer, DELAYED), variables["amax_history"]
    assert {*histories} == HISTORIES
    for history in histories.values():
        np.testing.assert_array_equal(history, np.zeros((3, EXPERTS)))

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def of_module(params: Any, histories: Any, x: jax.Array) -> Any:
        given = {"params": params, "amax_history": histories}
        (y, _, stats), moved = block.apply(given, x, mutable="amax_history")
        return jnp.sin(y).sum(), (moved["amax_history"], stats)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def of_function(params: ep.MoEParams, state: ep.MoEState, x: jax.Array) -> Any:
        y, _, state = ep.moe(layer, x, params, recipe=DELAYED, state=state)
        return jnp.sin(y).sum(), state

    params = variables["params"]
    for factor in (1.0, 3.0):
        (loss, (histories, stats)), grads = of_module(params, histories, factor * x)
        (want, state), wanted = of_function(ep.MoEParams(**params), state, factor * x)
        np.testing.assert_array_equal(loss, want)
        jax.tree.map(np.testing.assert_array_equal, ep.MoEParams(**grads), wanted)
        np.testing.assert_array_equal(histories["wi_x_amax"], state.wi.x)
        np.testing.assert_array_equal(histories["wo_w_amax"], state.wo.w)
        assert int(stats.tokens_per_expert.sum()) == 32

    # In evaluation scales come from the histories, which do not change.
    still = jax.jit(lambda x: block.apply({"params": params, "amax_history": histories}, x)[0])
    meant = jax.jit(
        lambda x: ep.moe(layer, x, ep.MoEParams(**params), recipe=DELAYED, state=state)[0]
    )
    np.testing.assert_array_equal(still(5 * x), meant(5 * x))


def test_a_scan_with_remat_moves_each_layers_state_once(group: fakes.LocalGroup) -> None:
    depth, x = 2, tokens(group)
    stack = group.register_layer_stack("stack", depth, top_k=2)

    class Residual(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, index: jax.Array) -> Any:
            return x + ep.linen.MoEBlock(stack, MLP, recipe=DELAYED, name="moe")(x, index)[0], None

    scanned = nn.scan(
        nn.remat(Residual, policy=ep.remat_policy(), prevent_cse=False),
        variable_axes={"params": 0, "amax_history": 0},
        split_rngs={"params": True},
        length=depth,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()
    variables = nn.meta.unbox(scanned.init(KEY, x, jnp.arange(depth)))

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def step(params: Any, histories: Any) -> Any:
        given = {"params": params, "amax_history": histories}
        (y, _), moved = scanned.apply(given, x, jnp.arange(depth), mutable="amax_history")
        return jnp.sin(y).sum(), moved["amax_history"]

    params, histories = variables["params"], variables["amax_history"]
    for _ in range(2):
        grads, histories = step(params, histories)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
    amax = np.abs(params["moe"]["wi"]).max((2, 3, 4))
    found = histories["moe"]
    np.testing.assert_array_equal(found["wi_w_amax"], np.stack([amax, amax, 0 * amax], 1))
    for name in HISTORIES:
        assert (found[name][:, :2] > 0).all()
        np.testing.assert_array_equal(found[name][:, 2], np.zeros((depth, EXPERTS)))


def test_a_block_without_a_router_is_called_with_a_routing(group: fakes.LocalGroup) -> None:
    layer, x = group.register_layer("block", top_k=2), tokens(group)
    block = ep.linen.MoEBlock(layer, MLP, use_router=False)
    variables = nn.meta.unbox(block.init(KEY, x))
    assert set(variables["params"]) == {"wi", "wo"}
    routing = ep.route(x[:, :4], 2)
    params = ep.MoEParams(None, **variables["params"])
    want = ep.moe(layer, x, params, routing=routing)
    got = block.apply(variables, x, routing=routing)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_what_cannot_be_called_says_why(group: fakes.LocalGroup) -> None:
    x = tokens(group)
    variables = ep.linen.MoEBlock(SPEC, MLP).init(KEY, x)
    with pytest.raises(InvalidArgumentError, match="LayerSpec 'block', which moves no tokens"):
        ep.linen.MoEBlock(SPEC, MLP).apply(variables, x)
    with pytest.raises(InvalidArgumentError, match="got str"):
        ep.linen.MoEBlock("block", MLP).init(KEY, x)


def test_a_scan_that_gives_no_index_shares_one_layer(group: fakes.LocalGroup) -> None:
    layer, x, depth = group.register_layer("shared", top_k=2), tokens(group), 3

    class Residual(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> Any:
            return x + ep.linen.MoEBlock(layer, MLP, name="moe")(x)[0], None

    scanned = nn.scan(
        Residual,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=depth,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()
    variables = nn.meta.unbox(scanned.init(KEY, x, None))

    def looped(variables: Any) -> jax.Array:
        y = x
        for i in range(depth):
            one = jax.tree.map(lambda a, i=i: a[i], variables["params"]["moe"])
            y = y + ep.moe(layer, y, ep.MoEParams(**one))[0]
        return y

    got = jax.jit(lambda variables: scanned.apply(variables, x, None)[0])(variables)
    np.testing.assert_allclose(got, jax.jit(looped)(variables), rtol=1e-5, atol=1e-6)


def test_parameters_go_through_flax_serialization() -> None:
    params = ep.init_moe_params(KEY, SPEC, MLP, use_bias=True)
    pair = dataclasses.replace(params, wi=(params.wi[:, :, 0], params.wi[:, :, 1]), wi_bias=None)
    state = ep.init_moe_state(SPEC, ep.recipes.TensorScaling(delayed=True))
    for given in (params, pair, state):
        empty = jax.tree.map(jnp.zeros_like, given)
        back = serialization.from_bytes(empty, serialization.to_bytes(given))
        jax.tree.map(np.testing.assert_array_equal, back, given)
    assert set(serialization.to_state_dict(params)) == {f.name for f in dataclasses.fields(params)}
