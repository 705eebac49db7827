"""Groups over nodes whose network and windows work at once: the same bits as in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import fakes
import jax
import jax.numpy as jnp
import movement
import numpy as np
import pytest
from test_token_movement import check_case

from ep_runtime import board_records
from ep_runtime_client import ops
from ep_runtime_client.ops import nodes_plan
from ep_runtime_client.ops.calls import Call

MakeGroup = Callable[..., fakes.LocalGroup]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.require_native()
    monkeypatch.setattr(nodes_plan, "MIN_PART_ROWS", 4)


def run(
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
    case: cases.Case,
    overlap: bool,
    **settings: Any,
) -> dict[str, Any]:
    """The case in a group of its own."""
    monkeypatch.setenv("EP_RUNTIME_NCCL_OVERLAP", str(int(overlap)))
    group = make_group(transport="memfd", **(case.group_settings | settings))
    layer = group.register_layer("moe", top_k=case.top_k)
    inputs = movement.inputs_of(case, group.spec, movement.capacity_of(case, layer))
    return movement.run_ops(layer, case, movement.placed(inputs, case, group))


def check_equal(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, case: cases.Case, **settings: Any
) -> int:
    """Both ways of the case agree to the bit; in how many parts rows went."""
    want = run(make_group, monkeypatch, case, False, **settings)
    got = run(make_group, monkeypatch, case, True, **settings)
    for slab, used in enumerate(np.asarray(want["plan"]["group_sizes"]).sum(1)):
        np.testing.assert_array_equal(got["rows"][slab, :used], want["rows"][slab, :used])
    for name in ("row_weights", "out", "d_tokens", "d_weights"):
        if want[name] is not None:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    return int(np.asarray(got["plan"]["chunks"]).max())


def test_parts_give_the_same_bits(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.Case("parts", tokens=11, top_k=4, capacity=40, routing="skewed", dtype="bfloat16")
    assert check_equal(make_group, monkeypatch, case, node_size=4) == 2


@pytest.mark.slow
@pytest.mark.parametrize("node_size", [1, 2, 4])
@pytest.mark.parametrize("routing", ["uniform", "skewed", "silent rank", "none"])
@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_any_routing_gives_the_same_bits(
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    routing: str,
    node_size: int,
) -> None:
    monkeypatch.setattr(nodes_plan, "COUNTED_SHARE", 0.0)
    case = cases.Case("", tokens=18, top_k=3, routing=routing, dtype="bfloat16", hidden=24)
    settings = {"node_size": node_size, "combine_precision": precision}
    assert check_equal(make_group, monkeypatch, case, **settings) == 4


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_movement_in_parts_equals_the_reference(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, case: cases.Case
) -> None:
    monkeypatch.setenv("EP_RUNTIME_NCCL_OVERLAP", "1")
    monkeypatch.setattr(nodes_plan, "COUNTED_SHARE", 0.0)
    monkeypatch.setattr(nodes_plan, "MIN_PART_ROWS", 1)
    check_case(make_group, "memfd/2", case)


def test_rows_that_few_nodes_need_are_counted_still(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_RUNTIME_NCCL_OVERLAP", "1")
    group = make_group(transport="memfd/1", num_experts=16)
    parts = {}
    for top_k in (1, 8):
        layer = group.register_layer(f"top-{top_k}", top_k=top_k)
        idx = jnp.zeros((8 * 16, top_k), jnp.int32)
        plan = jax.eval_shape(lambda idx, layer=layer: ops.prepare(layer, idx), idx)
        parts[top_k] = nodes_plan.plan_parts(Call(plan.meta, group.mesh), 16)
    assert parts == {1: 1, 8: 1}  # of 8 nodes, 8 experts need two thirds
    few = make_group(transport="memfd", node_size=4, num_experts=16)
    layer = few.register_layer("moe", top_k=8)
    plan = jax.eval_shape(lambda idx: ops.prepare(layer, idx), jnp.zeros((8 * 16, 8), jnp.int32))
    assert plan.arrays.recv_count.shape == (8, 4 * 4, 4)


@pytest.mark.slow
def test_the_board_counts_every_row_once(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_RUNTIME_NCCL_OVERLAP", "1")
    group = make_group(transport="memfd/2", axes={"ep": 4}, num_experts=8, max_top_k=2)
    layer = group.register_layer("moe", top_k=2)
    idx = np.tile(np.array([[0, 1]], np.int32), (64, 1))
    sent = ops.dispatch(layer, np.ones((64, 16), np.float32), idx, capacity=40)
    sent.tokens.block_until_ready()
    assert (np.asarray(sent.plan.arrays.chunks) == 4).all()
    assert group.board is not None
    counts = [(r.rows, r.dropped_rows) for r in board_records.read_ranks(group.board, group.spec)]
    assert counts == [(40, 88), (0, 0), (0, 0), (0, 0)]


@pytest.mark.slow
def test_scanned_and_rematerialized_layers_in_parts(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for overlap in ("0", "1"):
        monkeypatch.setenv("EP_RUNTIME_NCCL_OVERLAP", overlap)
        group = make_group(transport="memfd", node_size=4, num_experts=16, max_top_k=4)
        stack = group.register_layer_stack("moe", 3, top_k=4)
        rng = np.random.default_rng(0)
        x = rng.standard_normal((8 * 16, 16)).astype(np.float32)
        idx = rng.integers(0, 16, (8 * 16, 4)).astype(np.int32)

        def loss(x: Any, idx: Any = idx, stack: Any = stack) -> Any:
            @jax.checkpoint
            def body(x: Any, i: Any) -> Any:
                sent = ops.dispatch(stack[i], x, idx)
                return x + 0.1 * ops.combine(stack[i], sent, sent.tokens * x.mean()), None

            return (jax.lax.scan(body, x, jnp.arange(3))[0] ** 2).sum()

        found.append(jax.jit(jax.value_and_grad(loss), donate_argnums=0)(jnp.asarray(x)))
    for one, other in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_array_equal(other, one)
