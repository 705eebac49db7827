"""The block call with weights sharded in every way, in every mode of a mesh, against f64."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_ways import Ways
from dense_moe import Dense, graded, worst_error
from jax.sharding import NamedSharding
from moe_layouts import (
    EXPERTS,
    HIDDEN,
    INNER,
    LAYOUTS,
    TOKENS,
    TOP_K,
    MakeGroup,
    Spec,
    check_layouts,
    make_params,
    open_group,
    place,
)

import ep_runtime as ep
from ep_runtime_client.programs.explain import explain_text

ROWS = 4 * TOKENS * HIDDEN  # bytes of all tokens


@pytest.fixture(autouse=True)
def _by_the_call(ways: Ways) -> None:
    ways.as_users()


def compiled(group: fakes.LocalGroup, x: Any, params: ep.MoEParams, **options: Any) -> Any:
    """One forward and backward of the block."""
    layer = group.register_layer("moe", top_k=TOP_K)
    run = graded(lambda x, p: ep.moe(layer, x, p, aux_loss_coeff=0.1, **options))
    return jax.jit(run).lower(x, params).compile()


def check(got: Any, x: Any, params: ep.MoEParams) -> None:
    check_layouts(got, x, params)
    assert worst_error(got, Dense(TOP_K).graded(x, params)) < 2e-5


@pytest.mark.parametrize("name", [*LAYOUTS][1:])
def test_both_partitionings_give_the_same_values_with_the_collectives_of_the_rules(
    make_group: MakeGroup, name: str
) -> None:
    layout, results = LAYOUTS[name], []
    for partitioning in ("rule", "shard_map"):
        group = open_group(make_group, layout, partitioning=partitioning)
        x, params = place(group, layout, make_params(group.register_layer("first", top_k=TOP_K)))
        known = {"params_spec": layout.specs} if partitioning == "shard_map" else {}
        program = compiled(group, x, params, **known)
        results.append(program(x, params))
        check(results[-1], x, params)
        seen = explain_text(program.as_text())
        assert seen.num_others == 0
        moved = [one for one in seen.collectives if one.cause == "reshard"]
        assert all(one.bytes <= 4 * EXPERTS * HIDDEN // 2 for one in moved)
        # One sum of a device's tokens forward, one backward, beside that of their weights.
        shards = group.spec.world_size // group.spec.axis_sizes.get("tp", 1)
        sizes = {ROWS // shards, (ROWS + 4 * TOKENS * TOP_K) // shards}
        summed = [one for one in seen.collectives if one.kind == "all-reduce"]
        of_tokens = [one.op for one in summed if one.bytes in sizes and "block" in one.op]
        assert of_tokens == (["block", "block_bwd"] if "tp" in layout.axes else [])
        weights = 4 * EXPERTS * HIDDEN * 2 * INNER
        assert not [one for one in seen.collectives if one.bytes > weights]
    for left, right in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["fsdp2 ep2 tp2"])
def test_explicit_axes_tell_how_weights_lie(make_group: MakeGroup, name: str) -> None:
    layout = LAYOUTS[name]
    group = open_group(make_group, layout, explicit=True)
    x, params = place(group, layout, make_params(group.register_layer("first", top_k=TOP_K)))
    with jax.set_mesh(group.mesh):
        program = compiled(group, x, params)
        got = program(x, params)
    check(got, x, params)
    kinds = {one.kind for one in explain_text(program.as_text()).collectives}
    assert kinds <= {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.parametrize("name", ["fsdp2 ep2 tp2", "experts on ep and fsdp"])
def test_a_manual_shard_map_of_the_user_leaves_weights_sharded(
    make_group: MakeGroup, name: str
) -> None:
    layout = LAYOUTS[name]
    group = open_group(make_group, layout)
    layer = group.register_layer("moe", top_k=TOP_K)
    x, params = place(group, layout, make_params(layer))
    specs = layout.specs

    def local(x: Any, params: Any) -> Any:
        return ep.moe(layer, x, params, aux_loss_coeff=0.1, params_spec=specs)

    mapped = jax.shard_map(
        local, mesh=group.mesh, in_specs=(layout.tokens, specs), out_specs=(layout.tokens, Spec())
    )
    got = jax.jit(graded(mapped))(x, params)
    assert worst_error(got, Dense(TOP_K).graded(x, params)) < 2e-5


def test_a_shard_map_over_the_outer_axis_alone(make_group: MakeGroup) -> None:
    layout = LAYOUTS["dp2 ep4"]
    group = open_group(make_group, layout)
    layer = group.register_layer("moe", top_k=TOP_K)
    x, params = place(group, layout, make_params(layer))
    mapped = jax.shard_map(
        lambda x, params: ep.moe(layer, x, params, aux_loss_coeff=0.1),
        mesh=group.mesh,
        axis_names={"dp"},
        in_specs=(Spec("dp"), Spec()),
        out_specs=(Spec("dp"), Spec()),
    )
    got = jax.jit(graded(mapped))(x, params)
    assert worst_error(got, Dense(TOP_K).graded(x, params)) < 2e-5


def test_tensor_parallelism_on_one_weight_alone(make_group: MakeGroup) -> None:
    """wi lies whole on M where wo does not, and the other way round."""
    layout = LAYOUTS["ep4 tp2"]
    group = open_group(make_group, layout)
    for wi, wo in (
        (Spec("ep"), layout.wo),
        (layout.wi, Spec("ep")),
        (Spec("ep", "tp"), Spec("ep")),
    ):
        lies = dataclasses.replace(layout, wi=wi, wo=wo)
        x, params = place(group, lies, make_params(group.register_layer("first", top_k=TOP_K)))
        got = compiled(group, x, params)(x, params)
        assert worst_error(got, Dense(TOP_K).graded(x, params)) < 2e-5


@pytest.mark.parametrize("partitioning", ["rule", "auto"])
def test_a_pair_lies_as_the_one_array_does(make_group: MakeGroup, partitioning: str) -> None:
    layout = LAYOUTS["fsdp2 ep2 tp2"]
    group = open_group(make_group, layout, partitioning=partitioning)
    x, one = place(group, layout, make_params(group.register_layer("first", top_k=TOP_K)))

    def half(array: Any, number: int, *spec: Any) -> Any:
        return jax.device_put(array[..., number, :], NamedSharding(group.mesh, Spec(*spec)))

    wi = tuple(half(one.wi, number, "ep", "fsdp", "tp") for number in (0, 1))
    bias = tuple(half(one.wi_bias, number, "ep", "tp") for number in (0, 1))
    pair = dataclasses.replace(one, wi=wi, wi_bias=bias)
    (want, (_, d_one)), (got, (_, d_pair)) = (
        compiled(group, x, params)(x, params) for params in (one, pair)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for number, each in enumerate(d_pair.wi):
        np.testing.assert_array_equal(each, d_one.wi[..., number, :])
        assert each.sharding.is_equivalent_to(wi[number].sharding, each.ndim)
    np.testing.assert_array_equal(jnp.stack(d_pair.wi_bias, 1), d_one.wi_bias)


@pytest.mark.parametrize("mode", ["rule", "shard_map", "explicit"])
def test_quantized_weights_lie_as_they_do_and_cross_in_bytes(
    make_group: MakeGroup, mode: str
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
    # As near as public ops (0.25): a scale is one of all devices that share an expert's rows.
    assert worst_error(got, Dense(TOP_K).graded(x, params)) < 0.26
    seen = explain_text(program.as_text())
    assert seen.num_others == 0
    gathered = [one for one in seen.collectives if one.kind == "all-gather" and "block" in one.op]
    # A device's experts of both weights, by the axis that is gathered off them.
    whole = EXPERTS // 2 * HIDDEN * INNER
    assert gathered
    assert all(one.bytes <= whole for one in gathered)
