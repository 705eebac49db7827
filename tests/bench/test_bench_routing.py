"""Bytes and destinations of the bench's routings, against counts one token at a time."""

from __future__ import annotations

import numpy as np
import pytest

from ep_runtime_bench.base import routing

RANKS, TOKENS, EXPERTS, TOP_K = 4, 24, 16, 3


@pytest.fixture(params=routing.ROUTINGS)
def idx(request: pytest.FixtureRequest) -> routing.Ints:
    return routing.topk_idx(request.param, RANKS * TOKENS, EXPERTS, TOP_K)


def rank_of(expert: int) -> int:
    return int(expert) // (EXPERTS // RANKS)


def counted(idx: routing.Ints) -> routing.Ints:
    """Rows from source to rank, counted one by one."""
    rows = np.zeros((RANKS, RANKS), np.int32)
    for number, experts in enumerate(idx):
        for rank in {rank_of(expert) for expert in experts}:
            rows[number // TOKENS, rank] += 1
    return rows


def test_experts_of_a_token_are_distinct_and_there(idx: routing.Ints) -> None:
    assert idx.shape == (RANKS * TOKENS, TOP_K)
    assert idx.dtype == np.int32
    assert idx.min() >= 0
    assert idx.max() < EXPERTS
    assert all(len({*row}) == TOP_K for row in idx.tolist())


def test_rows_are_those_of_a_count_one_by_one(idx: routing.Ints) -> None:
    found = routing.traffic(idx, RANKS, EXPERTS)
    want = counted(idx)
    np.testing.assert_array_equal(found.rows, want)
    assert found.slots == RANKS * TOKENS * TOP_K
    remote = [[0 if a == b else int(want[a, b]) for b in range(RANKS)] for a in range(RANKS)]
    sent = [sum(row) for row in remote]
    received = [sum(column) for column in zip(*remote, strict=True)]
    assert found.remote_rows_per_rank == sum(sent) / RANKS
    assert found.busiest_rows == max(*sent, *received)


def test_the_probe_sends_each_token_once_to_every_rank_that_has_a_row_of_it(
    idx: routing.Ints,
) -> None:
    dst_rank, dst_row = routing.destinations(idx, RANKS, EXPERTS)
    for number, experts in enumerate(idx):
        sent = [rank for rank in dst_rank[number].tolist() if rank >= 0]
        assert sorted(sent) == sorted({rank_of(expert) for expert in experts})
        source = number // TOKENS
        assert [(rank - source - 1) % RANKS for rank in sent] == sorted(
            (rank - source - 1) % RANKS for rank in sent
        )
    # The rows of one source at one rank are 0, 1, ... in token order: none is written twice.
    for source in range(RANKS):
        mine = slice(source * TOKENS, (source + 1) * TOKENS)
        for rank in range(RANKS):
            rows = dst_row[mine][dst_rank[mine] == rank]
            np.testing.assert_array_equal(rows, np.arange(len(rows)))
    np.testing.assert_array_equal(dst_row[dst_rank < 0], -1)


def test_all_to_one_goes_to_rank_0_and_zipf_is_uneven() -> None:
    count = RANKS * TOKENS
    one = routing.traffic(routing.topk_idx("one", count, EXPERTS, TOP_K), RANKS, EXPERTS)
    np.testing.assert_array_equal(one.rows[:, 0], TOKENS)
    assert one.rows[:, 1:].sum() == 0
    assert one.busiest_rows == (RANKS - 1) * TOKENS
    often = {
        name: np.bincount(routing.topk_idx(name, 4000, EXPERTS, TOP_K).ravel()).max()
        for name in ("uniform", "zipf")
    }
    assert often["zipf"] > 2.5 * often["uniform"]
