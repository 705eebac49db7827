"""Tests `bench plan` and its routings against counts of one token at a time."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_bench import cli, plan
from ep_runtime_bench.base import routing
from ep_runtime_bench.base.moe_cases import Case
from ep_runtime_bench.base.options import BenchOptions

TOKENS, EXPERTS = 24, 16
SMALL = ("plan", "--nodes", "2", "--gpus-per-node", "4", "--cases", "small-experts")


def options(**settings: Any) -> BenchOptions:
    return BenchOptions(benches=("plan",), transports=("nvlink",), **settings).checked()


def rows_of(cluster: BenchOptions, top_k: int, routed: str) -> plan.Rows:
    case = Case(TOKENS, 64, 32, EXPERTS, top_k)
    call = plan._call(cluster, case, plan._group(cluster, case, "fast"))
    return plan.count(call, routed, ep.Router())


def drawn(ranks: int, top_k: int, routed: str) -> list[list[int]]:
    """Experts of every token, from the logits that `plan.count` draws."""
    rng = np.random.default_rng(0)
    share = routing.share_of(routed, EXPERTS, top_k, rng)
    logits = [routing.logits(rng, share, TOKENS) for _ in range(ranks)]
    return np.argsort(-np.concatenate(logits), axis=1)[:, :top_k].tolist()


@pytest.mark.parametrize("routed", routing.ROUTINGS)
@pytest.mark.parametrize(("nodes", "size"), [(2, 2), (4, 2), (1, 4), (4, 1)])
def test_rows_are_those_of_a_count_one_by_one(nodes: int, size: int, routed: str) -> None:
    ranks, top_k = nodes * size, 2
    wanted = plan.Rows(*(np.zeros(ranks, np.int64) for _ in plan.Rows._fields))
    for number, experts in enumerate(drawn(ranks, top_k, routed)):
        source = number // TOKENS
        on = {expert // (EXPERTS // ranks) for expert in experts}
        for expert in experts:
            wanted.experts[expert // (EXPERTS // ranks)] += 1
        for node in {rank // size for rank in on}:
            peer = node * size + source % size  # spreads the token on that node
            wanted.tokens[peer] += 1
            wanted.to_nodes[source] += peer != source
            wanted.from_nodes[peer] += peer != source
            for rank in {rank for rank in on if rank // size == node}:
                wanted.own[rank] += rank == peer
                wanted.to_ranks[peer] += rank != peer
                wanted.from_ranks[rank] += rank != peer
    found = rows_of(options(nodes=nodes, gpus_per_node=size), top_k, routed)
    for name, want in wanted._asdict().items():
        np.testing.assert_array_equal(getattr(found, name), want, err_msg=name)


def test_all_rows_cross_if_almost_all_are_needed() -> None:
    found = rows_of(options(nodes=2, gpus_per_node=2), 8, "one")
    np.testing.assert_array_equal(found.to_nodes, [TOKENS] * 4)
    np.testing.assert_array_equal(found.from_nodes, [TOKENS] * 4)
    np.testing.assert_array_equal(found.tokens, [2 * TOKENS, 2 * TOKENS, 0, 0])


def test_bytes_of_nvlink_are_those_measured() -> None:
    """Expects GB/s times microseconds of dispatch at T=8192, from the page of results."""
    layer: dict[str, Any] = {"cases": ("deepseek-v3-like",), "tokens_per_rank": 1024}
    for gpus, measured in ((2, 194e9 * 604e-6), (4, 316e9 * 1009e-6)):
        _, links, _ = plan.run(options(nodes=1, gpus_per_node=gpus, **layer))
        forward = next(row for row in links.rows if row["direction"] == "forward")
        assert {row["link"] for row in links.rows} == {"NVLink"}
        np.testing.assert_allclose(8 * forward["sent_mb"] * 1e6, 2 * measured, rtol=0.01)


def test_times_are_those_measured() -> None:
    """The model was fitted to block calls on two H100s; its times stay near those."""
    measured = {"8-layers": 5.33, "deepseek-like": 15.9, "small-experts": 4.65}
    *_, times = plan.run(options(nodes=1, gpus_per_node=2, cases=tuple(measured)))
    found = {row["case"]: row["call_ms"] for row in times.rows}
    np.testing.assert_allclose([found[name] for name in measured], [*measured.values()], rtol=0.02)


def test_a_config_routes_as_its_router_does(tmp_path: Path) -> None:
    """DeepSeek-V3 picks half of its groups of experts for a token; here each group
    is on one node.
    """
    released = json.loads((Path(__file__).parent.parent / "families/released.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(released["DeepSeek-V3"]))
    sent = []
    for layer in ({"config": str(config)}, {"cases": ("deepseek-v3-like",)}):
        _, links, _ = plan.run(options(nodes=8, tokens_per_rank=64, **layer))
        sent.append(links.rows[0]["sent_mb"])
    assert sent[0] < 0.8 * sent[1]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(words))


def test_every_line_says_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--tokens", "64", "--routing", "uniform,zipf") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line]
    headings = [line for line in lines if line.startswith("CASE")]
    assert len(headings) == 3
    assert [line for line in lines if not line.endswith("computed")] == headings


def test_json_has_memory_links_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--tokens", "64", "--precision", "fast,fp8", "--network", "25", "--json")
    assert run(*words) == 0
    found = json.loads(capsys.readouterr().out)
    fast, narrow = found["plan_memory"]
    assert 0 < fast["saved_bytes"] < fast["workspace_bytes"]
    assert fast["window_bytes"] == narrow["window_bytes"]
    sent = {
        (row["precision"], row["link"], row["direction"]): row["sent_mb"]
        for row in found["plan_links"]
    }
    assert len(sent) == 8
    assert sent["fp8", "network", "forward"] < sent["fast", "network", "forward"]
    fast, narrow = found["plan_time"]
    assert fast["network_ms"] == fast["exposed_ms"] > narrow["exposed_ms"]
    assert fast["least_exposed_ms"] == max(0, round(fast["network_ms"] - fast["call_ms"], 2))


@pytest.mark.parametrize(("call_ms", "exposed"), [(100.0, 2.0), (5.0, 3.0), (None, None)])
def test_chunks_expose_the_first_arrival_and_the_last_return(
    call_ms: float | None, exposed: float | None
) -> None:
    rows = plan.Rows(*[np.full(2, 1_000_000)] * 7)
    found = [
        plan.times_of(rows, plan.Sizes(20, 20, 0), call_ms, 12.5, chunks)["exposed_ms"]
        for chunks in (1, 4)
    ]
    assert found == [8.0, exposed]


def test_block_scales_halve_what_crosses_before_the_experts() -> None:
    """Rows are halved in three of the five exchanges."""
    cluster = options(nodes=4, cases=("deepseek-v3-like",), recipes=("none", "fp8", "fp8-block"))
    case = cluster.layers["deepseek-v3-like"]
    call = plan._call(cluster, case, plan._group(cluster, case, "fast"))
    wide, tensor, block = (plan.sizes_of(call, recipe) for recipe in cluster.recipes)
    assert tensor == wide == (2 * 7168, 2 * 7168, 8 * 8)
    assert block == wide._replace(row=7168 + 4 * 56)
    (out, back), (again, _) = plan.network_bytes(block).values()
    assert (out + again) / (3 * wide.row) < 0.55
    assert back == wide.total


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"benches": ("plan", "moe")}, "plan measures nothing and runs alone, got plan,moe"),
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"network": 0.0}, "--network must be finite GB/s over 0, got 0.0"),
        ({"dtype": "float32"}, "--dtype of plan must be of .*, got float32"),
        ({"recipes": ("none", "mxfp8")}, "--recipe of plan must be of .*, got none,mxfp8"),
        ({"recipes": ("fp8",), "dtype": "float16"}, "of .'none',. with --dtype float16, got fp8"),
        ({"nodes": 16}, "must divide the experts of every case, got 128 with 64 of deepseek-like"),
    ],
)
def test_clusters_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        dataclasses.replace(options(cases=("deepseek-like",)), **settings).checked()


RANKS, DRAWN, MOST, TOP_K = 4, 24, 16, 3


@pytest.fixture(params=routing.ROUTINGS)
def idx(request: pytest.FixtureRequest) -> routing.Ints:
    return routing.topk_idx(request.param, RANKS * DRAWN, MOST, TOP_K)


def rank_of(expert: int) -> int:
    return int(expert) // (MOST // RANKS)


def counted(idx: routing.Ints) -> routing.Ints:
    """Counts rows from each source to each rank, one by one."""
    rows = np.zeros((RANKS, RANKS), np.int32)
    for number, experts in enumerate(idx):
        for rank in {rank_of(expert) for expert in experts}:
            rows[number // DRAWN, rank] += 1
    return rows


def test_experts_of_a_token_are_distinct_and_there(idx: routing.Ints) -> None:
    assert idx.shape == (RANKS * DRAWN, TOP_K)
    assert idx.dtype == np.int32
    assert idx.min() >= 0
    assert idx.max() < MOST
    assert all(len({*row}) == TOP_K for row in idx.tolist())


def test_rows_of_a_routing_are_those_of_a_count_one_by_one(idx: routing.Ints) -> None:
    found = routing.traffic(idx, RANKS, MOST)
    want = counted(idx)
    np.testing.assert_array_equal(found.rows, want)
    assert found.slots == RANKS * DRAWN * TOP_K
    remote = [[0 if a == b else int(want[a, b]) for b in range(RANKS)] for a in range(RANKS)]
    sent = [sum(row) for row in remote]
    received = [sum(column) for column in zip(*remote, strict=True)]
    assert found.remote_rows_per_rank == sum(sent) / RANKS
    assert found.busiest_rows == max(*sent, *received)


def test_the_probe_sends_each_token_once_to_every_rank_that_has_a_row_of_it(
    idx: routing.Ints,
) -> None:
    dst_rank, dst_row = routing.destinations(idx, RANKS, MOST)
    for number, experts in enumerate(idx):
        sent = [rank for rank in dst_rank[number].tolist() if rank >= 0]
        assert sorted(sent) == sorted({rank_of(expert) for expert in experts})
        source = number // DRAWN
        assert [(rank - source - 1) % RANKS for rank in sent] == sorted(
            (rank - source - 1) % RANKS for rank in sent
        )
    # The rows of one source at one rank are 0, 1, ... in token order: none is written twice.
    for source in range(RANKS):
        mine = slice(source * DRAWN, (source + 1) * DRAWN)
        for rank in range(RANKS):
            rows = dst_row[mine][dst_rank[mine] == rank]
            np.testing.assert_array_equal(rows, np.arange(len(rows)))
    np.testing.assert_array_equal(dst_row[dst_rank < 0], -1)


def test_all_to_one_goes_to_rank_0_and_zipf_is_uneven() -> None:
    count = RANKS * DRAWN
    one = routing.traffic(routing.topk_idx("one", count, MOST, TOP_K), RANKS, MOST)
    np.testing.assert_array_equal(one.rows[:, 0], DRAWN)
    assert one.rows[:, 1:].sum() == 0
    assert one.busiest_rows == (RANKS - 1) * DRAWN
    often = {
        name: np.bincount(routing.topk_idx(name, 4000, MOST, TOP_K).ravel()).max()
        for name in ("uniform", "zipf")
    }
    assert often["zipf"] > 2.5 * often["uniform"]
