"""`ep.explain` lists the collectives of ops and matmuls with their cause, and those not ours."""

from __future__ import annotations

import dataclasses
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mode_programs import EXPERTS, SPLIT, block, draw, loss, put

import ep_runtime as ep
from ep_runtime_client.ops.tracing.scopes import scope


@pytest.fixture
def group(make_group: MakeGroup) -> fakes.LocalGroup:
    axes = {"dp": 2, "ep": 4}
    return make_group(axes=axes, outer_axes="dp", transport="memfd", num_experts=EXPERTS)


def found(explanation: ep.Explanation) -> list[tuple[str, str, str]]:
    """(kind, op, cause) of every collective, sorted."""
    return sorted((each.kind, each.op, each.cause) for each in explanation.collectives)


def test_tokens_that_lie_right_cause_nothing(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=2)
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(group.mesh, SPLIT))
        for a in draw()
    ]
    seen = ep.explain(lambda *args: loss(layer, *args), *shapes)
    assert seen == ep.Explanation((), 0)
    assert str(seen) == "0 collectives by ep ops, 0 others"


def test_operands_that_lie_elsewhere_are_named_with_the_op(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("blocks/3/moe", top_k=2)
    x, idx, weights = draw()
    rest = put(group, SPLIT, idx, weights)
    by_hidden = put(group, P(None, "ep"), x)
    direct = ep.explain(lambda *args: loss(layer, *args), *by_hidden, *rest)
    # The partitioner may name the reshard after the op that made the operand.
    after = ep.explain(lambda x, *args: loss(layer, jnp.tanh(x) * 2, *args), *by_hidden, *rest)
    assert found(direct) == found(after) == [("all-to-all", "dispatch", "reshard")]
    assert direct.collectives[0].layer == "blocks.3.moe"
    assert direct.collectives[0].bytes == 4 * 16 * 4
    assert "is not sharded as the group needs it" in str(direct)
    crossed = put(group, P(("ep", "dp")), *draw())
    assert found(ep.explain(lambda *args: loss(layer, *args), *crossed)) == [
        ("collective-permute", "dispatch", "reshard"),
        ("collective-permute", "dispatch", "reshard"),
        ("collective-permute", "prepare", "reshard"),
    ]


def test_what_the_user_asks_for_is_not_ours(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=2)
    operands = put(group, SPLIT, *draw())

    def model(x: Any, idx: Any, weights: Any) -> Any:
        return block(layer, x - x.mean(0), idx, weights)

    whole = jax.jit(model, out_shardings=NamedSharding(group.mesh, P()))
    seen = ep.explain(whole, *operands)
    assert seen.collectives == ()
    assert seen.num_others == 2  # the mean over all tokens, and the gather of the result


@pytest.mark.parametrize(
    ("spec", "moves"), [(P("ep"), False), (P(("dp", "ep")), True)], ids=["over ep", "dp in front"]
)
def test_a_training_step(group: fakes.LocalGroup, spec: P, moves: bool) -> None:
    layer = group.register_layer("moe", top_k=2)
    params = ep.init_moe_params(jax.random.key(0), layer, 8)
    spread = jax.tree.map(lambda w: jax.device_put(w, NamedSharding(group.mesh, spec)), params)
    params = dataclasses.replace(spread, router=params.router)

    def total(x: Any, params: Any) -> Any:
        y, aux, stats = ep.moe(layer, x, params, aux_loss_coeff=0.1, return_stats=True)
        return jnp.sin(y).sum() + aux, stats

    step = jax.jit(jax.grad(total, argnums=1, has_aux=True))
    seen = found(ep.explain(step, *put(group, SPLIT, draw()[0]), params))
    sums = {op for kind, op, cause in seen if (kind, cause) == ("all-reduce", "sum")}
    scattered = {op for kind, op, cause in seen if (kind, cause) == ("reduce-scatter", "sum")}
    assert {"block_bwd", "router"} <= sums | scattered
    assert sums <= {"block_bwd", "router", "aux_loss", "stats"}
    moved = [op for _, op, cause in seen if cause == "reshard"]
    assert {*moved} <= {"experts", "block", "block_bwd"}
    assert bool(moved) == moves


def test_the_xla_transport_is_made_of_collectives(make_group: MakeGroup) -> None:
    group = make_group(axes={"ep": 4}, transport="xla", num_experts=EXPERTS)
    layer = group.register_layer("moe", top_k=2)
    seen = ep.explain(lambda *args: block(layer, *args), *put(group, P("ep"), *draw()))
    assert {each.op for each in seen.collectives} == {"prepare", "dispatch", "combine"}
    assert {each.cause for each in seen.collectives} == {"own"}
    assert seen.num_others == 0


AXES = {"dp": 2, "fsdp": 2, "tp": 2, "ep": 1}


def whys(explanation: ep.Explanation, kind: str, cause: str) -> str:
    """The reasons of the collectives of a kind and cause, one per line."""
    named = (e for e in explanation.collectives if (e.kind, e.cause) == (kind, cause))
    return "\n".join(each.why for each in named)


def step(layer: Any, recipe: Any, lhs: Any, rhs: Any, sizes: Any, **options: Any) -> Any:
    """Forward and backward of one grouped_gemm."""

    def forward(lhs: Any, rhs: Any) -> Any:
        return ep.grouped_gemm(lhs, rhs, sizes, layer=layer, recipe=recipe, **options)

    out, pull = jax.vjp(forward, lhs, rhs)
    return out, *pull(out)


def operands(group: fakes.LocalGroup, weight: P) -> list[Any]:
    spec, slab = group.spec, P(group.spec.token_axes)
    shapes = [
        ((spec.num_slabs, 32, 16), jnp.float32, slab),
        ((spec.num_experts, 16, 8), jnp.float32, weight),
        ((spec.num_slabs, spec.experts_per_rank), jnp.int32, slab),
    ]
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(group.mesh, spec))
        for shape, dtype, spec in shapes
    ]


@pytest.mark.parametrize("partitioning", ["rule", "shard_map"])
def test_a_quantized_gemm_names_every_collective(make_group: MakeGroup, partitioning: str) -> None:
    group = make_group(
        axes=AXES,
        outer_axes=("dp", "fsdp"),
        transport="xla",
        partitioning=partitioning,
        num_experts=8,
    )
    layer, weight = group.register_layer("blocks/0", top_k=2), P(None, "fsdp", "tp")
    options = {"rhs_spec": weight} if partitioning == "shard_map" else {}
    recipe = ep.recipes.TensorScaling()
    seen = ep.explain(lambda *args: step(layer, recipe, *args, **options), *operands(group, weight))
    assert seen.num_others == 0
    assert {each.layer for each in seen.collectives} == {"blocks.0"}
    assert set(found(seen)) == {
        ("all-gather", "grouped_gemm", "own"),
        ("all-reduce", "grouped_gemm", "amax"),
        ("all-reduce", "grouped_gemm", "sum"),
        ("all-reduce", "grouped_quantize", "amax"),
        ("reduce-scatter", "grouped_gemm", "sum"),
    }
    assert "gathered over them; these are its 1-byte data" in whys(seen, "all-gather", "own")
    assert "stays sharded" in whys(seen, "reduce-scatter", "sum")
    sums = whys(seen, "all-reduce", "sum").splitlines()
    assert len(sums) == 2  # d_weight over dp, d_rows over tp
    assert all("a weight's over the outer axes" in why for why in sums)
    assert "the largest over the axes" in whys(seen, "all-reduce", "amax")


@pytest.mark.parametrize("partitioning", ["rule", "shard_map"])
def test_processes_on_cpu_add_up_whole_gradients(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, partitioning: str
) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    group = make_group(
        axes={"fsdp": 4, "ep": 2},
        outer_axes="fsdp",
        transport="xla",
        partitioning=partitioning,
        num_experts=16,  # no other test traces it
    )
    layer, weight = group.register_layer("moe", top_k=2), P("ep", "fsdp")
    options = {"rhs_spec": weight} if partitioning == "shard_map" else {}
    seen = ep.explain(lambda *args: step(layer, None, *args, **options), *operands(group, weight))
    assert {*found(seen)} == {
        ("all-gather", "grouped_gemm", "own"),
        ("all-reduce", "grouped_gemm", "sum"),
    }
    assert "a weight's over the outer axes" in whys(seen, "all-reduce", "sum")


@pytest.mark.parametrize(
    ("axes", "weight", "kind", "cause", "why"),
    [
        ({"ep": 2, "tp": 2}, P("ep", "tp"), "all-reduce", "sum", "the contracted dim K'"),
        (
            *({"fsdp": 2, "ep": 2}, P("ep", "fsdp"), "all-gather", "own"),
            "a weight is sharded over outer axes",
        ),
    ],
)
def test_a_product_names_its_only_collective(
    make_group: MakeGroup, axes: dict[str, int], weight: P, kind: str, cause: str, why: str
) -> None:
    outer = "fsdp" if "fsdp" in axes else ()
    group = make_group(axes=axes, outer_axes=outer, transport="xla", num_experts=8)
    layer = group.register_layer("moe", top_k=2)
    seen = ep.explain(lambda *args: ep.grouped_gemm(*args, layer=layer), *operands(group, weight))
    assert found(seen) == [(kind, "grouped_gemm", cause)]
    assert why in str(seen)


def test_matmuls_that_are_alike_have_the_names_of_their_blocks(make_group: MakeGroup) -> None:
    axes = {"fsdp": 2, "ep": 2}
    group = make_group(axes=axes, outer_axes="fsdp", transport="xla", num_experts=8)
    layers = [group.register_layer(f"blocks/{i}", top_k=2) for i in range(2)]

    def forward(lhs: Any, rhs: Any, sizes: Any) -> Any:
        for layer in layers:
            with scope("experts", layer):
                sums = step(layer, ep.recipes.TensorScaling(), lhs, rhs, sizes)[0].sum()
                lhs = lhs + sums
        return lhs

    seen = ep.explain(forward, *operands(group, P("ep", "fsdp")))
    gathers = sorted(each.layer for each in seen.collectives if each.kind == "all-gather")
    assert gathers == ["blocks.0", "blocks.1"]


def test_dense_has_no_layer(make_group: MakeGroup) -> None:
    mesh = fakes.mesh_of({"fsdp": 4, "tp": 2})
    specs = [P("fsdp"), P("fsdp", "tp")]
    x, kernel = (
        jax.device_put(np.ones((16, 16), np.float32), NamedSharding(mesh, spec)) for spec in specs
    )

    def forward_and_back(x: Any, kernel: Any) -> Any:
        y, pull = jax.vjp(lambda x, kernel: ep.dense(x, kernel), x, kernel)
        return y, *pull(y)

    seen = ep.explain(forward_and_back, x, kernel)
    assert {(each.op, each.layer) for each in seen.collectives} == {("dense", "-")}
    assert {(each.kind, each.cause) for each in seen.collectives} == {
        ("all-gather", "own"),
        ("all-reduce", "sum"),
        ("reduce-scatter", "sum"),
    }
    assert seen.num_others == 0
