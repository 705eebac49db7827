"""`ep.linen.MoEBlock`: the values of `ep.moe`, logical partitioning, scan, checkpoints."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError

MakeGroup = Callable[..., fakes.LocalGroup]
HIDDEN, EXPERTS, MLP = 16, 4, 8
SPEC = ep.LayerSpec("block", top_k=2, num_experts=EXPERTS, hidden_size=HIDDEN)
RULES = ep.sharding.rules("fsdp+ep", tp=None, dp=None).logical
KEY = jax.random.key(0)


@pytest.fixture
def group(make_group: MakeGroup) -> fakes.LocalGroup:
    fakes.require_native()
    return make_group(axes={"ep": 2}, transport="memfd", num_experts=EXPERTS)


def tokens(group: fakes.LocalGroup) -> jax.Array:
    x = jax.random.normal(jax.random.key(1), (16, HIDDEN))
    return jax.device_put(x, NamedSharding(group.mesh, P("ep")))


def test_the_attributes_are_the_options_of_moe_with_their_defaults() -> None:
    own = {field.name: field.default for field in dataclasses.fields(ep.linen.MoEBlock)}
    for name, parameter in inspect.signature(ep.moe).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("expert_bias", "routing"):
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


def test_a_layer_reaches_no_checkpoint(tmp_path: Path, group: fakes.LocalGroup) -> None:
    layer = group.register_layer("block", top_k=2)
    block = ep.linen.MoEBlock(layer, MLP, use_expert_bias=True)
    variables = nn.meta.unbox(block.init(KEY, tokens(group)))
    assert set(variables) == {"params", "expert_bias"}
    assert set(variables["params"]) == {"router", "wi", "wo"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", variables)
    jax.tree.map(np.testing.assert_array_equal, restored, variables)


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
        layer, MLP, use_expert_bias=True, score_function="sigmoid", return_stats=True
    )
    variables = nn.meta.unbox(block.init(KEY, tokens(group)))
    _, _, stats = block.apply(variables, tokens(group))
    load = stats.tokens_per_expert
    _, moved = block.apply(variables, load, 0.5, method="update_expert_bias", mutable="expert_bias")
    found = moved["expert_bias"]["expert_bias"]
    np.testing.assert_array_equal(found, 0.5 * np.sign(load.mean() - load))
    assert set(moved) == {"expert_bias"}


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
    with pytest.raises(InvalidArgumentError, match="has not with use_router=False"):
        ep.linen.MoEBlock(layer, MLP, use_router=False, use_expert_bias=True).init(KEY, x)


def test_what_cannot_be_called_says_why(group: fakes.LocalGroup) -> None:
    x = tokens(group)
    variables = ep.linen.MoEBlock(SPEC, MLP).init(KEY, x)
    with pytest.raises(InvalidArgumentError, match="LayerSpec 'block', which moves no tokens"):
        ep.linen.MoEBlock(SPEC, MLP).apply(variables, x)
    stack = group.register_layer_stack("stack", 2, top_k=2)
    with pytest.raises(InvalidArgumentError, match="which of the 2 layers of stack 'stack'"):
        ep.linen.MoEBlock(stack, MLP).apply(variables, x)
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
