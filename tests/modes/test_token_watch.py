"""Warns before gathering tokens that are sharded over an axis that their group does not name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import pytest
from fakes import MakeGroup
from jax.sharding import PartitionSpec as P
from mode_programs import EXPERTS, assert_close, draw, grads_of, loss, meant_grads, put

from ep_runtime_client.ops.partitioning import roles

AXES = {"dp": 2, "ep": 2}
WORDS = "tokens of layer 'moe' lie over dp=2"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    roles.say_once.cache_clear()
    caplog.set_level(logging.WARNING, "ep_runtime")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "ep_runtime"]


def operands(make_group: MakeGroup, spec: P, **settings: Any) -> tuple[Any, list[Any]]:
    group = make_group(axes=AXES, transport="xla", num_experts=EXPERTS, **settings)
    return group.register_layer("moe", top_k=2), put(group, spec, *draw())


def test_an_axis_left_out_of_outer_axes_is_said_once(
    make_group: MakeGroup, said: Callable[[], list[str]]
) -> None:
    layer, arrays = operands(make_group, P(("dp", "ep")), max_tokens_per_rank=32)
    grads = grads_of(lambda *args: loss(layer, *args))(*arrays)
    assert_close(grads, meant_grads(*draw()[::2]))
    (text,) = said()
    assert WORDS in text
    assert "outer_axes and ep_axis: ep=2" in text


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (P(("dp", "ep")), {"outer_axes": "dp"}),  # named
        (P("ep"), {"max_tokens_per_rank": 32}),  # replicated over dp, as TP does
    ],
)
def test_tokens_that_lie_as_their_group_says_are_not_mentioned(
    make_group: MakeGroup, said: Callable[[], list[str]], spec: P, settings: Any
) -> None:
    layer, arrays = operands(make_group, spec, **settings)
    jax.jit(lambda *args: loss(layer, *args)).lower(*arrays).compile()
    assert said() == []
