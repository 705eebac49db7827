"""Tests settings of a group at the edges of their ranges."""

from __future__ import annotations

from typing import Any

import pytest

from ep_runtime import device_layout
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec, make_group_spec


def make_spec(**changes: Any) -> GroupSpec:
    given: dict[str, Any] = {"name": "moe", "mesh_axes": (("ep", 2),), "ep_axis": "ep"}
    given |= {"num_experts": 4, "hidden_size": 64, "max_tokens_per_rank": 8}
    return make_group_spec(**(given | changes))


def test_calls_may_wait_for_any_time_but_none() -> None:
    assert make_spec(op_timeout_s=1e-9).op_timeout_s == 1e-9
    for wrong in (0, 0.0):
        with pytest.raises(InvalidArgumentError, match=r"op_timeout_s must be positive, got 0"):
            make_spec(op_timeout_s=wrong)


@pytest.mark.parametrize(("dtype", "hidden_size"), [("bfloat16", 4), ("float32", 2)])
def test_sums_of_8_bits_may_take_all_that_a_row_takes(dtype: str, hidden_size: int) -> None:
    given = {"combine_precision": "fp8", "max_token_dtype": dtype}
    assert make_spec(**given, hidden_size=hidden_size).combine_precision == "fp8"
    with pytest.raises(InvalidArgumentError, match="takes 8 bytes with scales, a row"):
        make_spec(**given, hidden_size=hidden_size - 1)


LARGE: dict[str, Any] = {
    "mesh_axes": (("dp", 2), ("ep", 4)),
    "num_experts": 64,
    "hidden_size": 2048,
    "max_tokens_per_rank": 2048,
    "max_top_k": 8,
    "transport": "nvlink",
}


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ({}, 16),
        ({"max_tokens_per_rank": 2047}, 0),
        ({"max_tokens_per_rank": 4096, "max_top_k": 4, "workspace": "auto"}, 16),
        ({"workspace": 1.5}, 0),
        ({"workspace": 6 << 30}, 0),
        ({"transport": "xla"}, 0),
        ({"transport": "memfd"}, 0),
        ({"transport": "nccl"}, 0),
        ({"transport": "nccl", "node_size": 2}, 0),
        ({"mesh_axes": (("dp", 8), ("ep", 1)), "max_tokens_per_rank": 65536}, 0),
        ({"hidden_size": 16}, 16),
        ({"hidden_size": 8}, 0),  # a lane lacks room for a chunk of each other rank
        ({"num_experts": 1024, "max_tokens_per_rank": 32768}, 256),
        ({"mesh_axes": (("ep", 8),), "num_experts": 1032, "max_tokens_per_rank": 65536}, 0),
    ],
)
def test_auto_is_a_slot_for_each_expert_if_block_calls_copy_large_ones(
    changes: dict[str, Any], slots: int
) -> None:
    assert make_spec(**LARGE | changes).spare_experts == slots


def test_calls_of_few_rows_and_calls_without_kernels_do_not_spread() -> None:
    least = 16 * 1024
    auto = make_spec(**LARGE | {"max_tokens_per_rank": 8192})
    small = make_spec(**LARGE | {"max_tokens_per_rank": 2047, "spare_experts": 16})
    composed = make_spec(**LARGE | {"spare_experts": 15})
    over_xla = make_spec(**LARGE | {"spare_experts": 16, "transport": "xla"})
    none = make_spec(**LARGE | {"spare_experts": 0})
    alone = make_spec(**LARGE | {"spare_experts": 64, "mesh_axes": (("ep", 1),)})
    for kernels in (False, True):
        for spec in (auto, small, composed, over_xla, none, alone):
            assert not device_layout.spreads(spec, 0, kernels=kernels)
        assert device_layout.spreads(auto, least, kernels=kernels) == kernels
        assert not device_layout.spreads(auto, least - 1, kernels=kernels)
        # Some groups have no larger calls, or only the composed body.
        assert device_layout.spreads(small, 8, kernels=kernels) == kernels
        assert device_layout.spreads(composed, 8, kernels=kernels)
        assert device_layout.spreads(over_xla, 8, kernels=kernels)
        assert not device_layout.spreads(none, least, kernels=kernels)
        assert not device_layout.spreads(alone, least, kernels=kernels)
