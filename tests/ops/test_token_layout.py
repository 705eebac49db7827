"""Which layout tokens get, and which ones are refused."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from ep_runtime import specs
from ep_runtime_client.ops.calls import token_layout


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
