"""Delayed scaling of the block: its state as an argument and a result, against ops and NumPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_moe import worst_error
from jax.sharding import NamedSharding
from moe_layouts import (
    CAPACITY,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYOUTS,
    TOKENS,
    TOP_K,
    Layout,
    Spec,
    make_params,
    open_group,
    place,
)

import ep_runtime as ep
from ep_runtime_client.moe import bodies
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.quantize.formats.recipes import Recipe

DELAYED = ep.recipes.TensorScaling(delayed=True, history=3)
CURRENT = ep.recipes.TensorScaling()
LARGEST = np.float32(448)
ONE_AXIS = Layout({"ep": 2}, (), *[Spec("ep")] * 4)


@pytest.fixture
def layer(make_group: fakes.MakeGroup) -> Any:
    return open_group(make_group, ONE_AXIS).register_layer("moe", top_k=TOP_K)


def drawn(layer: Any, **options: Any) -> tuple[Any, ep.MoEParams]:
    keys = jax.random.split(jax.random.key(3), 3)
    params = ep.init_moe_params(keys[0], layer, INNER, **options)
    if params.wi_bias is not None:
        bias = jax.tree.map(lambda x: x + 0.5, params.wi_bias)
        params = dataclasses.replace(params, wi_bias=bias, wo_bias=params.wo_bias - 0.25)
    x = jax.random.normal(keys[1], (TOKENS, HIDDEN))
    return jax.device_put(x, NamedSharding(layer.mesh, Spec("ep"))), params


def settled(layer: Any, x: Any, params: Any, **options: Any) -> ep.MoEState:
    """Returns the state after enough steps that its histories contain only `x`."""
    state = ep.init_moe_state(layer, DELAYED)
    step = jax.jit(lambda s: ep.moe(layer, x, params, recipe=DELAYED, state=s, **options)[-1])
    for _ in range(4):
        state = step(state)
    return state


def by_hand(layer: Any, x: Any, params: Any, state: Any) -> Any:
    """Computes the block of a pair with biases from public ops."""
    routing = ep.route(x[:, :EXPERTS], TOP_K)
    plan = ep.prepare(layer, routing.topk_idx)
    sent = ep.dispatch(layer, x, None, routing.topk_weights, plan=plan)

    def product(rows: Any, kernel: Any, bias: Any, state: Any) -> Any:
        how: Any = {"layer": layer, "bias": bias, "recipe": DELAYED, "state": state}
        return ep.grouped_gemm(rows, kernel, sent.group_sizes, **how)

    hidden, wi = product(sent.tokens, params.wi, jnp.stack(params.wi_bias, 1), state.wi)
    silu = Activation("silu", True, hidden.dtype)
    inner = silu.rows(hidden.reshape(-1, *hidden.shape[2:])).reshape(*hidden.shape[:2], -1)
    out, wo = product(inner, params.wo, params.wo_bias, state.wo)
    return ep.combine(layer, sent, out, weights=sent.weights), ep.MoEState(wi, wo)


@pytest.mark.usefixtures("optimized")  # compares bits of programs, compiled as users do
def test_the_block_is_its_ops_with_a_state_each_bit_for_bit(layer: Any) -> None:
    x, params = drawn(layer, use_router=False, separate=True, use_bias=True)
    state = ep.init_moe_state(layer, DELAYED)

    def block(x: Any, params: Any, state: Any) -> Any:
        routing = ep.route(x[:, :EXPERTS], TOP_K)
        y, _, state = ep.moe(layer, x, params, routing=routing, recipe=DELAYED, state=state)
        return y, state

    runs = [jax.jit(each) for each in (block, functools.partial(by_hand, layer))]
    for scale in (1.0, 4.0):  # values of the second call exceed its scales
        got, want = (run(scale * x, params, state) for run in runs)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        state = got[1]


@dataclasses.dataclass
class Oracle:
    """Histories of a block in plain NumPy, call by call."""

    histories: dict[str, Any]

    @classmethod
    def new(cls, recipe: Recipe) -> Oracle:
        zeros = np.zeros((recipe.history, EXPERTS), np.float32)  # type: ignore[attr-defined]
        return cls({name: zeros for name in ("wi.x", "wi.w", "wo.x", "wo.w")})

    def quantized(self, name: str, values: Any, expert: int) -> Any:
        amax = self.histories[name][:, expert].max()
        scale = amax / LARGEST if amax else np.float32(1)
        scaled = np.clip(values * (np.float32(1) / scale), -LARGEST, LARGEST)
        return scaled.astype(jnp.float8_e4m3fn).astype(np.float64) * np.float64(scale)

    def step(self, x: Any, params: Any, idx: Any, weights: Any) -> Any:
        """Computes y; slots of -1 belong to no expert."""
        x, wi, wo = (np.asarray(each, np.float32) for each in (x, params.wi, params.wo))
        amax = {name: np.zeros(EXPERTS, np.float32) for name in self.histories}
        y = np.zeros(x.shape)
        for expert in range(EXPERTS):
            amax["wi.w"][expert], amax["wo.w"][expert] = (
                abs(wi[expert]).max(),
                abs(wo[expert]).max(),
            )
            tokens, slots = np.nonzero(np.asarray(idx) == expert)
            if not len(tokens):
                continue
            amax["wi.x"][expert] = abs(x[tokens]).max()
            rows = self.quantized("wi.x", x[tokens], expert)
            gate, up = np.einsum("th,hgm->gtm", rows, self.quantized("wi.w", wi[expert], expert))
            inner = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
            amax["wo.x"][expert] = abs(inner).max()
            rows = self.quantized("wo.x", inner, expert)
            out = rows @ self.quantized("wo.w", wo[expert], expert)
            np.add.at(y, tokens, out * np.asarray(weights, np.float64)[tokens, slots, None])
        for name, history in self.histories.items():
            self.histories[name] = np.concatenate([amax[name][None], history[:-1]])
        return y

    def check(self, state: ep.MoEState) -> None:
        for name, history in self.histories.items():
            product, operand = name.split(".")
            found = getattr(getattr(state, product), operand)
            if name == "wo.x":  # f32 sums in another order
                np.testing.assert_allclose(found, history, rtol=1e-5)
            else:
                np.testing.assert_array_equal(found, history)


@pytest.mark.parametrize("capacity", [None, 24], ids=["whole", "dropping"])
def test_histories_of_many_steps_are_those_of_numpy(layer: Any, capacity: int | None) -> None:
    """Tokens and weights grow beyond old scales, and shrink again within the histories' length."""
    x, params = drawn(layer)
    recipe = ep.recipes.TensorScaling(delayed=True, history=2)
    oracle, state = Oracle.new(recipe), ep.init_moe_state(layer, recipe)

    @jax.jit
    def step(x: Any, params: Any, state: Any) -> Any:
        how: Any = {"recipe": recipe, "state": state, "capacity": capacity}
        y, _, stats, state = ep.moe(layer, x, params, return_stats=True, **how)
        plan = ep.prepare(layer, stats.routing.topk_idx, capacity=capacity)
        return y, stats, plan.arrays.dst_row, state

    for factor in (1.0, 3.0, 0.5, 0.5, 0.25, 8.0):
        now = dataclasses.replace(params, wi=factor**0.5 * params.wi, wo=params.wo / factor)
        y, stats, dst_row, state = step(factor * x, now, state)
        kept = np.asarray(dst_row).reshape(TOKENS, TOP_K) >= 0
        assert (~kept).sum() == int(stats.dropped)
        assert (int(stats.dropped) > 0) == (capacity is not None)
        idx = np.where(kept, stats.routing.topk_idx, -1)
        want = oracle.step(factor * x, now, idx, stats.routing.topk_weights)
        oracle.check(state)
        # About one value in 1,000 is halfway between two values of e4m3 in one of the two.
        assert worst_error(y, want) < 5e-3


def test_what_an_old_scale_cannot_hold_saturates(layer: Any) -> None:
    x, params = drawn(layer, use_router=False)
    idx = jax.random.randint(jax.random.key(5), (TOKENS, TOP_K), 0, EXPERTS)
    weights = jnp.ones(idx.shape)
    state = settled(layer, x, params, routing=ep.Routing(idx, weights))

    @jax.jit
    def run(x: Any, idx: Any) -> Any:
        how: Any = {"routing": ep.Routing(idx, weights), "recipe": DELAYED, "state": state}
        return ep.moe(layer, x, params, **how)

    # One outlier token: its expert's rows are clipped to the old range.
    token, expert = 5, idx[5, 0]
    far = x.at[token].multiply(100.0)
    amax = state.wi.x[0, expert]
    alone = jnp.where(idx == expert, idx, -1)
    got, want = run(far, alone), run(jnp.clip(far, -amax, amax), alone)
    np.testing.assert_array_equal(got[0], want[0])
    assert np.abs(got[0][token]).max() < 100 * np.abs(run(x, alone)[0][token]).max()
    # By now its own history contains the outlier.
    np.testing.assert_array_equal(got[2].wi.x[0, expert], np.abs(far[token]).max())
    np.testing.assert_array_equal(want[2].wi.x[0, expert], amax)


def test_gradients_have_current_scales_and_none_flows_through_the_state(layer: Any) -> None:
    """After equal calls, the block equals that of current scaling, backward too."""
    x, params = drawn(layer)
    state = settled(layer, x, params)

    def loss(x: Any, params: Any, state: Any, recipe: Any) -> Any:
        how: Any = {} if state is None else {"state": state}
        y, _, *after = ep.moe(layer, x, params, recipe=recipe, **how)
        return 1e6 * jnp.sin(y).sum() + sum(h.sum() for h in jax.tree.leaves(after))

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    (*got, d_state), (*want, _) = run(x, params, state, DELAYED), run(x, params, None, CURRENT)
    for leaf in jax.tree.leaves(d_state):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
    for left, right in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("rule", "fsdp2 ep2 tp2"),
        ("explicit", "fsdp2 ep2 tp2"),
        ("manual", "experts on ep and fsdp"),
    ],
)
def test_histories_are_of_all_ranks_and_lie_as_they_came(
    make_group: fakes.MakeGroup, mode: str, name: str
) -> None:
    layout = LAYOUTS[name]
    specs = dataclasses.replace(layout.specs, wi_bias=None, wo_bias=None)
    settings = {} if mode == "manual" else {"partitioning": mode}
    if mode == "explicit":
        settings = {"explicit": True}
    group = open_group(make_group, layout, **settings)
    layer = group.register_layer("moe", top_k=TOP_K)
    plain = dataclasses.replace(make_params(layer), wi_bias=None, wo_bias=None)
    x, params = place(group, layout, plain)

    def block(x: Any, params: Any, state: Any) -> Any:
        told = specs if mode == "manual" else None
        how: Any = {"recipe": DELAYED, "state": state, "params_spec": told}
        y, _, stats, state = ep.moe(layer, x, params, capacity=CAPACITY, return_stats=True, **how)
        return y, stats.routing.topk_idx, stats.routing.topk_weights, state

    run: Any = block
    if mode == "manual":  # their types declare histories as the same everywhere
        spread = layout.tokens
        ins, outs = (spread, specs, Spec()), (spread, spread, spread, Spec())
        run = jax.shard_map(block, mesh=group.mesh, in_specs=ins, out_specs=outs)

    def loss(*operands: Any) -> Any:
        y, *rest = run(*operands)
        return jnp.sin(y).sum(), (y, *rest)

    step = jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), donate_argnums=2)
    rules = ep.sharding.rules("fsdp+ep")
    first = ep.init_moe_state(layer, DELAYED)
    state = given = jax.device_put(first, rules.shardings(first, group.mesh))
    oracle = Oracle.new(DELAYED)
    for factor in (1.0, 2.0, 0.5):
        before = state
        (_, (y, idx, weights, state)), (_, d_state) = step(factor * x, params, before)
        want = oracle.step(factor * np.asarray(x), params, idx, weights)
        oracle.check(state)
        assert worst_error(y, want) < 5e-3
        for old, new, grad in zip(*map(jax.tree.leaves, (before, state, d_state)), strict=True):
            assert jax.typeof(new) == jax.typeof(old)
            assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
            np.testing.assert_array_equal(grad, np.zeros_like(grad))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))  # donated


def test_a_scan_over_layers_moves_every_layer_once(make_group: fakes.MakeGroup) -> None:
    group = open_group(make_group, ONE_AXIS)
    stack, depth = group.register_layer_stack("blocks", 2, top_k=TOP_K), 2
    x, one = drawn(stack[0])
    recipe = (DELAYED, CURRENT)
    params = jax.tree.map(lambda w: jnp.stack([w, 0.9 * w]), one)
    states = jax.tree.map(lambda h: jnp.stack([h] * depth), ep.init_moe_state(stack, recipe))

    def loss(params: Any, states: Any, x: Any, *, scanned: bool) -> Any:
        def layer(x: Any, given: Any) -> Any:
            number, params, state = given
            y, aux, state = ep.moe(stack[number], x, params, recipe=recipe, state=state)
            return x + y, (aux, state)

        numbers = jnp.arange(depth)
        if scanned:
            body = jax.checkpoint(layer, policy=ep.remat_policy(("ep_plan", "ep_recv")))
            x, (_, states) = jax.lax.scan(body, x, (numbers, params, states))
            return jnp.sin(x).sum(), states
        each = []
        for i in range(depth):
            given = jax.tree.map(lambda leaf, i=i: leaf[i], (numbers, params, states))
            x, (_, state) = layer(x, (i, *given[1:]))
            each.append(state)
        return jnp.sin(x).sum(), jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def steps(scanned: bool) -> Any:
        run = jax.jit(
            lambda *args: jax.value_and_grad(loss, has_aux=True)(*args, scanned=scanned),
        )
        now = states
        for factor in (1.0, 2.0):
            (value, now), grads = run(params, now, factor * x)
        return value, now, grads

    (got, want) = (steps(scanned) for scanned in (True, False))
    # Two calls: two rows of each history changed, the third did not.
    for leaf in jax.tree.leaves(got[1]):
        assert leaf.shape == (depth, DELAYED.history, EXPERTS)
        assert (leaf[:, :2] > 0).all()
        np.testing.assert_array_equal(leaf[:, 2], np.zeros((depth, EXPERTS)))
    assert got[1].wo is None
    kernels = np.abs(params.wi).max((2, 3, 4))
    np.testing.assert_array_equal(got[1].wi.w[:, :2], np.stack([kernels] * 2, 1))
    assert worst_error(got, jax.tree.map(np.asarray, want)) < 1e-3


def test_stages_have_histories_of_their_own(make_group: fakes.MakeGroup) -> None:
    layout = Layout({"stage": 2, "ep": 2}, (), *[Spec("ep")] * 4)
    layer = open_group(make_group, layout).register_layer("moe", top_k=TOP_K)
    x, one = drawn(layer)
    spread = NamedSharding(layer.mesh, Spec("stage", "ep"))
    xs = jax.device_put(jnp.stack([x, 2 * x]), spread)
    params = jax.tree.map(lambda w: jnp.stack([w, 3 * w]), one)
    states = jax.tree.map(lambda h: jnp.stack([h, h]), ep.init_moe_state(layer, DELAYED))

    def stage(x: Any, params: Any, state: Any) -> Any:
        return ep.moe(layer, x, params, recipe=DELAYED, state=state)[-1]

    both = jax.jit(jax.vmap(stage, spmd_axis_name="stage"))(xs, params, states)
    each = [
        jax.jit(stage)(*jax.tree.map(lambda leaf, i=i: leaf[i], (xs, params, states)))
        for i in range(2)
    ]
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    for got, meant in zip(*map(jax.tree.leaves, (both, want)), strict=True):
        np.testing.assert_allclose(got, meant, rtol=1e-6)
    np.testing.assert_array_equal(both.wi.w[1, 0], np.abs(params.wi[1]).max((1, 2, 3)))


def test_a_layer_spec_gives_the_shapes_and_a_zero_cotangent() -> None:
    spec = ep.LayerSpec("moe", top_k=TOP_K, num_experts=EXPERTS, hidden_size=HIDDEN)

    def run(key: Any) -> Any:
        params, state = ep.init_moe_params(key, spec, INNER), ep.init_moe_state(spec, DELAYED)

        def loss(params: Any, state: Any) -> Any:
            how: Any = {"recipe": DELAYED, "state": state}
            y, aux, stats, state = ep.moe(
                spec, jnp.ones((8, HIDDEN)), params, **how, return_stats=True
            )
            return y.sum() + aux, (stats, state)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, state)

    (_, (stats, after)), (_, d_state) = jax.eval_shape(run, jax.random.key(0))
    meant = jax.eval_shape(lambda: ep.init_moe_state(spec, DELAYED))
    assert after == d_state == meant
    assert stats.tokens_per_expert.shape == (EXPERTS,)
    alone = jax.jit(lambda state: ep.moe(spec, x, params, recipe=DELAYED, state=state)[-1])
    x, params = jnp.ones((8, HIDDEN)), ep.init_moe_params(jax.random.key(0), spec, INNER)
    with pytest.raises(ep.InvalidArgumentError, match="moves no tokens"):
        alone(ep.init_moe_state(spec, DELAYED))
    with pytest.raises(ep.InvalidArgumentError, match="needs state="):
        jax.eval_shape(lambda: ep.moe(spec, x, params, recipe=DELAYED))


def test_a_state_that_does_not_fit_is_refused_by_name(layer: Any) -> None:
    x, params = drawn(layer)
    whole = ep.init_moe_state(layer, DELAYED)
    wi_alone = ep.init_moe_state(layer, (DELAYED, None))
    longer = ep.init_moe_state(layer, ep.recipes.TensorScaling(delayed=True))
    stacked = jax.tree.map(lambda h: jnp.stack([h, h]), whole)
    narrow = jax.tree.map(lambda h: h.astype(jnp.bfloat16), whole)
    wrong: list[tuple[Any, Any, str]] = [
        (DELAYED, None, r"needs state=, from ep.init_moe_state\(layer, recipe\)"),
        ((None, DELAYED), None, "needs state="),
        (None, whole, r"state goes with recipe=TensorScaling\(delayed=True\) alone, got .* None"),
        (CURRENT, whole, "state goes with recipe"),
        (DELAYED, (whole.wi, whole.wo), "must be ep.MoEState, .* got tuple"),
        (DELAYED, wi_alone, "state.wo must be the DelayedState .* got NoneType"),
        ((DELAYED, CURRENT), whole, "state.wo must be None, .* of wo has no state: TensorScaling"),
        (DELAYED, longer, r"state.wi.x must be float32 .* = \[3, 8\], got float32 \[16, 8\]"),
        (DELAYED, stacked, r"got float32 \[2, 3, 8\]; it is of one layer"),
        (DELAYED, narrow, r"got bfloat16 \[3, 8\]"),
    ]
    for recipe, state, words in wrong:
        with pytest.raises(ep.InvalidArgumentError, match=words) as caught:
            ep.moe(layer, x, params, recipe=recipe, state=state)
        assert caught.value.fields["argument"] == "state"
    for recipe in (None, CURRENT, (CURRENT, None)):
        with pytest.raises(ep.InvalidArgumentError, match="for wi, wo or both, to have a state"):
            ep.init_moe_state(layer, recipe)


@pytest.mark.parametrize("recipes", [DELAYED, (CURRENT, DELAYED)], ids=["both", "wo"])
def test_the_state_of_one_product_starts_every_delayed_one(layer: Any, recipes: Any) -> None:
    x, params = drawn(layer)
    first = DELAYED.init_state(EXPERTS)

    def call(state: Any) -> Any:
        return ep.moe(layer, x, params, recipe=recipes, state=state)

    jax.tree.map(
        np.testing.assert_array_equal, call(first), call(ep.init_moe_state(layer, recipes))
    )


def test_a_state_on_one_device_is_moved_to_the_others(layer: Any) -> None:
    x, params = drawn(layer)
    state = jax.device_put(ep.init_moe_state(layer, DELAYED), jax.devices()[0])
    after = ep.moe(layer, x, params, recipe=DELAYED, state=state)[-1]
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(after))
    np.testing.assert_array_equal(after.wi.w[0], np.abs(params.wi).max((1, 2, 3)))


def test_explain_says_that_no_block_call_takes_a_state(layer: Any, ways: Any) -> None:
    ways.emulated()
    x, params = drawn(layer)
    state = ep.init_moe_state(layer, DELAYED)
    run = jax.jit(lambda x, p, s: ep.moe(layer, x, p, recipe=DELAYED, state=s))
    told = ep.explain(run, x, params, state)
    why = bodies.REASONS["recipe"]
    assert [(path.path, path.why) for path in told.paths] == [("composed", why)]
    assert told.num_others == 0
