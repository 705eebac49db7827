"""`ep.explain`: collectives by the op that causes them, and what is none of our doing."""

from __future__ import annotations

import dataclasses
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import pytest
from fakes import MakeGroup
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mode_programs import EXPERTS, SPLIT, block, draw, loss, put

import ep_runtime as ep


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
    # The partitioner may name the reshard after what made the operand.
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
