"""The ops inside programs that users write: grad, remat, loops, donation, shard_map, vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from modes import mode_programs
from modes.mode_programs import assert_close, block, meant, meant_grads

import ep_runtime as ep
from ep_runtime_client.programs.remat import remat_policy

TOKENS, HIDDEN, TOP_K = 64, 16, 2


@pytest.fixture
def group(make_group: MakeGroup, transport: str) -> fakes.LocalGroup:
    return make_group(transport=transport, max_top_k=TOP_K)


draw = functools.partial(mode_programs.draw, tokens=TOKENS)


def loss(layer: Any, x: Any, idx: Any, weights: Any) -> Any:
    return (jnp.sin(block(layer, x, idx, weights))).sum()


def test_eager_calls_and_eager_gradients(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    x, idx, weights = draw()
    assert_close(block(layer, x, idx, weights), meant(x, weights))
    grads = jax.grad(lambda x, w: loss(layer, x, idx, w), argnums=(0, 1))(x, weights)
    assert_close(grads, meant_grads(x, weights))


def test_concrete_arrays_elsewhere_are_moved_and_it_is_said_once(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group(transport="memfd", max_top_k=TOP_K)
    layer = group.register_layer("moe", top_k=TOP_K)
    x, idx, weights = draw()
    on_one_device = jax.device_put(x, jax.devices()[3])
    assert_close(block(layer, on_one_device, idx, weights), meant(x, weights))
    by_hidden = jax.device_put(x, NamedSharding(group.mesh, PartitionSpec(None, "ep")))
    for _ in range(2):
        assert_close(block(layer, by_hidden, idx, weights), meant(x, weights))
    said = [record.getMessage() for record in caplog.records if "resharded" in record.message]
    assert len(said) == 1
    assert "(None, 'ep')" in said[0]
    assert "('ep', None)" in said[0]


def test_scan_over_one_layer_and_over_a_stack(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    stack = group.register_layer_stack("stack", 4, top_k=TOP_K)
    x, idx, weights = draw()

    def scanned(pick: Callable[[Any], Any], x: Any, weights: Any) -> Any:
        def step(x: Any, index: Any) -> Any:
            return block(pick(index), x, idx, weights), None

        return lax.scan(step, x, jnp.arange(4))[0]

    def unrolled(x: Any, weights: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x) * weights.sum(-1, keepdims=True)
        return x

    want = jax.value_and_grad(lambda x, w: unrolled(x, w).sum(), argnums=(0, 1))(x, weights)
    # Programs of the xla transport compile slowly and never read the index: one of the two is
    # enough.
    one, each = (lambda _: layer), (lambda index: stack[index])
    for pick in (one, each) if group.spec.transport == "memfd" else (each,):
        run = jax.jit(
            jax.value_and_grad(lambda x, w, pick=pick: scanned(pick, x, w).sum(), argnums=(0, 1))
        )
        assert_close(run(x, weights), want)
    assert_close(block(stack[3], x, idx, weights), meant(x, weights))


def test_while_cond_and_donation(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    x, idx, weights = draw()

    def looped(x: Any, rounds: Any) -> Any:
        return lax.while_loop(
            lambda state: state[0] < rounds,
            lambda state: (state[0] + 1, block(layer, state[1], idx, weights)),
            (0, x),
        )[1]

    def chosen(x: Any, flag: Any) -> Any:
        return lax.cond(flag, lambda x: block(layer, x, idx, weights), lambda x: x, x)

    twice = meant(meant(x, weights), weights)
    assert_close(jax.jit(looped)(x, 2), twice)
    conditional = jax.jit(chosen)
    assert_close(conditional(x, True), meant(x, weights))
    assert_close(conditional(x, False), x)
    donated = jax.device_put(x, NamedSharding(group.mesh, PartitionSpec("ep")))
    step = jax.jit(lambda x: block(layer, x, idx, weights), donate_argnums=0)
    assert_close(step(step(donated)), twice)


def test_replicated_operands_of_a_manual_region_get_the_sum_of_gradients(
    group: fakes.LocalGroup,
) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    x, idx, weights = draw(tokens=8)

    def local(x: Any, weights: Any) -> Any:
        return lax.psum(block(layer, x, jnp.asarray(idx), weights).sum(), "ep")

    mapped = jax.shard_map(
        local, mesh=group.mesh, in_specs=(PartitionSpec(),) * 2, out_specs=PartitionSpec()
    )
    got = jax.jit(jax.grad(mapped))(x, weights)
    want = 8 * jax.grad(lambda x: (jnp.tanh(x) * weights.sum(-1, keepdims=True)).sum())(x)
    assert_close(got, want)


def test_vmap_is_refused_with_the_reason(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    x, idx, weights = draw()
    batched = np.stack([x, x])
    for run in (
        jax.vmap(lambda x: block(layer, x, idx, weights)),
        jax.vmap(jax.jit(lambda x: block(layer, x, idx, weights))),
        jax.vmap(jax.grad(lambda x: loss(layer, x, idx, weights))),
    ):
        with pytest.raises(NotImplementedError, match="vmap"):
            run(batched)


def count(text: str, target: str) -> int:
    return text.count(f'custom_call_target="{target}"')


def test_remat_keeps_the_plan_and_the_rows_that_the_policy_names(make_group: MakeGroup) -> None:
    """Counts under a scan, because XLA merges a recomputed call with the first in straight code."""
    group = make_group(transport="memfd", max_top_k=TOP_K)
    stack = group.register_layer_stack("stack", 3, top_k=TOP_K)
    x, idx, weights = draw()

    def layers(x: Any, w: Any, policy: Any, index: Any = None) -> Any:
        def step(x: Any, index: Any) -> Any:
            return jnp.sin(block(stack[index], x, idx, w)), None

        return lax.scan(jax.checkpoint(step, policy=policy), x, jnp.arange(3))[0].sum()

    targets = ("ep_prepare_v1", "ep_dispatch_v1", "ep_dispatch_bwd_v1")
    wanted = {(): (2, 2, 1), ("ep_plan",): (1, 2, 1), ("ep_plan", "ep_recv"): (1, 1, 1)}
    results = []
    for save, counts in wanted.items():
        policy = remat_policy(save)
        run = jax.jit(jax.grad(lambda x, w, p=policy: layers(x, w, p), argnums=(0, 1)))
        compiled = run.lower(x, weights).compile()
        assert tuple(count(compiled.as_text(), target) for target in targets) == counts, save
        results.append(compiled(x, weights))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def test_token_movement_causes_no_collectives(make_group: MakeGroup) -> None:
    group = make_group(transport="memfd", axes={"dp": 2, "ep": 4}, outer_axes="dp", max_top_k=TOP_K)
    layer = group.register_layer("moe", top_k=TOP_K)
    x, idx, weights = draw()
    lead_specs = {
        (64,): PartitionSpec(("dp", "ep")),
        (16, 4): PartitionSpec(("dp", "ep")),
        (4, 16): PartitionSpec("dp", "ep"),
        (8, 8): PartitionSpec("ep", "dp"),
        (3, 8): PartitionSpec(None, ("dp", "ep")),
    }
    for lead, spec in lead_specs.items():
        sharding = NamedSharding(group.mesh, spec)
        size = int(np.prod(lead))
        operands = [
            jax.device_put(a[:size].reshape(*lead, -1), sharding) for a in (x, weights, idx)
        ]

        def run(x: Any, w: Any, idx: Any, spec: PartitionSpec = spec) -> Any:
            return jnp.sin(block(layer, x, idx, w, tokens_spec=spec)).sum(-1)

        def grads(x: Any, w: Any, idx: Any, run: Any = run) -> Any:
            out, pull = jax.vjp(lambda x, w: run(x, w, idx), x, w)
            return out, pull(jnp.ones_like(out))

        compiled = jax.jit(grads).lower(*operands).compile()
        text = compiled.as_text()
        assert not [name for name in COLLECTIVES if f" {name}" in text], lead
        assert compiled.output_shardings[1][0].is_equivalent_to(sharding, 3 if lead[1:] else 2)


def test_a_plan_is_reused_and_another_layers_is_refused(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    other = group.register_layer("other", top_k=TOP_K)
    x, idx, weights = draw()

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        plan = ep.prepare(layer, idx)
        first = ep.dispatch(layer, x, None, w, plan=plan)
        second = ep.dispatch(layer, 2 * x, None, plan=plan)
        return (
            ep.combine(layer, first, first.tokens, weights=first.weights),
            ep.combine(layer, second, second.tokens),
        )

    weighted, plain = run(x, weights)
    assert_close(weighted, x * weights.sum(-1, keepdims=True))
    assert_close(plain, 2 * TOP_K * x)
    plan = ep.prepare(layer, idx)
    with pytest.raises(ValueError, match="made for layer 'moe'.*the call is for layer 'other'"):
        ep.dispatch(other, x, None, plan=plan)


def test_one_byte_rows_travel_as_they_are(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=TOP_K)
    x, idx, weights = draw()
    wide = ep.dispatch(layer, x, idx, weights)
    used = np.asarray(wide.weights) > 0
    for dtype in (jnp.int8, jnp.uint8, jnp.float8_e4m3fn, jnp.float8_e5m2):
        narrow = jnp.asarray(x * 10).astype(dtype)
        sent = ep.dispatch(layer, narrow, idx, weights)
        assert sent.tokens.dtype == dtype
        full = np.where(used[..., None], wide.tokens, 0)
        want = np.asarray(jnp.asarray(full * 10).astype(dtype))
        np.testing.assert_array_equal(
            np.asarray(sent.tokens).view(np.uint8)[used], want.view(np.uint8)[used]
        )
    eight = jnp.asarray(x).astype(jnp.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="1-byte tokens"):
        jax.grad(lambda w: ep.dispatch(layer, eight, idx, w).weights.sum())(weights)
