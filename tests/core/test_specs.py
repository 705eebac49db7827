"""Tests settings of a group at the edges of their ranges."""

from __future__ import annotations

from typing import Any

import pytest

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
