"""Inside a shard_map of the user: the op nests one over the axes that are missing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax.sharding import PartitionSpec as P
from mode_programs import (
    EXPERTS,
    assert_close,
    block,
    collectives,
    draw,
    grads_of,
    loss,
    meant,
    meant_grads,
    put,
)

import ep_runtime as ep
from ep_runtime_client.moe.api import init_moe_params, moe

DP_EP = {"axes": {"dp": 2, "ep": 4}, "outer_axes": "dp"}
THREE = {"axes": {"dp": 2, "fsdp": 2, "ep": 2}, "outer_axes": ("dp", "fsdp")}
TP = {"axes": {"dp": 2, "ep": 2, "tp": 2}, "outer_axes": "dp"}
ONE = {"axes": {"dp": 1, "ep": 1}, "outer_axes": "dp", "max_tokens_per_rank": 32}
PAIR = {"axes": {"dp": 2, "a": 2, "b": 2}, "outer_axes": "dp", "ep_axis": ("a", "b")}

# Group settings, manual axes, how the user's specs and the whole batch lie, R inside.
REGIONS = {
    "dp manual": (DP_EP, {"dp"}, P("dp"), P(("dp", "ep")), 4),
    "ep manual": (DP_EP, {"ep"}, P("ep"), P(("ep", "dp")), 2),
    "all manual": (DP_EP, {"dp", "ep"}, P(("dp", "ep")), P(("dp", "ep")), 1),
    "one outer axis manual": (THREE, {"dp"}, P("dp"), P(("dp", "fsdp", "ep")), 4),
    "both outer axes manual": (
        THREE,
        {"dp", "fsdp"},
        P(("dp", "fsdp")),
        P(("dp", "fsdp", "ep")),
        2,
    ),
    "dp manual, tp left": (TP, {"dp"}, P("dp"), P(("dp", "ep")), 2),
    "tp manual alone": (TP, {"tp"}, P(), P(("dp", "ep")), 4),
    "only tp left": (TP, {"dp", "ep"}, P(("dp", "ep")), P(("dp", "ep")), 1),
    "all manual, tp replicated": (TP, {"dp", "ep", "tp"}, P(("dp", "ep")), P(("dp", "ep")), 1),
    "one device, dp manual": (ONE, {"dp"}, P("dp"), P(("dp", "ep")), 1),
    "one device, all manual": (ONE, {"dp", "ep"}, P(("dp", "ep")), P(("dp", "ep")), 1),
    "ep of two axes": (PAIR, {"dp"}, P("dp"), P(("dp", "a", "b")), 4),
    "half of ep manual": (PAIR, {"dp", "a"}, P(("dp", "a")), P(("dp", "a", "b")), 2),
}

# By JAX's check of what varies over manual axes.
UNCHECKED = {
    "ep manual",
    "one outer axis manual",
    "dp manual, tp left",
    "only tp left",
    "one device, dp manual",
    "ep of two axes",
}


def region(
    group: fakes.LocalGroup, manual: set[str], spec: P, check: bool, local: Callable[..., Any]
) -> Callable[..., Any]:
    return jax.shard_map(
        local, mesh=group.mesh, axis_names=manual, in_specs=spec, out_specs=spec, check_vma=check
    )


@pytest.mark.parametrize("name", REGIONS)
def test_values_and_gradients_in_a_region(make_group: MakeGroup, name: str) -> None:
    settings, manual, spec, whole, slabs = REGIONS[name]
    check = name not in UNCHECKED
    group = make_group(transport="memfd", num_experts=EXPERTS, **settings)
    layer = group.register_layer("moe", top_k=2)
    seen = []

    def local(x: Any, idx: Any, weights: Any) -> Any:
        sent = ep.dispatch(layer, x, idx, weights)
        seen.append(sent.tokens.shape[0])
        return loss(layer, x, idx, weights)

    operands = put(group, whole, *draw())
    run = jax.jit(region(group, manual, spec, check, local)).lower(*operands).compile()
    x, _, weights = draw()
    assert_close(run(*operands), np.sin(meant(x, weights)))
    assert set(seen) == {slabs}
    assert collectives(run) == []
    grads = grads_of(region(group, manual, spec, check, local)).lower(*operands).compile()
    assert_close(grads(*operands), meant_grads(x, weights))
    # Without the check JAX sums the gradients of what it cannot know to be replicated.
    assert collectives(grads) == ([] if check or "tp" not in manual else ["all-reduce"])


@pytest.mark.parametrize("name", ["dp manual", "all manual, tp replicated"])
def test_jax_collectives_carry_a_region_too(make_group: MakeGroup, name: str) -> None:
    settings, manual, spec, whole, _ = REGIONS[name]
    group = make_group(transport="xla", num_experts=EXPERTS, **settings)
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = draw()
    run = grads_of(region(group, manual, spec, True, lambda *args: loss(layer, *args)))
    assert_close(run(*put(group, whole, x, idx, weights)), meant_grads(x, weights))


@pytest.mark.parametrize(
    ("name", "check"),
    [("dp manual", True), ("ep manual", False), ("all manual, tp replicated", True)],
)
def test_the_moe_block_and_its_weights_gradients(
    make_group: MakeGroup, name: str, check: bool
) -> None:
    """The region's gradients of replicated and of ep-sharded weights are those of no region."""
    settings, manual, spec, whole, _ = REGIONS[name]
    group = make_group(transport="memfd", num_experts=EXPERTS, **settings)
    layer = group.register_layer("moe", top_k=2)
    params = init_moe_params(jax.random.key(0), layer, 8)
    x = put(group, whole, draw()[0])[0]
    experts = P("ep") if "ep" in manual else P()
    weights = dataclasses.replace(jax.tree.map(lambda _: experts, params), router=P())

    def local(x: Any, params: Any) -> Any:
        y, aux, stats = jax.checkpoint(
            lambda x, p: moe(layer, x, p, aux_loss_coeff=0.1, return_stats=True)
        )(x, params)
        return y, aux, stats.tokens_per_expert

    mapped = jax.shard_map(
        local,
        mesh=group.mesh,
        axis_names=manual,
        in_specs=(spec, weights),
        out_specs=(spec, P(), P()),
        check_vma=check,
    )

    def total(function: Callable[..., Any], x: Any, params: Any) -> Any:
        y, aux, counts = function(x, params)
        return jnp.sin(y).sum() + aux, counts

    both = [
        jax.jit(jax.value_and_grad(functools.partial(total, f), argnums=(0, 1), has_aux=True))
        for f in (mapped, local)
    ]
    assert_close(both[0](x, params), both[1](x, params))


def test_a_plan_made_outside_serves_inside(make_group: MakeGroup) -> None:
    group = make_group(transport="memfd", num_experts=EXPERTS, **DP_EP)
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = put(group, P(("dp", "ep")), *draw())

    def local(x: Any, weights: Any, plan: ep.Plan) -> Any:
        sent = ep.dispatch(layer, x, None, weights, plan=plan)
        return ep.combine(layer, sent, jnp.tanh(sent.tokens), weights=sent.weights)

    for manual in (("dp",), ("dp", "ep")):
        mapped = region(group, {*manual}, P(manual), True, local)
        run = jax.jit(lambda x, idx, w, mapped=mapped: mapped(x, w, ep.prepare(layer, idx)))
        compiled = run.lower(x, idx, weights).compile()
        assert_close(compiled(x, idx, weights), meant(*draw()[::2]))
        assert collectives(compiled) == []


def test_loops_and_remat_inside_a_region(make_group: MakeGroup) -> None:
    group = make_group(transport="memfd", num_experts=EXPERTS, **TP)
    stack = group.register_layer_stack("stack", 3, top_k=2)
    x, idx, weights = draw()

    def local(x: Any, idx: Any, weights: Any) -> Any:
        step = jax.checkpoint(lambda x, i: (block(stack[i], x, idx, weights), None))
        return jax.lax.scan(step, x, jnp.arange(3))[0]

    def unrolled(x: Any, weights: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(x) * weights.sum(-1, keepdims=True)
        return x

    want = jax.grad(lambda x, w: unrolled(x, w).sum(), argnums=(0, 1))(x, weights)
    for manual, spec in (({"dp"}, P("dp")), ({"dp", "ep", "tp"}, P(("dp", "ep")))):
        run = grads_of(region(group, manual, spec, True, local))
        assert_close(run(*put(group, P(("dp", "ep")), x, idx, weights)), want)


def test_a_fully_manual_region_without_jit(make_group: MakeGroup) -> None:
    """A partly manual one needs jit: JAX 0.10 nests no shard_map outside of it."""
    group = make_group(transport="memfd", num_experts=EXPERTS, **TP)
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = draw()
    _, manual, spec, whole, _ = REGIONS["all manual, tp replicated"]
    mapped = region(group, manual, spec, True, lambda *args: block(layer, *args))
    assert_close(mapped(*put(group, whole, x, idx, weights)), meant(x, weights))


def test_a_region_of_another_mesh_is_refused(make_group: MakeGroup) -> None:
    group = make_group(transport="xla", num_experts=EXPERTS, **DP_EP)
    layer = group.register_layer("moe", top_k=2)
    other = fakes.mesh_of({"dp": 4, "ep": 2})
    mapped = jax.shard_map(
        lambda *args: block(layer, *args), mesh=other, in_specs=P("dp"), out_specs=P("dp")
    )
    with pytest.raises(ValueError, match=r"mesh with the axes \{'dp': 4, 'ep': 2\}.*'ep': 4"):
        jax.jit(mapped)(*draw())
