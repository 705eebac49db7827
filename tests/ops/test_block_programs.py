"""Programs with block calls: scans, checkpoints, pullbacks; and microbatches in any order."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import custom_calls
import fakes
import jax
import jax.numpy as jnp
import microbatches
import numpy as np
import pytest
from block_ways import Ways, assert_close
from jax.interpreters import partial_eval as pe
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.moe import gradient
from ep_runtime_client.moe.resolved import ResolvedCall

COUNT, TOKENS, HIDDEN, INNER, TOP_K = 3, 32, 16, 8, 2
group = fakes.module_group(
    {"ep": 4},
    debug=True,
    num_experts=8,
    hidden_size=HIDDEN,
    max_tokens_per_rank=COUNT * TOKENS // 4,
    max_top_k=TOP_K,
)


@pytest.fixture(scope="module")
def stack(group: fakes.LocalGroup) -> Any:
    return group.register_layer_stack("stack", COUNT, top_k=TOP_K)


def stacked(stack: Any) -> ep.MoEParams:
    keys = jax.random.split(jax.random.key(0), COUNT)
    each = [ep.init_moe_params(key, stack[0], INNER) for key in keys]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def draw(*lead: int) -> Any:
    return jax.random.normal(jax.random.key(7), (*lead, HIDDEN))


def scanned(
    stack: Any, policy: Any, x: Any, params: Any, *, wanted: Any = (0, 1), **options: Any
) -> Any:
    """Returns loss and gradients of layers in a scan, with a checkpoint's `policy`, or None."""

    def step(x: Any, each: Any) -> Any:
        return x + ep.moe(stack[each[0]], x, each[1], **options)[0], None

    run = step if policy is None else jax.checkpoint(step, policy=policy)

    def loss(x: Any, params: Any) -> Any:
        return jnp.sin(jax.lax.scan(run, x, (jnp.arange(COUNT), params))[0]).sum()

    return jax.value_and_grad(loss, argnums=wanted)(x, params)


POLICIES = {
    "no checkpoint": None,
    "plan": ep.remat_policy(("ep_plan",)),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "plan and first product": ep.remat_policy(),
}


def test_scans_over_layers_give_what_the_ops_give(stack: Any, ways: Ways) -> None:
    x, params = draw(TOKENS), stacked(stack)
    ways.by_ops()
    want = jax.jit(functools.partial(scanned, stack, None))(x, params)
    ways.emulated()
    for policy in POLICIES.values():
        for keep in ("first", "nothing") if policy is None else ("first",):
            run = jax.jit(functools.partial(scanned, stack, policy, keep=keep), donate_argnums=0)
            got = run(jnp.copy(x), params)
            assert_close(got, want, atol=1e-5)
            again = run(jnp.copy(x), params)
            jax.tree.map(np.testing.assert_array_equal, again, got)


# Forward calls and prepares of a layer; the stand-in of a backward call contains a forward one.
CALLS = {
    ("first", "no checkpoint"): (1, 2, 1),
    ("nothing", "no checkpoint"): (1, 2, 1),
    ("nothing", "plan"): (1, 2, 1),
    ("nothing", "nothing"): (2, 2, 1),
    ("first", "plan"): (1, 2, 1),  # rows that were not saved are computed in backward
    ("first", "plan and first product"): (1, 2, 1),
}


@pytest.mark.parametrize(("keep", "policy"), CALLS)
def test_a_layer_runs_as_few_calls_as_its_checkpoint_asks_for(
    stack: Any, ways: Ways, keep: str, policy: str
) -> None:
    ways.emulated()
    run = jax.jit(functools.partial(scanned, stack, POLICIES[policy], keep=keep))
    found = custom_calls.traced(run.trace(draw(TOKENS), stacked(stack)).jaxpr, "cpu")
    # On CPU each call is composed of ops, one of each.
    of_calls = ("ep_prepare_v1", "ep_combine_v1", "ep_dispatch_bwd_v1")
    assert tuple(found[name] / COUNT for name in of_calls) == CALLS[keep, policy]


def test_rows_are_kept_where_a_gradient_reads_them(stack: Any, ways: Ways) -> None:
    ways.emulated()
    x, params = draw(TOKENS), stacked(stack)
    one = jax.tree.map(lambda x: x[0], params)
    forward = jax.jit(lambda x, p: ep.moe(stack[0], x, p)[0])
    assert "name=ep_kept" not in str(forward.trace(x, one).jaxpr)
    # Results: tokens, rows and whether they were computed; tokens only; stand-ins for rows, not
    # computed. Then gradients of tokens and their weights, of wi and wo.
    for policy, results in (("no checkpoint", [3, 4]), ("plan", [1, 2, 4])):
        run = jax.jit(functools.partial(scanned, stack, POLICIES[policy]))
        assert [*results_of_calls(run.trace(x, params).jaxpr)] == results, policy


@pytest.mark.parametrize("policy", ["no checkpoint", "plan"])
def test_frozen_experts_take_no_gradient(stack: Any, ways: Ways, policy: str) -> None:
    ways.emulated()
    x, params = draw(TOKENS), stacked(stack)
    trained = functools.partial(scanned, stack, POLICIES[policy])
    _, (want, _) = jax.jit(trained)(x, params)

    def dropped(x: Any, params: Any) -> Any:
        return trained(x, params)[1][0]  # as of an optimizer that skips the experts

    for frozen in (lambda *x: trained(*x, wanted=0)[1], dropped):
        run = jax.jit(frozen)
        jaxpr = run.trace(x, params).jaxpr.jaxpr
        lowered, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # as lowering does
        assert [*results_of_calls(lowered)][-1] == 2
        np.testing.assert_array_equal(run(x, params), want)


def results_of_calls(jaxpr: Any) -> Iterator[int]:
    """Yields the number of results of each call."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ep_unless_unused":
            yield len(eqn.outvars)
        for inner in jax.tree.leaves([*eqn.params.values()], is_leaf=_is_jaxpr):
            if _is_jaxpr(inner) and eqn.primitive.name != "ep_unless_unused":
                yield from results_of_calls(getattr(inner, "jaxpr", inner))


def scans_of(jaxpr: Any) -> list[Any]:
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.fixture(scope="module")
def layers(group: fakes.LocalGroup) -> list[Any]:
    return [group.register_layer(f"layer{i}", top_k=TOP_K, in_flight=2) for i in range(2)]


def test_microbatches_add_up_to_the_batch(
    group: fakes.LocalGroup, layers: list[Any], ways: Ways
) -> None:
    params = [ep.init_moe_params(jax.random.key(i), x, INNER) for i, x in enumerate(layers)]
    sharding = NamedSharding(group.mesh, PartitionSpec(None, "ep"))
    batches = jax.device_put(draw(COUNT, TOKENS), sharding)
    ways.by_ops()
    want = jax.jit(functools.partial(microbatches.at_once, layers))(params, batches)
    ways.emulated()
    run = jax.jit(functools.partial(microbatches.forward_beside_backward, layers))
    got = run(params, batches)
    assert_close(got, want, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, run(params, batches), got)


def test_a_pullback_runs_after_another_forward_twice_or_never(
    layers: list[Any], ways: Ways
) -> None:
    layer = layers[0]
    params, xs = ep.init_moe_params(jax.random.key(0), layer, INNER), draw(3, TOKENS)

    def run(params: Any, xs: Any) -> Any:
        def block(x: Any, params: Any) -> Any:
            return ep.moe(layer, x, params)[0]

        (first, pull), (second, again) = (jax.vjp(block, x, params) for x in xs[:2])
        never, _ = jax.vjp(block, xs[2], params)
        early = pull(jnp.cos(second))
        return first, never, early, again(jnp.cos(first)), pull(jnp.sin(never))

    want, got = ways.both(run, params, xs)
    assert_close(got, want, atol=1e-5)
    # The same eagerly, where every call is a separate program.
    eager = run(params, xs)
    assert_close(jax.device_get(eager), want, atol=1e-5)


def test_a_layer_at_two_depths_beside_one_of_another_group(layers: list[Any], ways: Ways) -> None:
    other = fakes.local_group(
        {"ep": 4}, transport="memfd", num_experts=4, hidden_size=HIDDEN, max_top_k=1
    )
    try:
        each = [layers[0], other.register_layer("moe", top_k=1), layers[0]]
        params = [ep.init_moe_params(jax.random.key(i), x, INNER) for i, x in enumerate(each)]
        params[2] = params[0]

        def loss(params: Any, x: Any) -> Any:
            for layer, own in zip(each, params, strict=True):
                x = x + ep.moe(layer, x, own)[0]
            return jnp.square(x).mean()

        want, got = ways.both(jax.value_and_grad(loss), params, draw(TOKENS))
        assert_close(got, want, atol=1e-5)
    finally:
        other.close()


def test_stages_of_a_pipeline_give_what_each_gives_alone(ways: Ways) -> None:
    settings: Any = {"num_experts": 4, "hidden_size": HIDDEN, "max_top_k": TOP_K}
    group = fakes.local_group({"stage": 2, "ep": 4}, transport="memfd", **settings)
    try:
        layer = group.register_layer("staged", top_k=TOP_K)
        each = [ep.init_moe_params(jax.random.key(i), layer, INNER) for i in range(2)]
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        x = jax.device_put(draw(2, TOKENS), NamedSharding(group.mesh, PartitionSpec("stage", "ep")))

        def stage(x: Any, own: Any) -> Any:
            y, pull = jax.vjp(lambda x, own: ep.moe(layer, x, own)[0], x, own)
            return y, pull(jnp.cos(y))

        want, got = ways.both(jax.vmap(stage, spmd_axis_name="stage"), x, params)
        assert_close(got, want, atol=1e-5)
    finally:
        group.close()


@pytest.mark.parametrize("axes", [{"ep": 1}, {"dp": 2, "ep": 1}], ids=str)
def test_groups_of_one_rank(ways: Ways, axes: dict[str, int]) -> None:
    group = fakes.local_group(axes, transport="memfd", outer_axes=[*axes][:-1], hidden_size=HIDDEN)
    try:
        layer = group.register_layer("moe", top_k=TOP_K)
        params = ep.init_moe_params(jax.random.key(0), layer, INNER)

        def run(x: Any, params: Any) -> Any:
            y, pull = jax.vjp(lambda x, params: ep.moe(layer, x, params)[0], x, params)
            return y, pull(jnp.cos(y))

        want, got = ways.both(run, draw(8), params)
        assert_close(got, want, atol=1e-5)
    finally:
        group.close()


def test_an_exported_program_has_both_passes(layers: list[Any], ways: Ways) -> None:
    ways.emulated()
    params = ep.init_moe_params(jax.random.key(0), layers[0], INNER)

    @jax.jit
    def run(x: Any, params: Any) -> Any:
        y, pull = jax.vjp(lambda x, params: ep.moe(layers[0], x, params)[0], x, params)
        return y, pull(jnp.cos(y))

    sharding = NamedSharding(layers[0].mesh, PartitionSpec("ep"))
    x = jax.device_put(draw(TOKENS), sharding)
    params = jax.device_put(params, NamedSharding(layers[0].mesh, PartitionSpec()))
    made = jax.export.export(run, disabled_checks=ep.export_checks())(x, params)
    loaded = jax.export.deserialize(made.serialize())
    assert_close(jax.jit(loaded.call)(x, params), jax.device_get(run(x, params)), atol=1e-6)


def test_a_plan_that_takes_much_memory_is_made_again(
    stack: Any, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, params = draw(TOKENS), stacked(stack)
    ways.emulated()
    want = jax.jit(functools.partial(scanned, stack, None))(x, params)
    monkeypatch.setattr(ResolvedCall, "plans_again", property(lambda call: True))
    for name in ("no checkpoint", "plan"):
        run = jax.jit(lambda *given, name=name: scanned(stack, POLICIES[name], *given))
        traced = run.trace(x, params)
        assert custom_calls.traced(traced.jaxpr, "cpu")["ep_prepare_v1"] == 2 * COUNT
        sizes = [out.aval.shape for scan in scans_of(traced.jaxpr) for out in scan.outvars]
        of_plans = [shape for shape in sizes if shape[-2:] == (TOKENS // 4, TOP_K)]
        # Arrays that a checkpoint's policy names are stacked, but XLA drops them, as nothing reads
        # them.
        assert len(of_plans) == (0 if name == "no checkpoint" else 2)
        assert_close(run(x, params), jax.device_get(want), atol=1e-6)


def test_plans_are_made_again_where_they_outgrow_tokens(
    make_group: fakes.MakeGroup, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def told(call: ResolvedCall, operands: Any) -> Any:
        seen.append(call.plans_again)
        return operands.tokens, (None, None)

    ways.emulated()
    monkeypatch.setattr(gradient, "block", told)
    for ranks, tokens, spare in ((2, 8192, 0), (8, 8192, 0), (8, 512, 0), (8, 65536, 8)):
        settings = {"num_experts": 64, "hidden_size": 256, "max_tokens_per_rank": tokens}
        group = make_group(axes={"ep": ranks}, spare_experts=spare, **settings)
        layer = group.register_layer("moe", top_k=8)
        params = ep.init_moe_params(jax.random.key(0), layer, INNER)
        x = jax.ShapeDtypeStruct((ranks * tokens, 256), jnp.bfloat16)
        jax.eval_shape(functools.partial(ep.moe, layer), x, params)
    assert seen == [False, True, False, False]


@pytest.fixture(scope="module")
def plain(group: fakes.LocalGroup, layers: list[Any]) -> tuple[Any, Any, Any]:
    """Returns (layers, operands, results of the batch computed at once)."""
    params = [ep.init_moe_params(jax.random.key(i), each, INNER) for i, each in enumerate(layers)]
    sharding = NamedSharding(group.mesh, PartitionSpec(None, "ep"))
    batches = jax.device_put(draw(COUNT, TOKENS), sharding)
    want = jax.jit(functools.partial(microbatches.at_once, layers))(params, batches)
    return layers, (params, batches), jax.device_get(want)


@pytest.mark.parametrize("schedule", microbatches.SCHEDULES, ids=lambda each: each.__name__)
def test_any_order_of_microbatches_adds_up_to_the_batch(
    plain: tuple[Any, Any, Any], schedule: microbatches.Schedule
) -> None:
    layers, operands, want = plain
    run = jax.jit(functools.partial(schedule, layers))
    got = jax.device_get(run(*operands))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(run(*operands)), got)


def test_two_microbatches_in_flight_take_both_handles(plain: tuple[Any, Any, Any]) -> None:
    layers, operands, _ = plain
    run = functools.partial(microbatches.one_forward_one_backward, layers)
    text = jax.jit(run).lower(*operands).as_text()
    handles = [f"handle = {number} : i64" in text for number in (0, 1, 2)]
    assert handles == [True, True, False]
