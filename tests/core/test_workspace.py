"""Tests sizes of the workspace: rows, chunks and bytes of block calls."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from block_sizes import random_setting, random_sizes

from ep_runtime import errors, layout, workspace
from ep_runtime.workspace import BlockSizes

# Mixtral-like on 4 ranks; the no-drop worst case is four even shares.
_SIZES = BlockSizes(
    tokens=8192,
    top_k=8,
    ep_size=4,
    experts=16,
    capacity=4 * 8192 * 8 + 16 * 128,
    alignment=128,
    hidden_size=2048,
    mlp_dim=1024,
)


def test_auto_is_one_and_a_half_even_shares() -> None:
    found = workspace.of_block(_SIZES, keep_factor=1.25)
    assert found.rows == 1.5 * 8192 * 8 + 2048  # 16 zones, whose last rows may be empty
    assert found.kept_rows == 1.25 * 8192 * 8 + 2048
    assert found == workspace.of_block(_SIZES, 1.5)
    assert found.part_tokens == (found.rows - 16 * 127) // 32 == 3072
    assert found.parts == 3
    assert found.kept_bytes == found.kept_rows * 2048 * 2


def test_bytes_are_those_of_the_regions() -> None:
    w, p = 1024, 32
    sizes = BlockSizes(
        tokens=100,
        top_k=4,
        ep_size=4,
        experts=4,
        capacity=4096,
        alignment=128,
        hidden_size=512,
        mlp_dim=256,
        gated=True,
    )
    assert (sizes.part_tokens(w), sizes.parts(w)) == (p, 4)
    # Control; three of slots, ranks, tokens, two of rows, two of experts, one number; weights.
    shared = 5120 + 3 * 1024 + 1024 + 1024 + 2 * 4096 + 2 * 1024 + 1024 + 4096
    # The first matmul of gated rows stores only activations, unless its output is saved.
    assert workspace.forward_bytes(sizes, w, 0) == shared + w * 2 * (512 + 256)
    assert workspace.forward_bytes(sizes, w, w) == workspace.forward_bytes(sizes, w, 0)
    plain = dataclasses.replace(sizes, gated=False)
    assert workspace.forward_bytes(plain, w, 0) == shared + w * 2 * (512 + 256 + 256)
    rows = w * 2 * (512 + 512 + 512 + 256 + 256)
    assert workspace.backward_bytes(sizes, w) == shared + 4096 + rows
    # With f32 a copy of H, and of M or N with activations; lines of copies have room for L tiles.
    f32, each = dataclasses.replace(sizes, element_bytes=4), w + 3 * 128
    weight = 4 * 4 * 512 * 512  # the first one, transposed
    rows = w * 4 * (512 + 512 + 512) + weight + each * 4 * 512
    inner = max(w * 256 + each * 256, each * 512) * 4
    assert workspace.backward_bytes(f32, w) == shared + 4096 + rows + inner
    rows = w * 4 * (512 + 256 + 512)
    assert workspace.forward_bytes(f32, w, 0) == shared + weight + rows
    # The worst case has no chunks, and all saved arrays are elsewhere.
    assert workspace.forward_bytes(sizes, 4096, 4096) == 5120 + 4096 * 4 + 4096 * 2 * (512 + 256)


def test_a_factor_over_the_worst_case_is_the_worst_case() -> None:
    for factor in (4.5, workspace.MAX_FACTOR):
        found = workspace.of_block(_SIZES, factor)
        assert (found.rows, found.parts, found.part_tokens) == (_SIZES.capacity, 0, 0)


def test_memory_does_not_grow_with_the_worst_case() -> None:
    worst = [
        workspace.of_block(BlockSizes(**{**vars(_SIZES), "capacity": factor * 65536 + 2048}))
        for factor in (4, 32)
    ]
    assert worst[0] == worst[1]


def test_between_nodes_a_rank_has_the_rows_that_it_has_on_one() -> None:
    """Routing is even; a rank also forwards tokens of one rank of every node, in chunks."""
    nodes = 4
    one = dataclasses.replace(_SIZES, ep_size=_SIZES.ep_size * nodes)
    several = dataclasses.replace(_SIZES, tokens=_SIZES.tokens * nodes, nodes=nodes)
    whole, each = workspace.of_block(one), workspace.of_block(several)
    assert (each.rows, each.kept_rows) == (whole.rows, whole.kept_rows)
    assert each.part_tokens == whole.part_tokens * nodes
    assert each.parts == whole.parts


def test_zones_that_are_not_aligned_are_neither_held_nor_saved() -> None:
    """A rank has 128 experts: zones that end at multiples of 128 rows would take
    447 MiB a layer.
    """
    many = BlockSizes(
        tokens=4096,
        top_k=8,
        ep_size=2,
        experts=128,
        capacity=2 * 4096 * 8 + 128 * 128,
        alignment=workspace.ROW_ALIGNMENT,
        hidden_size=7168,
        mlp_dim=2048,
    )
    assert workspace.of_block(many).kept_bytes == 320 << 20
    aligned = dataclasses.replace(many, alignment=128)
    assert workspace.of_block(aligned).kept_bytes == 447 << 20


def test_nothing_kept_takes_no_memory_between_the_calls() -> None:
    found = workspace.of_block(_SIZES, keep="nothing")
    assert (found.kept_rows, found.kept_bytes) == (0, 0)
    assert found.rows == workspace.of_block(_SIZES).rows


@pytest.mark.parametrize("seed", range(4))
def test_no_part_has_more_rows_than_the_workspace(seed: int) -> None:
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    for sizes in random_sizes(seed):
        found = workspace.of_block(sizes, random_setting(draw))
        assert found.rows <= sizes.capacity
        sums = min(sizes.top_k, sizes.ep_size - 1)
        if found.parts == 0:
            assert found.rows == sizes.capacity
            assert sizes.tokens * sums <= sizes.lane_rows
            continue
        assert found.parts * found.part_tokens >= sizes.tokens
        assert found.part_tokens * sums <= sizes.lane_rows
        if found.rows == sizes.capacity:
            continue
        # All slots go to one rank, over the experts that leave the most zones half empty.
        tokens, k = sizes.ep_size * found.part_tokens, min(sizes.top_k, sizes.experts)
        even = np.bincount(np.arange(tokens * k) % sizes.experts, minlength=sizes.experts)
        first = np.zeros(sizes.experts, np.int64)
        first[:k] = tokens
        chosen = np.argsort(rng.random((min(tokens, 64), sizes.experts)), axis=1)[:, :k]
        odd = np.bincount(chosen.ravel(), minlength=sizes.experts)
        same = np.zeros(sizes.experts, np.int64)
        same[0] = tokens * sizes.top_k  # an expert may be in a token more than once
        for demand in (even, first, odd, same):
            zones = sum(layout.align_up(int(rows), sizes.alignment) for rows in demand)
            assert zones <= found.rows, (sizes, found, demand)


@pytest.mark.parametrize("seed", range(4))
def test_more_bytes_are_never_fewer_rows(seed: int) -> None:
    draw = random.Random(seed)
    for sizes in random_sizes(seed):
        least = min(workspace.largest_bytes(sizes, r) for r in (sizes.least_rows, sizes.capacity))
        limits = sorted(draw.randint(least, 4 * least) for _ in range(8))
        found = [workspace.of_block(sizes, limit) for limit in (least, *limits)]
        assert [f.rows for f in found] == sorted(f.rows for f in found)
        for limit, sized in zip((least, *limits), found, strict=True):
            assert max(sized.forward_bytes, sized.backward_bytes) <= limit
            assert sizes.least_rows <= sized.rows <= sizes.capacity
            larger = layout.align_up(sized.rows + 1, 128)
            if larger < sizes.capacity:
                assert workspace.largest_bytes(sizes, larger) > limit
        with pytest.raises(errors.InvalidArgumentError, match=f"the least is {least}$"):
            workspace.of_block(sizes, least - 1)


@pytest.mark.parametrize(
    "value", [0, -1, 0.0, -0.5, float("nan"), "1.5", "AUTO", "", None, True, False, [1.5], 1j]
)
def test_what_is_no_setting_is_refused_by_name_and_value(value: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        workspace.check_setting(value)
    assert str(caught.value).startswith('workspace must be "auto", a float over 0')
    assert str(caught.value).endswith(f"got {value!r}")
    assert caught.value.fields["argument"] == "workspace"


@pytest.mark.parametrize("value", [1, 2, 4095, 1 << 61])
def test_bytes_that_no_call_fits_are_told_from_a_factor(value: int) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match=rf"workspace={value} is an int.*{value}.0"
    ):
        workspace.check_setting(value)


def test_a_factor_and_bytes_are_never_equal() -> None:
    assert workspace.check_setting(1e9) == workspace.check_setting(float("inf")) == 1024.0
    assert workspace.check_setting(4096) == 4096
    assert type(workspace.check_setting(np.int64(1 << 30))) is int
    assert type(workspace.check_setting(np.float32(1.5))) is float


@pytest.mark.parametrize(
    ("keep", "factor", "words"),
    [
        ("second", 1.25, "keep must be one of .* got 'second'"),
        ("first", 0.0, "keep_factor must be .* got 0.0"),
        ("first", float("nan"), "keep_factor must be .* got nan"),
        ("first", "1.25", "keep_factor must be .* got '1.25'"),
        ("first", True, "keep_factor must be .* got True"),
    ],
)
def test_what_keeps_no_rows_is_refused(keep: str, factor: Any, words: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        workspace.of_block(_SIZES, keep=keep, keep_factor=factor)
