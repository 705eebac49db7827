"""The MoE block under both partitionings, with weights sharded in every way, against f64."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import fakes
import hlo_scan
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_moe import Dense, graded, worst_error
from jax.sharding import NamedSharding
from moe_layouts import (
    CAPACITY,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYOUTS,
    TOKENS,
    TOP_K,
    Spec,
    check_layouts,
    make_params,
    open_group,
    place,
)

import ep_runtime as ep
from ep_runtime_client.moe.api import MoEParams, init_moe_params, moe
from ep_runtime_client.programs.explain import explain_text


def compiled(group: fakes.LocalGroup, x: Any, params: MoEParams, **options: Any) -> Any:
    """Compiles one forward and backward pass of the block."""
    layer = group.register_layer("moe", top_k=TOP_K)
    capacity = options.pop("capacity", CAPACITY)
    run = graded(lambda x, p: moe(layer, x, p, aux_loss_coeff=0.1, capacity=capacity, **options))
    return jax.jit(run).lower(x, params).compile()


@pytest.mark.parametrize("name", ["experts on ep and fsdp", "fsdp2 ep2 tp2"])
def test_both_partitionings_give_the_same_values_with_the_collectives_of_the_rules(
    make_group: fakes.MakeGroup, name: str
) -> None:
    layout, results = LAYOUTS[name], []
    for partitioning in ("rule", "shard_map"):
        group = open_group(make_group, layout, partitioning=partitioning)
        layer = group.register_layer("moe", top_k=TOP_K)
        x, params = place(group, layout, make_params(layer))
        known = {"params_spec": layout.specs} if partitioning == "shard_map" else {}
        program = compiled(group, x, params, **known)
        results.append(program(x, params))
        check_layouts(results[-1], x, params)
        seen = explain_text(program.as_text())
        assert seen.num_others == 0
        # With a known spec of a kernel, its bias counts as replicated: [2, H] are gathered before.
        moved = [one for one in seen.collectives if one.cause == "reshard"]
        assert all(one.bytes <= 4 * EXPERTS * HIDDEN // 2 for one in moved)
        here = TOKENS * layout.axes.get("tp", 1) // group.spec.world_size
        ops = ("block", "block_bwd")
        sums = [one for one in seen.collectives if one.kind == "all-reduce" and one.op in ops]
        tokens = [one.op for one in sums if 0 <= one.bytes - 4 * here * HIDDEN <= 4 * here * TOP_K]
        # One sum of tokens forward, one backward, and no collective on the rows of experts.
        assert tokens == ([*ops] if "tp" in layout.axes else [])
        assert not [one for one in seen.collectives if one.bytes >= 4 * CAPACITY * HIDDEN]
        assert hlo_scan.maps_of(program.as_text(), CAPACITY) == []
    assert worst_error(results[0], Dense(TOP_K).graded(x, params)) < 2e-5
    for left, right in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["fsdp2 ep2 tp2"])
def test_explicit_axes_tell_how_weights_lie(make_group: fakes.MakeGroup, name: str) -> None:
    layout = LAYOUTS[name]
    group = open_group(make_group, layout, explicit=True)
    x, params = place(group, layout, make_params(group.register_layer("first", top_k=TOP_K)))
    with jax.set_mesh(group.mesh):
        program = compiled(group, x, params)
        got = program(x, params)
    check_layouts(got, x, params)
    assert worst_error(got, Dense(TOP_K).graded(x, params)) < 2e-5
    kinds = {one.kind for one in explain_text(program.as_text()).collectives}
    assert kinds <= {"all-gather", "all-reduce", "reduce-scatter"}


# (recipe, partitioning, worst error): e4m3 has 3 fraction bits, and some operands have 2.
RECIPES = {
    "bf16": (ep.recipes.BF16(), "rule", 0.02),
    "block": (ep.recipes.BlockScaling(), "shard_map", 0.13),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_stay_near_f64_and_add_no_pass_over_the_slabs(
    make_group: fakes.MakeGroup, name: str
) -> None:
    recipe, partitioning, tolerance = RECIPES[name]
    layout = LAYOUTS["fsdp2 ep4"]
    settings = {"partitioning": partitioning, "alignment": 32, "hidden_size": 32}
    group = open_group(make_group, layout, **settings)
    layer = group.register_layer("first", top_k=TOP_K)
    x, params = place(group, layout, make_params(layer, mlp_dim=32))
    spec = layout.specs if partitioning == "shard_map" else None
    program = compiled(group, x, params, recipe=recipe, params_spec=spec, capacity=96)
    got = program(x, params)
    assert worst_error(got, Dense(TOP_K).graded(x, params)) < tolerance
    # Before 0.11 XLA itself widens bf16 slabs before a loop that slices them.
    if name != "bf16" or jax.__version_info__ >= (0, 11):
        passes = hlo_scan.maps_of(program.as_text(), 96)
        # Rows that arrive quantized contain their scales: 4 bytes per 128 values.
        assert [line for line in passes if name != "block" or " = u32[96,1" not in line] == []


def test_offload_lists_move_the_values_that_they_name(make_group: fakes.MakeGroup) -> None:
    layout = LAYOUTS["fsdp2 ep4"]
    group = open_group(make_group, layout)
    layer = group.register_layer("moe", top_k=TOP_K)
    x, params = place(group, layout, make_params(layer))

    def loss(x: Any) -> Any:
        recipe = ep.recipes.TensorScaling()
        return moe(layer, x, params, recipe=recipe, capacity=CAPACITY)[0].sum()

    policy = ep.remat_policy(save=("ep_plan",), offload=("ep_wi", "ep_recv"))
    traced = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(x))
    moved = sorted(set(re.findall(r"(\w+)<host>(\[[\d,]*\])", traced)))
    # Dispatched rows, their weights, and the result of the first matmul.
    assert moved == [("f32", "[8,104,16]"), ("f32", "[8,104,2,8]"), ("f32", "[8,104]")]


@pytest.mark.parametrize("name", ["fsdp2 ep2 tp2", "experts on ep and fsdp"])
def test_a_manual_shard_map_of_the_user_leaves_weights_sharded(
    make_group: fakes.MakeGroup, name: str
) -> None:
    layout = LAYOUTS[name]
    group = open_group(make_group, layout)
    layer = group.register_layer("moe", top_k=TOP_K)
    x, params = place(group, layout, make_params(layer))
    specs = layout.specs

    def local(x: Any, params: Any) -> Any:
        return moe(layer, x, params, aux_loss_coeff=0.1, params_spec=specs)

    mapped = jax.shard_map(
        local, mesh=group.mesh, in_specs=(layout.tokens, specs), out_specs=(layout.tokens, Spec())
    )
    got = jax.jit(graded(mapped))(x, params)
    assert worst_error(got, Dense(TOP_K).graded(x, params)) < 2e-5


def test_tensor_parallelism_on_one_weight_alone(make_group: fakes.MakeGroup) -> None:
    """Only one of wi and wo is sharded on M, in both combinations."""
    layout = LAYOUTS["ep4 tp2"]
    group = open_group(make_group, layout)
    for wi, wo in (
        (Spec("ep"), layout.wo),
        (layout.wi, Spec("ep")),
        (Spec("ep", "tp"), Spec("ep")),
    ):
        sharding = dataclasses.replace(layout, wi=wi, wo=wo)
        x, params = place(group, sharding, make_params(group.register_layer("first", top_k=TOP_K)))
        got = compiled(group, x, params)(x, params)
        assert worst_error(got, Dense(TOP_K).graded(x, params)) < 2e-5


@pytest.mark.parametrize("mode", ["rule", "shard_map", "explicit"])
def test_quantized_weights_lie_as_they_do_and_cross_in_bytes(
    make_group: fakes.MakeGroup, mode: str
) -> None:
    layout = LAYOUTS["fsdp2 ep2 tp2"]
    how: Any = {"explicit": True} if mode == "explicit" else {"partitioning": mode}
    group = open_group(make_group, layout, **how)
    x, params = place(group, layout, make_params(group.register_layer("first", top_k=TOP_K)))
    options = {"params_spec": layout.specs} if mode == "shard_map" else {}
    with jax.set_mesh(group.mesh) if mode == "explicit" else contextlib.nullcontext():
        program = compiled(group, x, params, recipe=ep.recipes.TensorScaling(), **options)
        got = program(x, params)
    check_layouts(got, x, params)
    # As near as public ops (0.25): all devices that share an expert's rows have one scale.
    assert worst_error(got, Dense(TOP_K).graded(x, params)) < 0.26
    seen = explain_text(program.as_text())
    assert seen.num_others == 0
    gathered = [one for one in seen.collectives if one.kind == "all-gather" and "block" in one.op]
    # A device's experts of both weights, by the axis over which they are gathered.
    whole = EXPERTS // 2 * HIDDEN * INNER
    assert gathered
    assert all(one.bytes <= whole for one in gathered)


def apart(both: Any) -> tuple[Any, Any]:
    """Splits wi [E, H, 2, M], or its bias, into gate and up."""
    return both[..., 0, :], both[..., 1, :]


def kept_apart(params: MoEParams) -> MoEParams:
    return dataclasses.replace(params, wi=apart(params.wi), wi_bias=apart(params.wi_bias))


PAIRS = dataclasses.replace(
    LAYOUTS["fsdp2 ep2 tp2"], wi=Spec("ep", "fsdp", "tp"), wi_bias=Spec("ep", "tp")
)


@pytest.mark.usefixtures("optimized")  # compares bits of programs, compiled as users do
def test_gate_and_up_kept_apart_give_the_bits_of_the_one_array(
    make_group: fakes.MakeGroup,
) -> None:
    layout = LAYOUTS["fsdp2 ep2 tp2"]
    group = open_group(make_group, layout, partitioning="rule")
    x, one = place(group, layout, make_params(group.register_layer("moe", top_k=TOP_K)))
    specs = dataclasses.replace(PAIRS.specs, wi=(PAIRS.wi,) * 2, wi_bias=(PAIRS.wi_bias,) * 2)
    placed = jax.tree.map(
        lambda array, spec: jax.device_put(array, NamedSharding(group.mesh, spec)),
        kept_apart(one),
        specs,
    )
    found = []
    for params in (one, placed):
        program = compiled(group, x, params, recipe=ep.recipes.TensorScaling())
        assert explain_text(program.as_text()).num_others == 0
        found.append(program(x, params))
    ((y, aux), (d_x, d_one)), (got, (got_x, d_halves)) = found
    jax.tree.map(np.testing.assert_array_equal, (got, got_x), ((y, aux), d_x))
    jax.tree.map(np.testing.assert_array_equal, d_halves, kept_apart(d_one))
    for left, right in zip(d_halves.wi, placed.wi, strict=True):
        assert left.sharding.is_equivalent_to(right.sharding, left.ndim)


def test_what_is_no_pair_of_halves_is_refused_by_name(make_group: fakes.MakeGroup) -> None:
    group = open_group(make_group, LAYOUTS["dp2 ep4"])
    layer = group.register_layer("moe", top_k=TOP_K)
    one = make_params(layer)
    halves, x = kept_apart(one), jnp.zeros((TOKENS, HIDDEN))
    wrong = {
        "wi_bias must both be pairs": dataclasses.replace(halves, wi_bias=one.wi_bias),
        "wi must be [E, H, M]": (halves, {"gated": False}),
        "got float32[8, 8] and float32[8, 7]": dataclasses.replace(
            halves, wi_bias=(halves.wi_bias[0], halves.wi_bias[1][:, 1:])
        ),
        "one spec for gate and up": (
            halves,
            {"params_spec": dataclasses.replace(PAIRS.specs, wi=(Spec("ep"), Spec()))},
        ),
    }
    for words, given in wrong.items():
        params, options = given if isinstance(given, tuple) else (given, {})
        with pytest.raises(ep.InvalidArgumentError, match=re.escape(words)):
            moe(layer, x, params, **options)


def test_rules_place_and_tell_a_pair(make_group: fakes.MakeGroup) -> None:
    layout = LAYOUTS["fsdp2 ep2 tp2"]
    group = open_group(make_group, layout, partitioning="shard_map")
    layer = group.register_layer("moe", top_k=TOP_K)
    rules = ep.sharding.rules("fsdp+ep").on(group.mesh)
    params = init_moe_params(jax.random.key(0), layer, INNER, use_bias=True, separate=True)
    shardings = rules.shardings({"moe": params, "mu": (params, 0 * params.router)}, group.mesh)
    assert shardings["moe"].wi[1].spec == Spec("ep", "fsdp", "tp")
    assert shardings["mu"][0].wi_bias[0].spec == Spec("ep", "tp")
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), params)
    assert rules.shardings(stacked, group.mesh).wi[0].spec == Spec(None, "ep", "fsdp", "tp")
    placed = jax.device_put(params, shardings["moe"])
    x, _ = place(group, layout, make_params(layer))
    program = compiled(group, x, placed, params_spec=rules)
    moved = explain_text(program.as_text()).collectives
    assert not [one for one in moved if one.cause == "reshard" and one.bytes > 4 * EXPERTS * HIDDEN]
    y, want = program(x, placed)[0][0], compiled(group, x, params)(x, params)[0][0]
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
