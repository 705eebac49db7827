"""dispatch and combine against the reference, and the layout of their results."""

from __future__ import annotations

from typing import Any

import cases
import jax
import movement
import numpy as np
import pytest
from fakes import MakeGroup
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime import specs
from ep_runtime_client.ops.calls import token_layout


def check_case(make_group: MakeGroup, transport: str, case: cases.Case) -> dict[str, Any]:
    group = make_group(transport=transport, debug=True, **case.group_settings)
    return movement.run_case(case, group)


# Covers each value of each field once, because programs of xla take seconds to compile.
ON_XLA = {
    "top-8",
    "bfloat16 exact",
    "8-bit sums",
    "a rank receives nothing",
    "no tokens",
    "dp x ep",
    "3-D over both dims, crossed",
    "drops",
}
_RUNS = [
    *(
        pytest.param("xla", case, id=f"xla-{case.name}")
        for case in cases.CASES
        if case.name in ON_XLA
    ),
    *(pytest.param("memfd", case, id=f"memfd-{case.name}") for case in cases.CASES),
    *(
        pytest.param(f"memfd/{size}", case, id=f"memfd/{size}-{case.name}", marks=pytest.mark.slow)
        for size in (1, 2, 4)
        for case in cases.CASES
    ),
]


@pytest.mark.parametrize(("transport", "case"), _RUNS, indirect=["transport"])
def test_movement_equals_the_reference(
    make_group: MakeGroup, transport: str, case: cases.Case
) -> None:
    check_case(make_group, transport, case)


def test_float64_and_64_bit_indices_where_jax_has_them(
    make_group: MakeGroup, transport: str
) -> None:
    with jax.enable_x64(True):
        case = cases.Case("f64", dtype="float64", idx_dtype="int64", top_k=3, hidden=9)
        got = check_case(make_group, transport, case)
        assert got["out"].dtype == np.float64


def test_an_index_beyond_the_experts_is_an_unused_slot(
    make_group: MakeGroup, transport: str
) -> None:
    group = make_group(transport=transport, axes={"ep": 2}, num_experts=4, alignment=1)
    layer = group.register_layer("moe", top_k=2)
    beyond = np.int32([[0, 4], [3, 1], [5, 3], [2**31 - 1, 3]])
    prepare = jax.jit(lambda idx: ep.prepare(layer, idx).arrays)
    found, wanted = prepare(beyond), prepare(np.where(beyond < 4, beyond, -1))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.fixture(scope="module")
def group() -> specs.GroupSpec:
    return specs.make_group_spec(
        name="g",
        mesh_axes=(("dp", 2), ("tp", 3), ("ep", 4), ("one", 1)),
        ep_axis="ep",
        outer_axes=("dp", "one"),
        num_experts=8,
        hidden_size=8,
        max_tokens_per_rank=64,
    )


@pytest.mark.parametrize(
    ("lead", "hints", "axes"),
    [
        ((64,), (), (("dp", "one", "ep"),)),
        ((16, 5), (), (("dp", "one", "ep"), ())),
        ((2, 8), (), (("dp", "one"), ("ep",))),
        ((3, 8), (), ((), ("dp", "one", "ep"))),
        ((4, 6), (), (("ep",), ("dp", "one"))),
        ((8, 8), (P("dp", "ep"),), (("dp", "one"), ("ep",))),
        ((8, 8), (P("ep", "dp"),), (("one", "ep"), ("dp",))),
        ((8, 8), (P(None, ("ep", "dp")),), (("one",), ("ep", "dp"))),
        ((8, 8), (P(("ep", "dp")),), (("ep", "one", "dp"), ())),
        ((8, 8), (P(), P("dp", "ep")), (("dp", "one"), ("ep",))),
        ((8, 8), (P("tp"),), (("dp", "one", "ep"), ())),
        ((8, 8), (P(None, "dp"),), (("one", "ep"), ("dp",))),
        ((8, 3), (P(None, "ep"),), (("dp", "one", "ep"), ())),  # the hint does not divide
    ],
)
def test_choice(group: specs.GroupSpec, lead: tuple[int, ...], hints: object, axes: object) -> None:
    layout = token_layout.choose(group, lead, hints)
    assert tuple(tuple(a for a in names if a != "one") for names in layout.axes) == tuple(
        tuple(a for a in names if a != "one") for names in axes
    )
    assert sorted(a for names in layout.axes for a in names) == ["dp", "ep", "one"]
    assert layout.tokens_per_rank * 8 == lead[0] * (lead[1] if len(lead) > 1 else 1)


def test_tokens_that_do_not_divide_name_both_numbers(group: specs.GroupSpec) -> None:
    with pytest.raises(ValueError, match=r"\(60,\).*8 shards.*pad_tokens") as caught:
        token_layout.choose(group, (60,))
    assert caught.value.fields == {"argument": "tokens", "tokens": 60, "shards": 8}
