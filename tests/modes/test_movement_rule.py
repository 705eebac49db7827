"""prepare, dispatch and combine by custom_partitioning, beside their shard_map."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cases
import collectives
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.ops.partitioning import on_mesh
from ep_runtime_client.programs.explain import explain_text

AXES = {"dp": 2, "ep": 4}


def draw(lead: tuple[int, ...] = (64,)) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    idx = cases.routing(cases.Case("", tokens=64, num_experts=8), 1)[0].reshape(*lead, -1)
    x = rng.standard_normal((*lead, 16)).astype(np.float32)
    return x, rng.uniform(0.2, 1, (*lead, 2)).astype(np.float32), idx


def block(layer: Any, x: Any, weights: Any, idx: Any) -> Any:
    sent = ep.dispatch(layer, x, idx, weights)
    out = ep.combine(layer, sent, jnp.tanh(sent.tokens), weights=sent.weights)
    return out, sent.group_sizes


def program(layer: Any, *, remat: bool = False) -> Any:
    def loss(*args: Any) -> Any:
        out, sizes = block(layer, *args)
        return jnp.sin(out).sum(), (out, sizes)

    run = jax.checkpoint(loss) if remat else loss
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("transport", "lead"),
    [
        ("memfd", (64,)),
        ("memfd", (8, 8)),
        pytest.param("xla", (64,), marks=pytest.mark.slow),
        pytest.param("memfd/2", (64,), marks=pytest.mark.slow),
    ],
)
def test_rule_and_shard_map_give_the_same_bits(
    make_group: MakeGroup, transport: str, lead: tuple[int, ...]
) -> None:
    results, counts = [], []
    for partitioning in ("rule", "shard_map"):
        group = make_group(
            axes=AXES,
            outer_axes="dp",
            transport=transport,
            num_experts=8,
            partitioning=partitioning,
        )
        layer = group.register_layer("moe", top_k=2)
        spec = PartitionSpec(("dp", "ep")) if len(lead) == 1 else PartitionSpec("dp", "ep")
        placed = [jax.device_put(a, NamedSharding(group.mesh, spec)) for a in draw(lead)]
        run = program(layer)
        # 3-D tracers cannot tell how they lie; the first way that divides is taken.
        compiled = run.lower(*(placed if len(lead) == 1 else draw(lead))).compile()
        custom = on_mesh.TARGET in run.lower(*draw(lead)).as_text()
        assert custom == (partitioning == "rule")
        counts.append(collectives.count(compiled))
        results.append(jax.tree.leaves(run(*placed)))
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)
    assert counts[0] == counts[1]
    if transport == "memfd":
        assert counts[0] == Counter({("all-reduce", "f32"): 1})  # the loss


def test_other_sources_give_a_program_another_key(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule runs after JAX asks its cache, so a program's text must follow from the rule."""
    group = make_group(
        axes=AXES, outer_axes="dp", transport="memfd", num_experts=8, partitioning="rule"
    )
    layer = group.register_layer("moe", top_k=2)
    texts = []
    for digest in "ab":
        monkeypatch.setattr(on_mesh, "_sources", lambda digest=digest: digest)
        jax.clear_caches()  # ops are traced once
        texts.append(program(layer).lower(*draw()).as_text())
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_the_rule_works_under_remat_scan_and_in_explain(make_group: MakeGroup) -> None:
    group = make_group(
        axes=AXES, outer_axes="dp", transport="xla", num_experts=8, partitioning="rule"
    )
    layer = group.register_layer("moe", top_k=2)
    sharding = NamedSharding(group.mesh, PartitionSpec(("dp", "ep")))
    placed = [jax.device_put(a, sharding) for a in draw()]

    def looped(x: Any, weights: Any, idx: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            return block(layer, x, weights, idx)[0], None

        return jnp.sin(jax.lax.scan(jax.checkpoint(step), x, length=2)[0]).sum()

    def unrolled(x: Any, weights: Any, idx: Any) -> Any:
        for _ in range(2):
            x = jnp.tanh(x) * weights.sum(-1, keepdims=True)
        return jnp.sin(x).sum()

    run = jax.jit(jax.value_and_grad(looped, argnums=(0, 1)))
    value, grads = run(*placed)
    wanted, others = jax.value_and_grad(unrolled, argnums=(0, 1))(*draw())
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    for got, want in zip(grads, others, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    found = explain_text(run.lower(*placed).compile().as_text()).collectives
    assert {each.op for each in found} >= {"prepare", "dispatch", "combine"}
    assert {each.layer for each in found} == {"moe"}


def test_a_region_that_is_manual_over_dp_takes_the_shard_map(make_group: MakeGroup) -> None:
    group = make_group(
        axes=AXES, outer_axes="dp", transport="xla", num_experts=8, partitioning="rule"
    )
    layer = group.register_layer("moe", top_k=2)
    outer = PartitionSpec("dp")
    run = jax.shard_map(
        lambda *args: block(layer, *args)[0],
        mesh=group.mesh,
        axis_names={"dp"},
        in_specs=outer,
        out_specs=outer,
        check_vma=False,
    )
    x, weights, idx = draw()
    wanted = np.tanh(x) * weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(jax.jit(run)(x, weights, idx), wanted, rtol=1e-5, atol=1e-6)
