"""Features of groups over nodes only; the other tests of movement run on them too."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import fakes
import jax
import jax.numpy as jnp
import movement
import numpy as np
import pytest
from fakes import MakeGroup
from test_token_movement import check_case

import ep_runtime as ep
from ep_runtime import board, board_records, device_layout
from ep_runtime_client.ops.calls.plan import NodePlanArrays
from ep_runtime_client.ops.movement.prepare import call_on
from ep_runtime_client.ops.transports import between_nccl, between_xla, nodes, nodes_plan


def run(make_group: MakeGroup, case: cases.Case, **settings: Any) -> dict[str, Any]:
    """Runs the case in its own group."""
    group = make_group(**(case.group_settings | settings))
    layer = group.register_layer("moe", top_k=case.top_k)
    inputs = movement.inputs_of(case, group.spec, movement.capacity_of(case, layer))
    return movement.run_ops(layer, case, movement.placed(inputs, case, group)) | {"group": group}


def test_a_group_over_nodes_moves_tokens(make_group: MakeGroup) -> None:
    case = cases.Case(
        "drops between nodes", top_k=4, capacity=24, routing="skewed", tokens=5, **cases.DP_EP
    )
    check_case(make_group, "memfd/2", case)


def test_dropped_slots_are_counted_on_the_board(make_group: MakeGroup) -> None:
    counts = []
    for transport in ("memfd", "memfd/2"):
        group = make_group(transport=transport, axes={"ep": 4}, num_experts=8, max_top_k=2)
        layer = group.register_layer("moe", top_k=2)
        idx = np.tile(np.array([[0, 1]], np.int32), (64, 1))
        sent = ep.dispatch(layer, np.ones((64, 16), np.float32), idx, capacity=40)
        sent.tokens.block_until_ready()
        assert group.board is not None
        ranks = board_records.read_ranks(group.board, board.board_layout(group.spec))
        counts.append([(r.rows, r.dropped_rows) for r in ranks])
    assert counts[0] == counts[1] == [(40, 88), (0, 0), (0, 0), (0, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("node_size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slabs_are_those_of_one_node_bit_for_bit(
    make_group: MakeGroup, dtype: str, node_size: int
) -> None:
    """Also with several chunks of tokens, the last of which overlaps the one before."""
    case = cases.Case(
        "chunks", tokens=200, top_k=4, capacity=800, routing="skewed", hidden=24, dtype=dtype
    )
    one = run(make_group, case, transport="memfd")
    got = run(make_group, case, transport="memfd", node_size=node_size)
    for name in movement.SAME_OVER_NODES:
        np.testing.assert_array_equal(got["plan"][name], one["plan"][name], err_msg=name)
    for slab, used in enumerate(np.asarray(one["plan"]["group_sizes"]).sum(1)):
        np.testing.assert_array_equal(got["rows"][slab, :used], one["rows"][slab, :used])
    np.testing.assert_array_equal(got["row_weights"], one["row_weights"])
    tolerance = 1e-6 if dtype == "float32" else 1e-2  # exact: one rounding of the same sum
    for name in ("out", "d_tokens", "d_weights"):
        np.testing.assert_allclose(
            np.asarray(got[name], np.float32),
            np.asarray(one[name], np.float32),
            rtol=tolerance,
            atol=10 * tolerance,
        )
    chunks = np.asarray(got["plan"]["chunks"])
    assert (chunks == chunks[0]).all()
    assert chunks[0] >= 2 if node_size < 8 else chunks[0] == 0


@pytest.mark.parametrize(
    ("ranks", "node_size", "precision", "routing"),
    [(8, 4, "exact", "skewed"), (8, 2, "fast", "unused"), (6, 2, "exact", "skip rank")],
)
def test_sums_of_one_node_after_the_other_have_the_bits_of_all_at_once(
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    node_size: int,
    precision: str,
    routing: str,
) -> None:
    """On GPUs a lane may lack room for the sums of all nodes' tokens."""
    case = dataclasses.replace(
        cases.Case("", tokens=37, top_k=3, routing=routing, precision=precision),
        axes=(("ep", ranks),),
        num_experts=2 * ranks,
    )
    settings = {"transport": "memfd", "node_size": node_size}
    at_once = run(make_group, case, **settings)
    inside = NodePlanArrays.inside.fget
    assert inside is not None
    monkeypatch.setattr(device_layout, "packs", lambda spec, tokens: tokens > 37)
    monkeypatch.setattr(
        NodePlanArrays,
        "inside",
        property(lambda plan: (made := inside(plan))._replace(recv_count=made.recv_count[:, :4])),
    )
    got = run(make_group, case, **settings)
    for name in ("row_weights", "out", "d_tokens", "d_weights"):
        np.testing.assert_array_equal(got[name], at_once[name], err_msg=name)
    one, packed = (np.asarray(x["plan"]["recv_count"]) for x in (at_once, got))
    np.testing.assert_array_equal(packed[..., :4], one)
    # For each source: its staged rows for every rank, then those of the first half of its tokens.
    domains = one.reshape(-1, node_size, node_size, 4)[..., [0, 2]]  # [node, rank, source, half]
    pairs = domains.transpose(0, 2, 3, 1).reshape(-1, 1, node_size, 2 * node_size)
    whole = packed.reshape(-1, node_size, node_size, packed.shape[2])
    np.testing.assert_array_equal(whole[..., 4 : 4 + 2 * node_size], pairs.repeat(node_size, 1))


def rail_counted(call: Any, sent: Any, received: Any, *arrays: Any, rows: int) -> Any:
    """Imitates NCCL's exchange: blocks become packed rows, and back; other rows are NaN."""
    nodes = call.group.num_nodes

    def moved(x: Any) -> Any:
        other = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0
        inside = jnp.arange(rows if x.ndim == 2 else x.shape[1])
        first = jnp.cumsum(sent) - sent
        if x.ndim == 2:
            place = jnp.where(inside < sent[:, None], first[:, None] + inside, len(x))
            return between_xla.rail(call, x.at[place].get(mode="fill", fill_value=other))[0]
        blocks = between_xla.rail(call, jnp.where((inside < sent[:, None])[..., None], x, other))[0]
        first = jnp.cumsum(received) - received
        place = jnp.where(inside < received[:, None], first[:, None] + inside, rows)
        empty = jnp.full((rows, x.shape[2]), other, x.dtype)
        return empty.at[place.reshape(-1)].set(blocks.reshape(nodes * len(inside), -1), mode="drop")

    return tuple(map(moved, arrays))


@pytest.mark.parametrize(
    ("node_size", "precision", "routing"),
    [
        (4, "exact", "skewed"),
        (2, "fp8", "unused"),
        (2, "fast", "skip rank"),
        (1, "fast", "uniform"),
    ],
)
def test_rows_of_own_tokens_that_are_lined_up_have_the_bits_of_blocks(
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
    node_size: int,
    precision: str,
    routing: str,
) -> None:
    """As on GPUs, only the needed rows cross: at most as many as nodes or slots."""
    case = cases.Case("", tokens=37, top_k=3, hidden=24, routing=routing, precision=precision)
    settings = {"transport": "memfd", "node_size": node_size}
    want = run(make_group, case, **settings)
    for module in (nodes_plan, nodes):
        monkeypatch.setattr(module, "counts_rows", lambda call: True)
    monkeypatch.setattr(between_nccl, "rail_counted", rail_counted)
    got = run(make_group, case, **settings)
    for name in ("row_weights", "out", "d_tokens", "d_weights"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "least", "rows"), [(11, 3, 4), (8, 4, 4), (5, 1, 1), (1, 1, 1)])
def test_any_size_of_chunks(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, tokens: int, least: int, rows: int
) -> None:
    """Also if the last chunk starts among rows of the chunk before."""
    monkeypatch.setattr(nodes_plan, "MIN_CHUNK_ROWS", least)
    case = cases.Case("small chunks", tokens=tokens, top_k=3, routing="unused")
    got = check_case(make_group, "memfd/2", case)
    assert nodes_plan.chunk_rows(tokens) == rows
    assert 1 <= np.asarray(got["plan"]["chunks"]).max() <= -(-tokens // rows)


@pytest.mark.slow
def test_all_chunks_may_cross_uncounted(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where the host would wait for every count."""
    monkeypatch.setattr(nodes_plan, "MIN_CHUNK_ROWS", 4)
    for module in (nodes_plan, nodes):
        monkeypatch.setattr(module, "counts_chunks", lambda call: False)
    got = check_case(
        make_group, "memfd/2", cases.Case("all chunks", tokens=11, routing="skip rank")
    )
    assert (np.asarray(got["plan"]["chunks"]) == 1).all()


def test_a_count_of_chunks_that_a_lost_rank_left_ends_the_loop(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_plan, "MIN_CHUNK_ROWS", 4)
    group = make_group(transport="memfd", node_size=4, num_experts=8, max_top_k=2)
    layer = group.register_layer("moe", top_k=2)
    x = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    idx = np.tile(np.array([[0, 5]], np.int32), (64, 1))
    sent = ep.dispatch(layer, x, idx)
    plan = sent.plan
    arrays = plan.arrays._replace(chunks=jnp.full_like(plan.arrays.chunks, 2**31 - 1))
    again = ep.dispatch(layer, x, None, plan=dataclasses.replace(plan, arrays=arrays))
    used = int(np.asarray(sent.group_sizes)[0].sum())
    np.testing.assert_array_equal(again.tokens[0, :used], sent.tokens[0, :used])


def test_gpus_count_chunks_where_a_token_needs_few_of_the_nodes(make_group: MakeGroup) -> None:
    group = make_group(transport="memfd/1", num_experts=16)
    counted = {}
    for top_k in (1, 2, 8):
        layer = group.register_layer(f"top-{top_k}", top_k=top_k)
        idx = jnp.zeros((8, top_k), jnp.int32)
        meta = jax.eval_shape(lambda idx, layer=layer: ep.prepare(layer, idx), idx).meta
        spec = dataclasses.replace(layer.group_spec, transport="nccl")
        for nodes_of in (2, 8):
            on = dataclasses.replace(spec, node_size=8 // nodes_of)
            there = dataclasses.replace(meta, layer=dataclasses.replace(layer, group_spec=on))
            counted[top_k, nodes_of] = nodes_plan.counts_chunks(call_on(there, group.mesh))
    assert counted == {(1, 2): True, (1, 8): True, (2, 2): True, (2, 8): True} | {
        (8, 2): False,
        (8, 8): True,
    }


def test_chunks_are_few_and_even() -> None:
    sizes = {tokens: nodes_plan.chunk_rows(tokens) for tokens in (1, 64, 100, 200, 2048, 8192)}
    assert sizes == {1: 1, 64: 64, 100: 100, 200: 67, 2048: 128, 8192: 512}


@pytest.mark.slow
def test_rows_that_stay_on_their_node_cross_nothing(make_group: MakeGroup) -> None:
    group = make_group(transport="memfd", node_size=4, num_experts=8, max_top_k=2)
    layer = group.register_layer("moe", top_k=2)
    x = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    first = np.repeat(np.arange(2) * 4, 32)  # experts 0-3 and their 32 tokens are on node 0
    idx = np.stack([first, first + 3], 1).astype(np.int32)
    sent = ep.dispatch(layer, x, idx)
    np.testing.assert_allclose(ep.combine(layer, sent, sent.tokens), 2 * x)
    assert (np.asarray(sent.plan.arrays.chunks) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "total"), [("exact", 258.0), ("fast", 256.0)])
def test_sums_of_a_node_cross_unrounded_where_asked(
    make_group: MakeGroup, precision: str, total: float
) -> None:
    """256 + 1 on one node and 1 on the other; bfloat16 holds 256 and 258, but not 257."""
    group = make_group(
        transport="memfd",
        axes={"ep": 4},
        node_size=2,
        num_experts=4,
        max_top_k=3,
        max_token_dtype="bfloat16",
        combine_precision=precision,
    )
    layer = group.register_layer("moe", top_k=3)
    idx = np.broadcast_to(np.array([0, 1, 2], np.int32), (16, 3))
    weights = np.broadcast_to(np.array([256, 1, 1], np.float32), (16, 3))
    sent = ep.dispatch(layer, jnp.ones((16, 16), jnp.bfloat16), idx, weights)
    out = ep.combine(layer, sent, sent.tokens, weights=sent.weights)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), total)


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["uniform", "skewed", "silent rank", "none"])
def test_few_more_rows_cross_the_network_than_must(make_group: MakeGroup, routing: str) -> None:
    case = cases.Case("", tokens=256, top_k=2, routing=routing)
    group = make_group(transport="memfd", node_size=2, **case.group_settings)
    layer = group.register_layer("moe", top_k=2)
    plan = ep.prepare(layer, cases.routing(case, 8).reshape(-1, 2))
    sent, least = nodes_plan.network_rows(call_on(plan.meta, group.mesh), plan.arrays)
    counts = np.zeros((8, 4), int)
    for rank, slots in enumerate(np.asarray(plan.arrays.dst_rank)):
        for slot in slots:
            for node in {r // 2 for r in slot if r >= 0} - {rank // 2}:
                counts[rank, node] += 1
    assert least == counts.sum()
    chunks = -(-counts.max() // nodes_plan.chunk_rows(256))
    assert (np.asarray(plan.arrays.chunks) == chunks).all()
    assert sent == chunks * nodes_plan.chunk_rows(256) * 3 * 8


def test_what_a_node_size_may_be(make_group: MakeGroup) -> None:
    with pytest.raises(ValueError, match="node_size must be 0 or divide the ep size 8, got 3"):
        fakes.specs.make_group_spec(
            name="g",
            mesh_axes=(("ep", 8),),
            ep_axis="ep",
            num_experts=8,
            hidden_size=8,
            max_tokens_per_rank=8,
            node_size=3,
        )
    with pytest.raises(ValueError, match=r"node_size=2 needs a transport of .*, got 'xla'"):
        make_group(transport="xla", node_size=2)
