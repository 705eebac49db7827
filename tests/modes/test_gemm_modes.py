"""grouped_gemm on Explicit axes, in manual regions, under ambient meshes, with caches, donation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import collectives
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime_client.ops.partitioning import on_mesh, roles
from ep_runtime_client.ops.quantize.formats import recipes

AXES = {"dp": 2, "fsdp": 2, "ep": 2}
SLAB = P(("dp", "fsdp", "ep"))
WEIGHT = P("ep", "fsdp")
SPECS = (SLAB, WEIGHT, P("ep"), SLAB)
DELAYED = recipes.TensorScaling(delayed=True, history=2)


def draw() -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = [(8, 16, 8), (4, 8, 4), (4, 4)]
    arrays: list[Any] = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [*arrays, np.full((8, 2), 8, np.int32)]


def placed(mesh: Any) -> list[Any]:
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(draw(), SPECS, strict=True)]


def value_and_grads(function: Callable[..., Any]) -> Any:
    def loss(lhs: Any, rhs: Any, bias: Any, sizes: Any) -> Any:
        return jnp.sin(function(lhs, rhs, bias, sizes)).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def gemm(layer: Any, **options: Any) -> Callable[..., Any]:
    def run(lhs: Any, rhs: Any, bias: Any, sizes: Any) -> Any:
        return ep.grouped_gemm(lhs, rhs, sizes, bias=bias, layer=layer, **options)

    return run


@pytest.fixture(scope="module")
def wanted() -> Any:
    return jax.jit(value_and_grads(gemm(None)))(*draw())


def check(found: Any, wanted: Any) -> None:
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def layer_of(make_group: MakeGroup, **settings: Any) -> Any:
    defaults = {"outer_axes": ("dp", "fsdp"), "transport": "xla", "num_experts": 4}
    if "mesh" not in settings:
        defaults["axes"] = AXES
    return make_group(**(defaults | settings)).register_layer("moe", top_k=2)


@pytest.mark.parametrize("named", [True, False], ids=["layer", "no layer"])
def test_explicit_axes_type_the_result_and_the_gradients(
    make_group: MakeGroup, wanted: Any, named: bool
) -> None:
    mesh = fakes.mesh_of(AXES, explicit=True)
    layer = layer_of(make_group, mesh=mesh) if named else None
    run = jax.jit(value_and_grads(gemm(layer)))
    found = run(*placed(mesh))
    check(found, wanted)
    assert jax.typeof(found[1][1]).sharding.spec == P("ep", "fsdp", None)
    moved = collectives.count(run.lower(*placed(mesh)).compile())
    assert moved["reduce-scatter", "f32"] == 1
    assert not {kind for kind, _ in moved} - {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.parametrize("tracked", [False, True], ids=["unchecked", "check_vma"])
@pytest.mark.parametrize(
    ("manual", "rhs_spec"),
    [
        pytest.param(("dp", "fsdp", "ep"), WEIGHT, id="all"),
        pytest.param(("dp",), None, id="dp"),
        pytest.param(("dp", "fsdp"), P(None, "fsdp"), id="outer", marks=pytest.mark.slow),
    ],
)
def test_manual_regions_gather_what_rhs_spec_says(
    make_group: MakeGroup, wanted: Any, manual: Any, rhs_spec: Any, tracked: bool
) -> None:
    layer = layer_of(make_group, partitioning="rule")

    def cut(spec: P) -> P:
        entries = ((e,) if isinstance(e, str) else e or () for e in spec)
        return P(*(tuple(a for a in axes if a in manual) or None for axes in entries))

    run = jax.shard_map(
        gemm(layer, rhs_spec=rhs_spec),
        mesh=layer.mesh,
        axis_names=set(manual),
        in_specs=tuple(cut(spec) for spec in SPECS),
        out_specs=cut(SLAB),
        check_vma=tracked,
    )
    check(jax.jit(value_and_grads(run))(*placed(layer.mesh)), wanted)


@pytest.mark.parametrize("partitioning", ["rule", "shard_map"])
def test_eager_ambient_and_unplaced_operands(
    make_group: MakeGroup, wanted: Any, partitioning: str
) -> None:
    layer = layer_of(make_group, partitioning=partitioning)
    run = value_and_grads(gemm(layer))
    check(run(*placed(layer.mesh)), wanted)
    with jax.set_mesh(layer.mesh):
        check(jax.jit(run)(*draw()), wanted)


def test_without_a_layer_the_rule_reads_roles_off_the_operands(wanted: Any) -> None:
    mesh = fakes.mesh_of(AXES)
    compiled = jax.jit(value_and_grads(gemm(None))).lower(*placed(mesh)).compile()
    check(compiled(*placed(mesh)), wanted)
    # Collectives of the weight forward and backward; d_rhs; d_bias, d_rhs summed over dp, the loss.
    assert collectives.count(compiled) == Counter(
        {("all-gather", "f32"): 2, ("reduce-scatter", "f32"): 1, ("all-reduce", "f32"): 3}
    )


def test_auto_takes_the_rule_where_nothing_tells_how_a_weight_lies(make_group: MakeGroup) -> None:
    layer = layer_of(make_group)

    def ruled(layer: Any, operands: Any = None, **options: Any) -> bool:
        operands = placed(layer.mesh) if operands is None else operands
        text = jax.jit(gemm(layer, **options)).lower(*operands).as_text()
        return on_mesh.TARGET in text

    assert ruled(layer)
    assert ruled(layer, recipe=recipes.TensorScaling())
    assert not ruled(layer, rhs_spec=WEIGHT)
    assert not ruled(layer_of(make_group, mesh=fakes.mesh_of(AXES, explicit=True)))
    lhs, rhs, bias, sizes = draw()
    only_ep = layer_of(make_group, axes={"ep": 2}, outer_axes=())
    assert ruled(only_ep, (lhs[:2], rhs, bias, sizes[:2]))


def test_operands_that_are_not_the_layers_are_named_with_sizes(make_group: MakeGroup) -> None:
    layer = layer_of(make_group)
    lhs, rhs, _, sizes = draw()
    twice = np.tile(lhs, (2, 1, 1)), np.tile(sizes, (2, 1))
    wrong = [
        ((lhs[:6], rhs, sizes[:6]), "6 slabs for the 8 shards"),
        # With twice the slabs, group l of slab r would get another expert than (r * L + l) % E.
        ((twice[0], rhs, twice[1]), "lhs has 16 slabs for the 8 shards"),
        ((lhs, np.concatenate([rhs, rhs]), sizes), "rhs has 8 experts, layer 'moe' has 4"),
        ((lhs, rhs, np.tile(sizes, 2)), r"group_sizes must be \[R, 2\] for the 4 experts"),
    ]
    for operands, words in wrong:
        with pytest.raises(ep.InvalidArgumentError, match=words):
            ep.grouped_gemm(*operands, layer=layer)
    with pytest.raises(ep.InvalidArgumentError, match="x has 16 slabs for the 8 shards"):
        ep.grouped_quantize(*twice, recipes.TensorScaling(), layer=layer)


def test_a_mesh_around_that_is_not_the_layers_is_an_error(make_group: MakeGroup) -> None:
    layer = layer_of(make_group)
    lhs, rhs, _, sizes = draw()
    words = r"'moe' is used under a mesh with the axes \{'fsdp': 4, 'ep': 2\}"
    other = fakes.mesh_of({"fsdp": 4, "ep": 2})
    with jax.set_mesh(other), pytest.raises(ep.InvalidArgumentError, match=words):
        ep.grouped_gemm(lhs, rhs, sizes, layer=layer)


def test_scan_over_layers_with_remat_and_donated_weights(make_group: MakeGroup) -> None:
    layer = layer_of(make_group, partitioning="rule")
    lhs, rhs, _, sizes = placed(layer.mesh)
    square = np.stack([np.eye(8, dtype=np.float32)] * 4)
    stack = np.stack([square * 0.5, square * 2.0, square])
    spec = NamedSharding(layer.mesh, P(None, "ep", "fsdp"))

    def loss(stack: Any, lhs: Any, sizes: Any) -> Any:
        def step(rows: Any, kernel: Any) -> Any:
            out = ep.grouped_gemm(rows, kernel, sizes, layer=layer, recipe=recipes.TensorScaling())
            return out, None

        saved = ep.remat_policy(save=("ep_q_x", "ep_q_w"))
        return (jax.lax.scan(jax.checkpoint(step, policy=saved), lhs, stack)[0] ** 2).sum()

    run = jax.jit(jax.value_and_grad(loss), donate_argnums=0)
    value, grad = run(jax.device_put(stack, spec), lhs, sizes)
    assert grad.sharding.is_equivalent_to(spec, 4)
    np.testing.assert_allclose(value, (draw()[0] ** 2).sum(), rtol=0.1)


@pytest.mark.parametrize("recipe", [None, recipes.TensorScaling()], ids=["bf16", "8-bit"])
@pytest.mark.parametrize("partitioning", ["auto", "rule"])
def test_a_weight_of_unknown_layout_leaves_the_process(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture, partitioning: str, recipe: Any
) -> None:
    """Exports as a shard_map, with one warning; a serialized executable is the compiled program."""
    roles.say_once.cache_clear()
    caplog.set_level(logging.WARNING, "ep_runtime")
    layer = layer_of(make_group, partitioning=partitioning)
    lhs, rhs, _, sizes = placed(layer.mesh)

    def step(lhs: Any, rhs: Any, sizes: Any) -> Any:
        def forward(lhs: Any, rhs: Any) -> Any:
            return ep.grouped_gemm(lhs, rhs, sizes, layer=layer, recipe=recipe)

        out, pull = jax.vjp(forward, lhs, rhs)
        return out, *pull(out)

    wanted = jax.jit(step)(lhs, rhs, sizes)
    blob = jax.export.export(jax.jit(step))(lhs, rhs, sizes).serialize()
    exported = jax.jit(jax.export.deserialize(bytearray(blob)).call)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in (lhs, rhs, sizes)
    ]
    compiled = jax.jit(step).lower(*shapes).compile()
    assert collectives.count(compiled)["reduce-scatter", "f32"] == 1
    stored = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(*stored)
    for run in (exported, loaded):
        for got, want in zip(run(lhs, rhs, sizes), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    texts = [r.getMessage() for r in caplog.records if r.name == "ep_runtime"]
    assert len(texts) == 1
    assert "an exported program takes weights of layer 'moe' whole but for ep=2" in texts[0]


def test_an_op_without_a_layer_is_not_exported_for_a_mesh_and_says_so() -> None:
    mesh = fakes.mesh_of(AXES)
    lhs, rhs, _, sizes = placed(mesh)
    run = jax.jit(lambda *args: ep.grouped_gemm(*args))
    with pytest.raises(ep.InvalidArgumentError, match="pass layer=") as caught:
        jax.export.export(run)(lhs, rhs, sizes)
    assert "grouped_gemm needs a mesh to be exported for several devices" in str(caught.value)
    alone = jax.export.export(run)(*draw()[:2], draw()[3])
    np.testing.assert_array_equal(alone.call(*draw()[:2], draw()[3]), run(*draw()[:2], draw()[3]))


@pytest.mark.parametrize("mode", ["rule", "explicit", "explicit experts"])
def test_delayed_histories_are_those_of_all_ranks(make_group: MakeGroup, mode: str) -> None:
    explicit = mode != "rule"
    settings: dict[str, Any] = {} if explicit else {"partitioning": mode}
    mesh = fakes.mesh_of(AXES, explicit=explicit)
    layer = layer_of(make_group, mesh=mesh, **settings)
    state = DELAYED.init_state(4)
    if explicit:
        spread = NamedSharding(mesh, P(None, "ep") if "experts" in mode else P(None, None))
        state = jax.device_put(state, spread)

    @jax.jit
    def step(lhs: Any, rhs: Any, _: Any, sizes: Any, state: Any) -> Any:
        return ep.grouped_gemm(lhs, rhs, sizes, layer=layer, recipe=DELAYED, state=state)

    _, first = step(*placed(mesh), state)
    out, second = step(*placed(mesh), first)
    check_delayed(out, second)
    for old, new in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
        assert not explicit or jax.typeof(new) == jax.typeof(state.x)


@pytest.mark.parametrize("tracked", [False, True], ids=["unchecked", "check_vma"])
@pytest.mark.parametrize(
    ("manual", "weight"),
    [
        pytest.param(("dp", "fsdp", "ep"), WEIGHT, id="all"),
        pytest.param(("dp", "fsdp", "ep"), P(("ep", "fsdp")), id="experts on fsdp"),
        pytest.param(("dp",), P(), id="dp"),
    ],
)
def test_delayed_histories_are_whole_in_manual_regions(
    make_group: MakeGroup, manual: Any, weight: P, tracked: bool
) -> None:
    layer = layer_of(make_group, partitioning="rule")
    slab = P(manual)

    def step(lhs: Any, rhs: Any, sizes: Any, state: Any) -> Any:
        how: Any = {"layer": layer, "rhs_spec": weight, "recipe": DELAYED, "state": state}
        return ep.grouped_gemm(lhs, rhs, sizes, **how)

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=layer.mesh,
            axis_names={*manual},
            in_specs=(slab, weight, slab, P()),
            out_specs=(slab, P()),
            check_vma=tracked,
        )
    )
    lhs, rhs, _, sizes = placed(layer.mesh)
    state = DELAYED.init_state(4)
    for _ in range(2):
        out, state = run(lhs, rhs, sizes, state)
    check_delayed(out, state)


def check_delayed(out: Any, state: Any) -> None:
    """The second of two equal calls."""
    lhs, rhs, _, sizes = draw()
    rows = np.abs(lhs).reshape(4, 2, 2, 8 * 8).max((0, 3)).reshape(4)
    np.testing.assert_array_equal(state.x, [rows] * 2)
    np.testing.assert_array_equal(state.w, [np.abs(rhs).max((1, 2))] * 2)
    exact = ep.grouped_gemm(lhs, rhs, sizes, recipe=recipes.TensorScaling())
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)
