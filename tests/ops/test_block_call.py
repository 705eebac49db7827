"""The block call against the way of slabs: values, gradients, and what a program keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_ways import Ways

import ep_runtime as ep
from ep_runtime_client.ops.block import takes

HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 8, 3


@pytest.fixture(scope="module")
def group() -> Iterator[fakes.LocalGroup]:
    fakes.require_native()
    made = fakes.local_group(
        {"dp": 2, "ep": 4},
        transport="memfd",
        debug=True,
        outer_axes="dp",
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_top_k=TOP_K,
        max_tokens_per_rank=64,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def layer(group: fakes.LocalGroup) -> Any:
    return group.register_layer("moe", top_k=TOP_K, in_flight=2)


def make_params(layer: Any, **options: Any) -> ep.MoEParams:
    return ep.init_moe_params(jax.random.key(0), layer, INNER, **options)


def draw(*lead: int) -> Any:
    return jax.random.normal(jax.random.key(7), (*lead, HIDDEN))


def graded(layer: Any, **options: Any) -> Callable[..., Any]:
    def run(x: Any, params: Any) -> Any:
        y, pull = jax.vjp(lambda x, p: ep.moe(layer, x, p, **options)[0], x, params)
        return y, pull(jnp.cos(y.astype(jnp.float32)).astype(y.dtype))

    return run


def assert_close(got: Any, want: Any, rtol: float = 2e-6) -> None:
    """Every leaf is `want`'s within f32 rounding of its largest values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype
        mine, theirs = (np.asarray(each, np.float64) for each in (mine, theirs))
        np.testing.assert_allclose(
            mine, theirs, rtol=0, atol=rtol * max(np.abs(theirs).max(), 1e-30)
        )


@pytest.mark.parametrize("early", [None, True, False])
def test_values_and_gradients_are_those_of_slabs(
    layer: Any, ways: Ways, early: bool | None
) -> None:
    params, x = make_params(layer), draw(64)
    run = graded(layer, apply_topk_weights_early=early)
    want, got = ways.both(run, x, params)
    assert_close(got, want)


def test_explain_says_which_way_experts_go_and_why(layer: Any, ways: Ways) -> None:
    params, x = make_params(layer), draw(64)

    def told(**options: Any) -> list[str]:
        run = jax.jit(lambda x, p: ep.moe(layer, x, p, **options)[0])
        return [str(path) for path in ep.explain(run, x, params).paths]

    assert told() == [f"ep.moe of 'moe': slabs: {takes.REASONS['transport']}"]
    ways.call()
    assert told(keep="nothing") == ["ep.moe of 'moe': block call"]
    recipe = ep.recipes.BlockScaling()
    assert told(recipe=recipe) == [f"ep.moe of 'moe': slabs: {takes.REASONS['recipe']}"]
