"""Block calls of groups over nodes: each node makes one call between exchanges with others.

The call of a node is composed of ops here, as everywhere on CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import block_ways
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_ways import Ways, assert_close
from test_block_call import (
    CASES,
    EXPERTS,
    HIDDEN,
    TOP_K,
    check_routings,
    draw,
    graded,
    make_params,
)
from test_node_movement import rail_counted

import ep_runtime as ep
from ep_runtime import device_layout
from ep_runtime_client.moe.bodies import cuda_nodes
from ep_runtime_client.ops.movement.prepare import make_call, make_plan
from ep_runtime_client.ops.transports import between_nccl, nodes, nodes_plan

SENT = 512  # hidden size of rows whose scales fill whole copies
PLAIN = "weights in combine"
CHUNKED = ("weights before wo", "keeps nothing", "biases", "drops")


def make_group(node_size: int, **settings: Any) -> fakes.LocalGroup:
    return fakes.local_group(
        {"dp": 2, "ep": 4},
        transport="memfd",
        node_size=node_size,
        debug=True,
        outer_axes="dp",
        num_experts=EXPERTS,
        max_top_k=TOP_K,
        max_tokens_per_rank=64,
        **{"hidden_size": HIDDEN} | settings,
    )


@pytest.fixture(scope="module")
def layers() -> Iterator[dict[tuple[int, bool], Any]]:
    """Layers by node size, and by whether only the needed rows cross."""
    keys = (1, False), (2, True), (2, False)  # four ranks in all
    groups = {key: make_group(key[0]) for key in keys}
    yield {key: group.register_layer("moe", top_k=TOP_K) for key, group in groups.items()}
    for group in groups.values():
        group.close()


@pytest.fixture(
    params=[pytest.param((1, False), id="1-all rows"), pytest.param((2, True), id="2-counted")]
)
def layer(
    layers: dict[tuple[int, bool], Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    _, counted = request.param
    for module in (nodes_plan, nodes):
        monkeypatch.setattr(module, "counts_chunks", lambda call: counted)
    return layers[request.param]


@pytest.fixture
def by_node(ways: Ways) -> Ways:
    """Each node makes its own calls, as on GPUs."""
    ways.taken = ways.emulated
    return ways


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        *(pytest.param((2, True), name, id=f"2-counted-{name}") for name in CASES if name != PLAIN),
        pytest.param((1, False), PLAIN, id="1-all rows"),
        pytest.param((1, False), "drops", id="1-all rows-drops"),
    ],
    indirect=["layer"],
)
def test_values_and_gradients_are_those_of_the_ops(layer: Any, by_node: Ways, name: str) -> None:
    of_params, options, lead = CASES[name]
    options = {"gated": of_params.get("gated", True), **options}
    params = make_params(layer, **of_params)
    want, got = by_node.both(graded(layer, **options), draw(*lead), params)
    assert_close(got, want)


@pytest.mark.parametrize("layer", [(2, True)], indirect=True, ids=["2-counted"])
def test_any_routing(layer: Any, by_node: Ways) -> None:
    check_routings(layer, by_node)


@pytest.mark.parametrize("precision", ["exact", "fast", "fp8"])
def test_sums_of_a_node_are_as_precise_as_the_group_says(by_node: Ways, precision: str) -> None:
    """Sums cross in f32, in bfloat16 or in 8 bits, with the bits of slabs."""
    group = make_group(2, combine_precision=precision, max_token_dtype="bfloat16")
    layer = group.register_layer("moe", top_k=TOP_K)
    x, params = draw(64).astype(jnp.bfloat16), make_params(layer)
    run = graded(layer, weights_at="hidden", compute_dtype=jnp.bfloat16)
    want, got = by_node.both(run, x, params)
    group.close()
    jax.tree.map(np.testing.assert_array_equal, got[0], want[0])
    np.testing.assert_array_equal(got[1][0], want[1][0])


def in_chunks(count: int, run: Any, *operands: Any) -> Any:
    with block_ways.chunked(count):
        return jax.device_get(jax.jit(lambda *given: run(*given))(*operands))


@pytest.mark.parametrize(
    ("layer", "name", "count"),
    [
        *(pytest.param((2, False), name, 2, id=f"2-{name}") for name in CHUNKED),
        pytest.param((1, False), "drops", 4, id="1-drops"),
        *(
            pytest.param((2, True), name, 4, id=f"2-counted-{name}")
            for name in ("weights before wo", "drops")
        ),
    ],
    indirect=["layer"],
)
def test_chunks_of_tokens_give_the_bits_of_one_call(
    layer: Any,
    by_node: Ways,
    uncached: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    count: int,
) -> None:
    """Gradients of weights add up in another order. Each chunk has one exchange beside it."""
    if nodes_plan.counts_chunks(None):
        for module in (nodes_plan, nodes, cuda_nodes):
            monkeypatch.setattr(module, "counts_rows", lambda call: True)
        monkeypatch.setattr(between_nccl, "rail_counted", rail_counted)
    ran, crossed = [], block_ways.crossed
    monkeypatch.setattr(block_ways, "crossed", lambda *given: ran.append(given) or crossed(*given))
    of_params, options, lead = CASES[name]
    run = graded(layer, gated=of_params.get("gated", True), **options)
    operands = draw(*lead), make_params(layer, **of_params)
    by_node.emulated()
    want = in_chunks(1, run, *operands)
    assert not ran
    got = in_chunks(count, run, *operands)
    assert len(ran) == 2 * count
    jax.tree.map(np.testing.assert_array_equal, got[0], want[0])
    np.testing.assert_array_equal(got[1][0], want[1][0])
    assert_close(got[1][1], want[1][1])


PACKED = ep.recipes.BlockScaling(power_of_two_scales=True, gradient_dtype="float8_e5m2")


@pytest.mark.parametrize(("counted", "use_bias"), [(False, True), (True, False)])
def test_rows_that_are_sent_in_8_bits_cross_the_network_so(
    by_node: Ways, uncached: None, monkeypatch: pytest.MonkeyPatch, counted: bool, use_bias: bool
) -> None:
    """Tokens cross in 8 bits, and so do gradients unless wo has a bias: the
    composed body's bits.
    """
    for module in (nodes_plan, nodes):
        monkeypatch.setattr(module, "counts_chunks", lambda call: counted)
    crossed = []

    def to_nodes(call: Any, plan: Any, *sent: Any) -> Any:
        crossed.append([(x.dtype.name, x.shape[1]) for x in sent if x.shape[1] >= SENT])
        return into(call, plan, *sent)

    into = nodes.to_nodes
    monkeypatch.setattr(nodes, "to_nodes", to_nodes)
    group = make_group(2, hidden_size=SENT, max_token_dtype="bfloat16")
    layer = group.register_layer("moe", top_k=TOP_K)
    x = jax.random.normal(jax.random.key(7), (64, SENT), jnp.bfloat16)
    params = make_params(layer, use_bias=use_bias)
    run = graded(layer, recipe=PACKED, weights_at="output", compute_dtype=jnp.bfloat16)
    by_node.body("composed")
    want = jax.device_get(jax.jit(lambda *given: run(*given))(x, params))
    crossed.clear()
    by_node.emulated()
    got = jax.device_get(jax.jit(lambda *given: run(*given))(x, params))
    group.close()
    packed, wide = ("uint8", SENT + SENT // 32), ("bfloat16", SENT)
    assert crossed == [[packed], [packed, wide if use_bias else packed]]
    jax.tree.map(np.testing.assert_array_equal, got, want)


def most_rows(layer: Any, idx: Any) -> Any:
    call = make_call(layer, fakes.mesh_of({"dp": 2, "ep": 4}), (64,), (), handle=0, capacity=None)
    _, most = jax.jit(lambda idx: make_plan(call, jnp.zeros(1, jnp.int32), idx, most=True))(idx)
    return np.asarray(most)[:, 0]


ONE_EXPERT = jnp.zeros((64, TOP_K), jnp.int32).at[:, 1:].set(-1)


def test_the_number_that_decides_on_parts_is_a_nodes(layer: Any) -> None:
    """Each node goes by its fullest rank; nodes may have different numbers."""
    spec = layer.group_spec
    first = np.arange(spec.ep_size) < spec.ranks_per_node
    rows = 64 // 2  # of one EP group
    want = np.tile(np.where(first, -(-rows // spec.alignment) * spec.alignment, 0), 2)
    np.testing.assert_array_equal(most_rows(layer, ONE_EXPERT), want)


@pytest.mark.parametrize("layer", [(2, True)], indirect=True, ids=["2-counted"])
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_a_node_whose_sums_overflow_a_lane_goes_in_parts(
    layer: Any, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Rank 0 sends rank 1 the sums of 8 tokens, all on its second node. In f32 the two halves of
    the tokens take turns, and a sum needs the room of two rows.
    """
    spec = dataclasses.replace(
        layer.group_spec, combine_precision=precision, max_token_dtype="bfloat16"
    )
    layer = dataclasses.replace(layer, group_spec=spec)
    idx = jnp.where((jnp.arange(64) % 32 < 16)[:, None], -1, ONE_EXPERT)
    fits = most_rows(layer, idx)
    assert fits.max() == 16
    monkeypatch.setattr(device_layout, "packs", lambda spec, tokens: tokens > 8)
    needed = 16 if precision == "exact" else 8
    for rows in (needed, needed - 1):
        monkeypatch.setattr(nodes_plan, "lane_rows", lambda spec, rows=rows: rows)
        overflows = np.tile(np.arange(4) < 2, 2) & (rows < needed)
        want = np.where(overflows, 2**31 - 1, fits)
        np.testing.assert_array_equal(most_rows(layer, idx), want)
