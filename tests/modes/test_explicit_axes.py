"""Explicit axis types, ambient meshes and auto_axes: values, typed results, no collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import fakes
import jax
import numpy as np
import pytest
from fakes import MakeGroup
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

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(axes: dict[str, int], *kinds: AxisType) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod([*axes.values()]))])
    kinds = kinds if len(kinds) > 1 else kinds * len(axes)
    return Mesh(devices.reshape([*axes.values()]), [*axes], axis_types=kinds)


@pytest.fixture
def group_of(make_group: MakeGroup) -> Callable[[str, str], fakes.LocalGroup]:
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


def test_explicit_and_auto_axes_in_one_mesh(make_group: MakeGroup) -> None:
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
        # What is typed with the minor axis alone, JAX itself moves: the rows' tanh, for one.
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
    # Below 0.12 JAX gathers operands and result at the borders of any such region, ours or not.
    assert collectives(run) in ([], ["all-gather"] * 4)
