"""Gate and up kept apart: the bits of the one array, and nothing that puts the weights together."""

from __future__ import annotations

import re
from typing import Any

import grouped_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep
from ep_runtime_client.ops.quantize.formats import recipes

SIZES = np.array([[5, 0, 40, 3], [1, 13, 2, 30]], np.int32)
EXPERTS, ROWS, K, M = 4, 64, 160, 96  # blocks of 128 are cut by both


def draw(dtype: Any) -> tuple[Any, Any, Any, Any]:
    """lhs, rhs [E, K', 2, M], bias, grad; rows of the slack are NaN."""
    rng = np.random.default_rng(0)
    shapes = [(2, ROWS, K), (EXPERTS, K, 2, M), (EXPERTS, 2, M), (2, ROWS, 2, M)]
    lhs, rhs, bias, grad = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    for slab, used in enumerate(SIZES.sum(-1)):
        lhs[slab, used:] = grad[slab, used:] = np.nan
    rhs[:, :, 1] *= 3  # gate alone would have another amax
    return tuple(jnp.array(x, dtype) for x in (lhs, rhs, bias, grad))


def apart(rhs: Any) -> tuple[Any, Any]:
    return rhs[:, :, 0], rhs[:, :, 1]


def step(recipe: Any, lhs: Any, rhs: Any, bias: Any, grad: Any) -> Any:
    """Values and gradients of one product, and the next state of a delayed recipe."""
    delayed = recipe is not None and recipe.delayed
    state = recipe.init_state(EXPERTS) if delayed else None

    def forward(lhs: Any, rhs: Any, bias: Any) -> Any:
        made = ep.grouped_gemm(lhs, rhs, SIZES, bias=bias, recipe=recipe, state=state)
        return made if delayed else (made, None)

    out, pull, state = jax.vjp(forward, lhs, rhs, bias, has_aux=True)
    return out, pull(grad.astype(out.dtype)), state


def defined(out: Any) -> Any:
    return np.array(out)[np.arange(ROWS) < SIZES.sum(-1)[:, None]]


DELAYED = recipes.TensorScaling(delayed=True, history=2)
STEPS = [(None, "bfloat16"), *((r, "float32") for r in (None, *cases.RECIPES, DELAYED))]


@pytest.mark.parametrize(("recipe", "dtype"), STEPS, ids=repr)
def test_values_and_gradients_are_those_of_the_one_array_bit_for_bit(
    recipe: Any, dtype: str
) -> None:
    lhs, rhs, bias, grad = draw(dtype)
    run = jax.jit(step, static_argnums=0)
    out, (d_lhs, d_rhs, d_bias), state = run(recipe, lhs, rhs, bias, grad)
    found = run(recipe, lhs, apart(rhs), bias, grad)
    np.testing.assert_array_equal(defined(found[0]), defined(out))
    np.testing.assert_array_equal(defined(found[1][0]), defined(d_lhs))
    assert isinstance(found[1][1], tuple)
    for got, want in zip(found[1][1], apart(d_rhs), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.array(got), np.array(want))
    assert np.any(np.array(found[1][1][1]))
    np.testing.assert_array_equal(np.array(found[1][2]), np.array(d_bias))
    jax.tree.map(np.testing.assert_array_equal, found[2], state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_program_holds_the_weights_as_one_array(dtype: str) -> None:
    lhs, rhs, bias, grad = draw(dtype)
    lowered = jax.jit(step, static_argnums=0).lower(None, lhs, apart(rhs), bias, grad)
    both = re.compile(rf"\[{EXPERTS},{K},(2,{M}|{2 * M})\]")
    assert not both.search(lowered.compile().as_text())
    assert not both.search(lowered.as_text("hlo"))
    one = jax.jit(step, static_argnums=0).lower(None, lhs, rhs, bias, grad)
    assert both.search(one.compile().as_text())


def test_a_call_of_concrete_arrays_takes_a_pair_too() -> None:
    lhs, rhs, bias, _ = draw("float32")
    found = ep.grouped_gemm(lhs, apart(rhs), SIZES, bias=bias)
    np.testing.assert_array_equal(
        defined(found), defined(ep.grouped_gemm(lhs, rhs, SIZES, bias=bias))
    )


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (lambda rhs: (rhs[:, :, 0],), "a pair (gate, up), got 1 values"),
        (lambda rhs: (rhs[:, :, 0], rhs[:, :, 1, 1:]), "[4, 160, 96] and float32[4, 160, 95]"),
        (
            lambda rhs: (rhs[:, :, 0], rhs[:, :, 1].astype("bfloat16")),
            "float32[4, 160, 96] and bfloat16[4, 160, 96]",
        ),
        (lambda rhs: (rhs, rhs), "two arrays [E, K', M]"),
    ],
)
def test_a_pair_that_is_none_is_refused_with_its_shapes(pair: Any, words: str) -> None:
    lhs, rhs, _, _ = draw("float32")
    with pytest.raises(ep.InvalidArgumentError) as caught:
        ep.grouped_gemm(lhs, pair(rhs), SIZES)
    assert words in str(caught.value)
