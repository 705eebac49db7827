"""`ep.nnx.MoEBlock`: the values of `ep.moe`, static layers, logical names, flax's transforms."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from child_programs import run_python
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.modules.options import rules_in_context

HIDDEN, EXPERTS, MLP = 16, 4, 8
SPEC = ep.LayerSpec("block", top_k=2, num_experts=EXPERTS, hidden_size=HIDDEN)
RULES = ep.sharding.rules("fsdp+ep", tp=None, dp=None).logical


@pytest.fixture
def group(make_group: fakes.MakeGroup) -> fakes.LocalGroup:
    return make_group(axes={"ep": 2}, transport="memfd", num_experts=EXPERTS)


def tokens(group: fakes.LocalGroup) -> jax.Array:
    x = jax.random.normal(jax.random.key(1), (16, HIDDEN))
    return jax.device_put(x, NamedSharding(group.mesh, P("ep")))


def test_the_block_is_ep_moe_with_its_parameters(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("block", top_k=2)
    options = {"aux_loss_coeff": 0.1, "activation": "gelu", "weights_at": "hidden"}
    block = ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), use_bias=True, **options)
    x = tokens(group)

    @nnx.jit
    @nnx.value_and_grad
    def of_module(block: Any, x: jax.Array) -> jax.Array:
        y, aux = block(x)
        return jnp.sin(y).sum() + aux

    @jax.jit
    @jax.value_and_grad
    def of_function(params: ep.MoEParams, x: jax.Array) -> jax.Array:
        y, aux = ep.moe(layer, x, params, **options)
        return jnp.sin(y).sum() + aux

    value, grads = of_module(block, x)
    meant, meant_grads = of_function(block.params, x)
    np.testing.assert_array_equal(value, meant)
    for name in ("router", "wi", "wo", "wi_bias", "wo_bias"):
        np.testing.assert_array_equal(grads[name][...], getattr(meant_grads, name))


def test_gate_and_up_may_be_parameters_of_their_own(group: fakes.LocalGroup) -> None:
    layer, x = group.register_layer("block", top_k=2), tokens(group)
    block = ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), use_bias=True, separate=True)
    names = {"router", "wi_0", "wi_1", "wo", "wi_0_bias", "wi_1_bias", "wo_bias"}
    assert set(nnx.to_pure_dict(nnx.state(block))) == names
    assert block.wi_1.get_metadata()["out_sharding"] == ("exp", "embed_moe", "mlp_moe")
    meant = ep.init_moe_params(nnx.Rngs(0).params(), layer, MLP, use_bias=True, separate=True)
    jax.tree.map(np.testing.assert_array_equal, block.params, meant)
    grads = nnx.jit(nnx.grad(lambda block, x: jnp.sin(block(x)[0]).sum()))(block, x)
    wanted = jax.jit(jax.grad(lambda params: jnp.sin(ep.moe(layer, x, params)[0]).sum()))(meant)
    for index, name in enumerate(("wi_0", "wi_1")):
        np.testing.assert_array_equal(grads[name][...], wanted.wi[index])
        np.testing.assert_array_equal(grads[f"{name}_bias"][...], wanted.wi_bias[index])


def test_the_same_key_gives_the_parameters_of_init_moe_params() -> None:
    block = ep.nnx.MoEBlock(SPEC, MLP, rngs=nnx.Rngs(3), param_dtype=jnp.bfloat16)
    meant = ep.init_moe_params(nnx.Rngs(3).params(), SPEC, MLP, param_dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, block.params, meant)
    assert block.wi.dtype == jnp.bfloat16


def test_an_initializer_sees_one_matrix_at_a_time() -> None:
    seen = []

    def ones(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        seen.append(shape)
        return jnp.ones(shape, dtype)

    block = ep.nnx.MoEBlock(SPEC, MLP, rngs=nnx.Rngs(0), kernel_init=ones)
    assert seen == [(HIDDEN, EXPERTS), (HIDDEN, MLP), (MLP, HIDDEN)]
    assert block.wi.shape == (EXPERTS, HIDDEN, 2, MLP)


def test_a_layer_is_no_leaf_and_reaches_no_checkpoint(
    group: fakes.LocalGroup, tmp_path: Path
) -> None:
    layer = group.register_layer("block", top_k=2)
    block = ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), use_expert_bias=True)
    state = nnx.state(block)
    assert set(nnx.to_pure_dict(state)) == {"router", "wi", "wo", "expert_bias"}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved")
    assert set(restored) == {"router", "wi", "wo", "expert_bias"}
    # Restored without a daemon: the module is made from a spec.
    other = ep.nnx.MoEBlock(SPEC, MLP, rngs=nnx.Rngs(1), use_expert_bias=True)
    nnx.update(other, jax.tree.map(np.asarray, restored))  # restored arrays sit on one device
    np.testing.assert_array_equal(other.wi[...], block.wi[...])
    other.layer = pickle.loads(pickle.dumps(layer))
    np.testing.assert_array_equal(other(tokens(group))[0], block(tokens(group))[0])


def test_shapes_need_neither_daemon_nor_mesh() -> None:
    abstract = nnx.eval_shape(lambda: ep.nnx.MoEBlock(SPEC, MLP, rngs=nnx.Rngs(0), use_bias=True))
    assert abstract.wi.shape == (EXPERTS, HIDDEN, 2, MLP)
    names = {name: tuple(v.out_sharding) for name, v in nnx.state(abstract).items()}
    assert names == {
        "router": ("embed", None),
        "wi": ("exp", "embed_moe", None, "mlp_moe"),
        "wo": ("exp", "mlp_moe", "embed_moe"),
        "wi_bias": ("exp", None, "mlp_moe"),
        "wo_bias": ("exp", "embed_moe"),
    }
    y, aux = nnx.eval_shape(lambda block, x: block(x), abstract, jnp.zeros((4, HIDDEN)))
    assert (y.shape, aux.shape) == ((4, HIDDEN), ())
    with pytest.raises(InvalidArgumentError, match="give it one \\(block.layer of nnx\\)"):
        abstract(jnp.zeros((4, HIDDEN)))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_rules_and_a_mesh_place_parameters_when_they_are_made(explicit: bool) -> None:
    mesh = fakes.mesh_of({"fsdp": 2, "ep": 2}, explicit=explicit)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        block = ep.nnx.MoEBlock(SPEC, MLP, rngs=nnx.Rngs(0))
    expected = NamedSharding(mesh, P("ep", "fsdp"))
    assert block.wi.sharding.is_equivalent_to(expected, 4)
    assert block.wo.sharding.is_equivalent_to(NamedSharding(mesh, P("ep", None, "fsdp")), 3)
    whole = ep.nnx.MoEBlock(SPEC, MLP, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(whole.wi[...], block.wi[...])


def test_a_mesh_without_rules_leaves_parameters_alone() -> None:
    with jax.set_mesh(fakes.mesh_of({"fsdp": 2, "ep": 2})):
        block = ep.nnx.MoEBlock(SPEC, MLP, rngs=nnx.Rngs(0))
    assert block.wi.out_sharding == ("exp", "embed_moe", None, "mlp_moe")


def test_a_stack_of_blocks_scans_with_remat_like_a_loop(group: fakes.LocalGroup) -> None:
    depth = 3
    stack = group.register_layer_stack("stack", depth, top_k=2)

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: Any) -> Any:
        return ep.nnx.MoEBlock(stack, MLP, rngs=rngs, aux_loss_coeff=0.1)

    @nnx.scan(
        in_axes=(0, 0, nnx.Carry),
        out_axes=(nnx.Carry, 0),
        transform_metadata={nnx.PARTITION_NAME: "layers"},
    )
    @nnx.remat(policy=ep.remat_policy())
    def scanned(block: Any, index: jax.Array, x: jax.Array) -> Any:
        y, aux = block(x, index)
        return x + y, aux

    def loss(blocks: Any, x: jax.Array) -> jax.Array:
        y, aux = scanned(blocks, jnp.arange(depth), x)
        return jnp.sin(y).sum() + aux.sum()

    def looped(params: ep.MoEParams, x: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for i in range(depth):
            one = jax.tree.map(lambda a, i=i: a[i], params)
            y, aux = ep.moe(stack[i], x, one, aux_loss_coeff=0.1)
            x, total = x + y, total + aux
        return jnp.sin(x).sum() + total

    blocks, x = make(nnx.Rngs(0)), tokens(group)
    assert blocks.wi.out_sharding == ("layers", "exp", "embed_moe", None, "mlp_moe")
    value, grads = nnx.jit(nnx.value_and_grad(loss))(blocks, x)
    meant, meant_grads = jax.jit(jax.value_and_grad(looped))(blocks.params, x)
    np.testing.assert_allclose(value, meant, rtol=1e-5)
    for name in ("router", "wi", "wo"):
        np.testing.assert_allclose(
            grads[name][...], getattr(meant_grads, name), rtol=1e-4, atol=1e-5
        )


def test_the_expert_bias_is_state_that_no_optimizer_meets(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("block", top_k=2)
    block = ep.nnx.MoEBlock(
        layer,
        MLP,
        rngs=nnx.Rngs(0),
        use_expert_bias=True,
        router=ep.Router("sigmoid"),
        return_stats=True,
    )
    assert "expert_bias" not in nnx.state(block, nnx.Param)
    _, _, stats = block(tokens(group))
    load = stats.tokens_per_expert
    block.update_expert_bias(load, 0.5)
    np.testing.assert_array_equal(block.expert_bias[...], 0.5 * np.sign(load.mean() - load))
    block.expert_bias[...] = jnp.array([9.0, 9.0, -9.0, -9.0])
    _, _, biased = block(tokens(group))
    np.testing.assert_array_equal(biased.tokens_per_expert, [16, 16, 0, 0])
    plain = ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0))
    with pytest.raises(InvalidArgumentError, match="made with use_expert_bias=True"):
        plain.update_expert_bias(load, 0.5)


DELAYED = ep.recipes.TensorScaling(delayed=True, history=3)
HISTORIES = {"wi_x_amax", "wi_w_amax", "wo_x_amax", "wo_w_amax"}


def test_calls_move_the_state_of_a_delayed_recipe_unless_the_block_evaluates(
    group: fakes.LocalGroup,
) -> None:
    layer, x = group.register_layer("block", top_k=2), tokens(group)
    block = ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), recipe=DELAYED, return_stats=True)
    assert {*nnx.to_pure_dict(nnx.state(block, ep.nnx.AmaxHistory))} == HISTORIES
    assert not HISTORIES & {*nnx.to_pure_dict(nnx.state(block, nnx.Param))}
    optimizer = nnx.Optimizer(block, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def train(block: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda block: jnp.sin(block(x)[0]).sum())(block)
        optimizer.update(block, grads)
        return loss

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def wanted(params: ep.MoEParams, state: ep.MoEState, x: jax.Array) -> Any:
        y, _, state = ep.moe(layer, x, params, recipe=DELAYED, state=state)
        return jnp.sin(y).sum(), state

    params, state = block.params, ep.init_moe_state(layer, DELAYED)
    jax.tree.map(np.testing.assert_array_equal, block.moe_state, state)
    for factor in (1.0, 3.0):
        (loss, state), grads = wanted(params, state, factor * x)
        params = jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)
        np.testing.assert_array_equal(train(block, optimizer, factor * x), loss)
        for got, want in zip(*map(jax.tree.leaves, (block.moe_state, state)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)

    # In evaluation scales come from the histories, which do not change.
    kept = jax.tree.map(jnp.copy, block.moe_state)
    run = nnx.jit(lambda block, x: block(x)[0])
    block.eval()
    y = run(block, 5 * x)
    jax.tree.map(np.testing.assert_array_equal, block.moe_state, kept)
    meant = jax.jit(lambda *args: ep.moe(layer, 5 * x, args[0], recipe=DELAYED, state=args[1])[0])
    np.testing.assert_array_equal(y, meant(block.params, kept))
    block.train()
    block(x)
    assert not np.array_equal(block.moe_state.wi.x, kept.wi.x)
    if hasattr(nnx, "view"):
        assert nnx.view(block, use_running_average=True).use_running_average
        assert not block.use_running_average


def test_a_scan_with_remat_moves_each_layers_state_once(make_group: fakes.MakeGroup) -> None:
    """On Explicit axes states are replicated, and gradients are sharded like their weights."""
    mesh, depth = fakes.mesh_of({"fsdp": 2, "ep": 2}, explicit=True), 2
    rules = ep.sharding.rules("shard-exp-on-fsdp").on(mesh)
    group = make_group(mesh=mesh, **rules.group_axes(mesh), transport="memfd", num_experts=EXPERTS)
    stack = group.register_layer_stack("stack", depth, top_k=2)
    recipe = (DELAYED, None)

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: Any) -> Any:
        return ep.nnx.MoEBlock(stack, MLP, rngs=rngs, recipe=recipe)

    @nnx.scan(
        in_axes=(0, 0, nnx.Carry),
        out_axes=nnx.Carry,
        transform_metadata={nnx.PARTITION_NAME: "layers"},
    )
    @nnx.remat(policy=ep.remat_policy())
    def scanned(block: Any, index: jax.Array, x: jax.Array) -> jax.Array:
        return x + block(x, index)[0]

    @nnx.jit
    def train(blocks: Any, x: jax.Array) -> Any:
        return nnx.grad(lambda blocks: scanned(blocks, jnp.arange(depth), x).sum())(blocks)

    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules.logical):
        blocks = nnx.jit(lambda: make(nnx.Rngs(0)))()
        assert blocks.wi_w_amax.out_sharding == ("layers", None, None)
        x = jax.device_put(
            jnp.ones((16, HIDDEN)), rules.shardings(("activation_batch", None), mesh)
        )
        before = jax.typeof(blocks.wi_w_amax[...])
        for _ in range(2):
            grads = train(blocks, x)
    assert jax.typeof(blocks.wi_w_amax[...]) == before
    assert jax.typeof(grads["wi"][...]) == jax.typeof(blocks.wi[...])
    assert blocks.wi.sharding.spec == P(None, ("ep", "fsdp"), None, None, None)
    assert {*nnx.to_pure_dict(grads)} == {"router", "wi", "wo"}
    amax = np.abs(blocks.wi[...]).max((2, 3, 4))
    np.testing.assert_array_equal(blocks.wi_w_amax[...], np.stack([amax, amax, 0 * amax], 1))
    rows = np.asarray(blocks.wi_x_amax[...])
    assert (rows[:, :2].max(2) >= 1).all()
    np.testing.assert_array_equal(rows[:, 2], np.zeros((depth, EXPERTS)))
    assert not hasattr(blocks, "wo_x_amax")


def test_histories_are_in_checkpoints_and_need_no_daemon(
    group: fakes.LocalGroup, tmp_path: Path
) -> None:
    layer, x = group.register_layer("block", top_k=2), tokens(group)
    block = ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), recipe=DELAYED)
    block(x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.to_pure_dict(nnx.state(block)))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved")
    assert {*restored} == {"router", "wi", "wo"} | HISTORIES
    other = ep.nnx.MoEBlock(SPEC, MLP, rngs=nnx.Rngs(1), recipe=DELAYED)
    nnx.update(other, jax.tree.map(np.asarray, restored))
    jax.tree.map(np.testing.assert_array_equal, other.moe_state, block.moe_state)
    y, _ = nnx.eval_shape(lambda block, x: block(x), other, x)
    assert y.shape == x.shape
    shardings = ep.sharding.rules("fsdp+ep").shardings(nnx.state(block), group.mesh)
    placed = jax.device_put(nnx.state(block), shardings)
    assert placed["wi_x_amax"][...].sharding.is_fully_replicated
    with pytest.raises(InvalidArgumentError, match="state is a variable of the module"):
        ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), recipe=DELAYED, **{"state": None})


def test_a_block_without_a_router_is_called_with_a_routing(group: fakes.LocalGroup) -> None:
    layer, x = group.register_layer("block", top_k=2), tokens(group)
    block = ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), use_router=False, aux_loss_coeff=0.1)
    assert "router" not in nnx.state(block)
    routing = ep.route(x[:, :EXPERTS], 2)
    want = ep.moe(layer, x, block.params, routing=routing, aux_loss_coeff=0.1)
    jax.tree.map(np.testing.assert_array_equal, block(x, routing=routing), want)
    with pytest.raises(InvalidArgumentError, match="got neither"):
        block(x)
    with pytest.raises(InvalidArgumentError, match="params.router must be None with routing="):
        ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0))(x, routing=routing)
    options = {"routing": routing}
    with pytest.raises(InvalidArgumentError, match="routing is of one call: make the module"):
        ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), **options)
    with pytest.raises(InvalidArgumentError, match="router, got use_router=False"):
        ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), use_router=False, use_expert_bias=True)


def test_rules_around_a_call_tell_how_parameters_lie(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("block", top_k=2)
    rules = ep.sharding.rules("shard-exp-on-fsdp").on(group.mesh)
    found = rules_in_context(rules.logical, layer)
    assert found is not None
    assert found.spec(("exp", "embed_moe", None, "mlp_moe")) == P("ep", None, None, None)
    assert rules_in_context((), layer) is None
    assert rules_in_context((("exp", "ep"), ("embed_moe", None)), layer) is None
    # Axes of another mesh than the layer's.
    assert rules_in_context(ep.sharding.rules("fsdp+ep").logical, layer) is None


def test_what_cannot_be_called_says_why(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("block", top_k=2)
    stack = group.register_layer_stack("stack", 2, top_k=2)
    rngs, x = nnx.Rngs(0), tokens(group)
    with pytest.raises(InvalidArgumentError, match="one of the 2 layers of stack 'stack'"):
        ep.nnx.MoEBlock(stack, MLP, rngs=rngs)(x)
    with pytest.raises(InvalidArgumentError, match="'block' is one layer"):
        ep.nnx.MoEBlock(layer, MLP, rngs=rngs)(x, layer_index=0)
    with pytest.raises(
        InvalidArgumentError, match="topk is not an option of MoEBlock, which has rngs"
    ):
        ep.nnx.MoEBlock(layer, MLP, rngs=rngs, topk=2)
    with pytest.raises(InvalidArgumentError, match="use_expert_bias=True"):
        ep.nnx.MoEBlock(layer, MLP, rngs=rngs, expert_bias=x)
    with pytest.raises(InvalidArgumentError, match="got str"):
        ep.nnx.MoEBlock("block", MLP, rngs=rngs)
    with pytest.raises(InvalidArgumentError, match="needs num_experts and hidden_size"):
        ep.nnx.MoEBlock(ep.LayerSpec("block", top_k=2), MLP, rngs=rngs)


def test_without_flax_the_error_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['flax'] = None\n"
        "from ep_runtime import *\n"
        "import ep_runtime as ep\n"
        "for name in ('nnx', 'linen'):\n"
        "    try:\n"
        "        getattr(ep, name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    done = run_python("-c", program)
    assert done.stdout.splitlines() == [
        f"ep.{name} needs flax: pip install 'ep-runtime[flax]'" for name in ("nnx", "linen")
    ], done.stderr
