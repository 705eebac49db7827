"""Compares the sizes of slabs with every demand that small groups can have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from ep_runtime import layout


def sizes() -> Iterator[tuple[int, int, int, int, int]]:
    """(ranks, experts of a rank, tokens of a rank, top_k, alignment)."""
    for size in itertools.product((1, 2), (1, 2, 3), (1, 2), (1, 2, 4), (1, 3, 4)):
        if size[3] <= size[0] * size[1]:
            yield size


def largest_demand(ranks: int, experts: int, tokens: int, top_k: int, alignment: int) -> int:
    """Returns the most rows, in aligned zones, that any routing sends to one rank."""
    most = ranks * tokens  # of one expert
    return max(
        sum(layout.align_up(rows, alignment) for rows in demand)
        for demand in itertools.product(range(most + 1), repeat=experts)
        if sum(demand) <= most * min(top_k, experts)
    )


def test_the_bound_holds_what_any_routing_asks_for_and_a_block_more_at_most() -> None:
    for size in sizes():
        ranks, experts, tokens, top_k, alignment = size
        given = {
            "num_experts": ranks * experts,
            "top_k": top_k,
            "max_tokens_per_rank": tokens,
            "ep_size": ranks,
            "alignment": alignment,
        }
        bound, most = layout.recv_capacity(**given), largest_demand(*size)
        assert most <= bound <= most + (alignment if alignment > 1 else 0), size
        factors = (1.0, 1.5, 100.0)
        found = [layout.recv_capacity(**given, capacity_factor=factor) for factor in factors]
        assert found == sorted(found), size
        assert found[-1] == bound, size


def test_rows_are_kept_until_no_block_fits() -> None:
    for alignment, demand in itertools.product((1, 2, 4), itertools.product(range(6), repeat=3)):
        for capacity in range(0, 20, alignment):
            kept = layout.kept_rows(list(demand), capacity, alignment)
            used = sum(layout.align_up(rows, alignment) for rows in kept)
            assert used <= capacity
            for rows, asked in zip(kept, demand, strict=True):
                assert 0 <= rows <= asked
                # Rows that still fit are not dropped.
                assert rows == asked or used + alignment > capacity, (demand, capacity, kept)


def test_every_expert_keeps_its_share_and_the_first_ones_what_is_left() -> None:
    assert layout.kept_rows([9, 1, 9], 11, 1) == [5, 1, 5]
    assert layout.kept_rows([9, 1, 9], 12, 1) == [6, 1, 5]
    assert layout.kept_rows([9, 1, 9], 16, 4) == [8, 1, 4]


@pytest.mark.parametrize(
    ("nodes", "ep_size", "wanted"),
    [
        ("aabb", 4, 2),
        ("aabb", 2, 2),
        ("aaaa", 4, 4),
        ("abab", 4, 1),
        ("aaab", 4, 1),
        ("aaaabb", 6, 2),
        ("aaabbb", 6, 3),
        ("aaaabbbb", 4, 4),
        ("aaaabbbbbbbbaaaa", 8, 4),
        ("aabbaaaa", 4, 2),
        ("aabcaaaa", 4, 1),
    ],
)
def test_ranks_share_windows_in_the_largest_blocks_that_lie_on_one_node(
    nodes: str, ep_size: int, wanted: int
) -> None:
    assert layout.node_size(nodes, ep_size) == wanted
