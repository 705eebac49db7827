"""Explicit axes, ambient meshes, regions of the user: values, typed results, no collectives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mode_programs import (
    EXPERTS,
    MESHES,
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

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(axes: dict[str, int], *kinds: AxisType) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod([*axes.values()]))])
    kinds = kinds if len(kinds) > 1 else kinds * len(axes)
    return Mesh(devices.reshape([*axes.values()]), [*axes], axis_types=kinds)


@pytest.fixture
def group_of(make_group: fakes.MakeGroup) -> Callable[[str, str], fakes.LocalGroup]:
    def make(name: str, kind: str) -> fakes.LocalGroup:
        axes, settings, _ = MESHES[name]
        mesh = mesh_of(axes, KINDS[kind])
        return make_group(
            mesh=mesh, transport="memfd", num_experts=EXPERTS, max_tokens_per_rank=32, **settings
        )

    return make


def assert_typed(typed: Any, spec: P) -> None:
    """A type, without trailing Nones, says `spec`."""
    entries = list(typed.sharding.spec)
    assert P(*[e for e in entries if e is not None]) == spec


@pytest.mark.parametrize(
    ("name", "kind", "ambient"),
    [
        *((name, "explicit", True) for name in MESHES),
        ("dp x ep", "explicit", False),
        ("dp x ep", "auto", False),
        ("ep", "auto", True),
    ],
)
def test_values_gradients_types_and_no_collectives(
    group_of: Callable[[str, str], fakes.LocalGroup], name: str, kind: str, ambient: bool
) -> None:
    group, spec = group_of(name, kind), MESHES[name][2]
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = draw()
    operands = put(group, spec, x, idx, weights)
    typed = []

    def forward(x: Any, idx: Any, weights: Any) -> Any:
        typed.append(jax.typeof(block(layer, x, idx, weights)))
        return loss(layer, x, idx, weights)

    scope: AbstractContextManager[Any] = jax.set_mesh(group.mesh) if ambient else nullcontext()
    with scope:
        run = jax.jit(forward).lower(*operands).compile()
        out = run(*operands)
        grads = grads_of(forward).lower(*operands).compile()
        assert_close(out, np.sin(meant(x, weights)))
        assert_close(grads(*operands), meant_grads(x, weights))
        assert collectives(run) + collectives(grads) == []
        for array in (out, *grads(*operands)):
            assert array.sharding.is_equivalent_to(NamedSharding(group.mesh, spec), 2)
        if kind == "explicit" and name != "one device":
            assert_typed(typed[0], spec)
        if kind == "explicit":  # test_programs.py has eager calls on Auto axes
            assert_close(block(layer, x, idx, weights), meant(x, weights))


@pytest.mark.parametrize("kind", KINDS)
def test_three_dims_inside_an_ambient_mesh(
    group_of: Callable[[str, str], fakes.LocalGroup], kind: str
) -> None:
    group = group_of("dp x ep", kind)
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = (a.reshape(4, 8, -1) for a in draw())
    spec = P("ep", "dp") if kind == "explicit" else P("dp", "ep")  # also against the mesh's order
    operands = put(group, spec, x, idx, weights)
    hint = {} if kind == "explicit" else {"tokens_spec": spec}
    with jax.set_mesh(group.mesh):
        run = grads_of(lambda *args: loss(layer, *args, **hint)).lower(*operands).compile()
        assert_close(run(*operands), meant_grads(x, weights))
    assert collectives(run) == []


def test_auto_axes_around_an_op(group_of: Callable[[str, str], fakes.LocalGroup]) -> None:
    group, spec = group_of("dp x ep", "explicit"), MESHES["dp x ep"][2]
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = draw()
    operands = put(group, spec, x, idx, weights)
    wrapped = jax.sharding.auto_axes(
        lambda x, idx, weights: loss(layer, x, idx, weights), out_sharding=spec
    )
    with jax.set_mesh(group.mesh):
        grads = grads_of(wrapped).lower(*operands).compile()
        assert_close(wrapped(*operands), np.sin(meant(x, weights)))
        assert_close(grads(*operands), meant_grads(x, weights))
    assert collectives(grads) == []


def test_explicit_and_auto_axes_in_one_mesh(make_group: fakes.MakeGroup) -> None:
    x, idx, weights = draw()
    for kinds in ((AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)):
        mesh = mesh_of({"dp": 2, "ep": 4}, *kinds)
        group = make_group(mesh=mesh, outer_axes="dp", transport="memfd", num_experts=EXPERTS)
        layer = group.register_layer("moe", top_k=2)
        operands = put(group, P(("dp", "ep")), x, idx, weights)
        with jax.set_mesh(mesh):
            run = jax.jit(lambda *args, layer=layer: loss(layer, *args)).lower(*operands).compile()
            assert_close(run(*operands), np.sin(meant(x, weights)))
            grads = grads_of(lambda *args, layer=layer: loss(layer, *args))
            assert_close(grads(*operands), meant_grads(x, weights))
        # JAX itself moves arrays typed with the minor axis alone: the rows' tanh, for one.
        assert kinds[0] == AxisType.Auto or collectives(run) == []


def test_replicated_operands_are_typed_as_the_layer_lays_them(
    group_of: Callable[[str, str], fakes.LocalGroup],
) -> None:
    group, spec = group_of("dp x ep", "explicit"), MESHES["dp x ep"][2]
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = draw()
    with jax.set_mesh(group.mesh):
        everywhere = put(group, P(), x, idx, weights)
        out = jax.jit(lambda *args: block(layer, *args))(*everywhere)
        assert_close(out, meant(x, weights))
        assert_typed(jax.typeof(out), spec)


def test_inside_a_region_of_an_explicit_mesh(
    group_of: Callable[[str, str], fakes.LocalGroup],
) -> None:
    group, spec = group_of("dp x ep", "explicit"), MESHES["dp x ep"][2]
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = draw()
    operands = put(group, spec, x, idx, weights)
    with jax.set_mesh(group.mesh):
        mapped = jax.shard_map(
            lambda x, idx, weights: loss(layer, x, idx, weights),
            axis_names={"dp"},
            in_specs=P("dp"),
            out_specs=P("dp"),
        )
        run = jax.jit(mapped).lower(*operands).compile()
        assert_close(run(*operands), np.sin(meant(x, weights)))
        assert_close(grads_of(mapped)(*operands), meant_grads(x, weights))
    # Below 0.12 JAX gathers operands and result at the border of any such region.
    assert collectives(run) in ([], ["all-gather"] * 4)


DP_EP = {"axes": {"dp": 2, "ep": 4}, "outer_axes": "dp"}
THREE = {"axes": {"dp": 2, "fsdp": 2, "ep": 2}, "outer_axes": ("dp", "fsdp")}
TP = {"axes": {"dp": 2, "ep": 2, "tp": 2}, "outer_axes": "dp"}
ONE = {"axes": {"dp": 1, "ep": 1}, "outer_axes": "dp", "max_tokens_per_rank": 32}
PAIR = {"axes": {"dp": 2, "a": 2, "b": 2}, "outer_axes": "dp", "ep_axis": ("a", "b")}
# Group settings, manual axes, sharding of the user's specs and of the whole batch, R inside.
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
# Uses JAX's check of values that vary over manual axes.
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
def test_values_and_gradients_in_a_region(make_group: fakes.MakeGroup, name: str) -> None:
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
    # Without the check JAX sums gradients of values that it cannot prove to be replicated.
    assert collectives(grads) == ([] if check or "tp" not in manual else ["all-reduce"])


@pytest.mark.parametrize("name", ["dp manual", "all manual, tp replicated"])
def test_jax_collectives_carry_a_region_too(make_group: fakes.MakeGroup, name: str) -> None:
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
    make_group: fakes.MakeGroup, name: str, check: bool
) -> None:
    """Gradients of replicated and of ep-sharded weights are the same inside and
    outside the region.
    """
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


def test_a_plan_made_outside_serves_inside(make_group: fakes.MakeGroup) -> None:
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


def test_loops_and_remat_inside_a_region(make_group: fakes.MakeGroup) -> None:
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


def test_a_fully_manual_region_without_jit(make_group: fakes.MakeGroup) -> None:
    """A partly manual region needs jit, because JAX 0.10 nests no shard_map outside jit."""
    group = make_group(transport="memfd", num_experts=EXPERTS, **TP)
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = draw()
    _, manual, spec, whole, _ = REGIONS["all manual, tp replicated"]
    mapped = region(group, manual, spec, True, lambda *args: block(layer, *args))
    assert_close(mapped(*put(group, whole, x, idx, weights)), meant(x, weights))


def test_a_region_of_another_mesh_is_refused(make_group: fakes.MakeGroup) -> None:
    group = make_group(transport="xla", num_experts=EXPERTS, **DP_EP)
    layer = group.register_layer("moe", top_k=2)
    other = fakes.mesh_of({"dp": 4, "ep": 2})
    mapped = jax.shard_map(
        lambda *args: block(layer, *args), mesh=other, in_specs=P("dp"), out_specs=P("dp")
    )
    with pytest.raises(ValueError, match=r"mesh with the axes \{'dp': 4, 'ep': 2\}.*'ep': 4"):
        jax.jit(mapped)(*draw())
