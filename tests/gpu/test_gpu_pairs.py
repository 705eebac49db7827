"""Separate gate and up on a GPU: the bits of one joined array, without copying the weights."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.jobs.layouts import TRIAL
from ops import grouped_cases as cases

import ep_runtime as ep

EXPERTS, ROWS, K = 8, 320, 160
SIZES = np.int32([[5, 0, 40, 3], [130, 1, 0, 140]])
# M: whole tiles, tiles that both halves share, halves inside a tile, and copied halves.
WIDTHS = (256, 192, 64, 96)


def draw(half: int, dtype: str) -> tuple[Any, ...]:
    """lhs, rhs [E, K', 2, M], bias, grad; rows past the last group are NaN."""
    rng = np.random.default_rng(half)
    shapes = [(2, ROWS, K), (EXPERTS, K, 2, half), (EXPERTS, 2, half), (2, ROWS, 2, half)]
    lhs, rhs, bias, grad = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    for slab, used in enumerate(SIZES.sum(-1)):
        lhs[slab, used:] = grad[slab, used:] = np.nan
    return tuple(x.astype(jnp.dtype(dtype)) for x in (lhs, rhs, bias, grad))


def step(recipe: Any, lhs: Any, rhs: Any, bias: Any, grad: Any, sizes: Any) -> Any:
    out, pull = jax.vjp(
        lambda *given: ep.grouped_gemm(*given[:2], sizes, bias=given[2], recipe=recipe),
        lhs,
        rhs,
        bias,
    )
    inside = jnp.arange(out.shape[1]) < sizes.sum(-1)[:, None]
    return jnp.where(inside[:, :, None, None], out, 0), pull(grad.astype(out.dtype))


def apart(rhs: Any) -> tuple[Any, Any]:
    return rhs[:, :, 0], rhs[:, :, 1]


def run(gpu: Any, recipe: Any, half: int, dtype: str, *, pair: bool) -> tuple[Any, str]:
    lhs, rhs, *others = draw(half, dtype)
    given = jax.device_put((lhs, apart(rhs) if pair else rhs, *others, SIZES), gpu)
    compiled = jax.jit(step, static_argnums=0).lower(recipe, *given).compile()
    first, again = (jax.device_get(compiled(*given)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, again, first)
    return first, compiled.as_text()


@pytest.mark.parametrize("half", WIDTHS)
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        (None, "bfloat16"),
        (None, "float16"),
        (None, "float32"),
        *((recipe, "bfloat16") for recipe in cases.RECIPES[1:]),
        (cases.RECIPES[1], "float32"),
    ],
    ids=repr,
)
def test_values_and_gradients_are_those_of_the_one_array_bit_for_bit(
    gpus: list[Any], recipe: Any, dtype: str, half: int
) -> None:
    (out, (d_lhs, d_rhs, d_bias)), _ = run(gpus[0], recipe, half, dtype, pair=False)
    (got, (got_lhs, got_rhs, got_bias)), text = run(gpus[0], recipe, half, dtype, pair=True)
    for mine, meant in zip(
        (got, got_lhs, got_bias, *got_rhs), (out, d_lhs, d_bias, *apart(d_rhs)), strict=True
    ):
        assert mine.dtype == meant.dtype
        np.testing.assert_array_equal(mine, meant)
    assert np.any(np.asarray(got_rhs[1]))
    if recipe is None and half % 64 == 0 and not TRIAL:
        kind = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
        assert not re.search(rf"\b{kind}\[{EXPERTS},{K},(2,{half}|{2 * half})\]", text)
