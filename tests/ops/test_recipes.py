"""Recipes as values, and their arithmetic against exact fractions and ml_dtypes."""

from __future__ import annotations

import fractions
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from references import grouped as reference

import ep_runtime as ep
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize import rounding
from ep_runtime_client.ops.quantize.delayed import Delayed
from ep_runtime_client.ops.quantize.formats import recipes

ALL = (
    recipes.BF16(),
    recipes.TensorScaling(),
    recipes.TensorScaling(delayed=True, history=4),
    recipes.BlockScaling(power_of_two_scales=True),
    recipes.MXFP8(gradient_dtype="float8_e5m2"),
)
DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def interesting() -> Any:
    """f32 values that are hard to round to 8 bits, and those one bit next to them."""
    top = np.arange(1 << 16, dtype=np.uint32) << 16
    rng = np.random.default_rng(0)
    bits = [top | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    return np.concatenate([*bits, rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)]).view("f4")


@pytest.mark.parametrize("recipe", ALL, ids=str)
def test_a_recipe_is_a_static_value_without_leaves(recipe: recipes.Recipe) -> None:
    assert jax.tree.leaves(recipe) == []
    assert len({recipe, type(recipe)(**vars(recipe))}) == 1
    assert recipe != recipes.TensorScaling(history=3)
    static = jax.jit(lambda x, r: x + r.quantizes, static_argnums=1)
    assert static(1, recipe) == 1 + (recipe != recipes.BF16())
    doubled, same = jax.jit(lambda pair: (2 * pair[0], pair[1]))((3, recipe))
    assert (doubled, same) == (6, recipe)


def test_recipes_are_reached_by_the_package() -> None:
    assert ep.recipes is recipes
    assert ep.recipes.TensorScaling() == recipes.TensorScaling(delayed=False)


def test_dtypes_of_data_and_gradients() -> None:
    found = [(r.data_dtype().name, r.data_dtype(True).name) for r in ALL]
    e4m3, e5m2 = recipes.DATA_DTYPES
    assert found == [
        ("bfloat16", "bfloat16"),
        (e4m3, e5m2),
        (e4m3, e5m2),
        (e4m3, e4m3),
        (e4m3, e5m2),
    ]


def test_wrong_recipes_say_what_was_wanted() -> None:
    with pytest.raises(ep.InvalidArgumentError, match=r"one of .*e5m2.*, got 'float8_e3m4'"):
        recipes.MXFP8(gradient_dtype="float8_e3m4")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        recipes.TensorScaling(history=0)
    for recipe in (recipes.TensorScaling(), recipes.BlockScaling()):
        with pytest.raises(ValueError, match=r"delayed=True.* got \w+Scaling\("):
            recipe.init_state(4)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_rounding_is_to_nearest_even_and_saturates(dtype: Any) -> None:
    values = interesting()
    got = np.asarray(jax.jit(lambda x: rounding.round_scaled(x, jnp.ones(()), dtype))(values))
    limit = np.float32(jnp.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(values)
        want = np.where(finite, np.clip(values, -limit, limit), values).astype(dtype)
    number = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(got[number].view(np.uint8), want[number].view(np.uint8))
    # NaN stays NaN, and infinities become NaN if the dtype has none; nothing else becomes NaN.
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), ~number)
    infinite = got[np.isinf(values)].astype(np.float32)
    assert (np.isinf(infinite) if dtype == jnp.float8_e5m2 else np.isnan(infinite)).all()
    assert np.isfinite(got[finite].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_scales_are_quotients_rounded_once(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    amax = np.exp(rng.uniform(-80, 80, 1 << 16)).astype(np.float32)
    amax[:4] = [0, 1e-40, 2.0**-126, np.finfo(np.float32).max]
    # Quotients that are powers of two, and their neighbours.
    edges = (np.float32(jnp.finfo(dtype).max) * 2.0 ** np.arange(-100, 100)).astype(np.float32)
    beside = [np.nextafter(edges, np.float32(side)) for side in (0, np.inf)]
    amax = np.concatenate([amax, edges, *beside])
    amax = amax[np.isfinite(amax)]
    got = np.asarray(jax.jit(lambda a: rounding.scale_of(a, dtype))(amax))
    exact = np.maximum(amax / np.float32(jnp.finfo(dtype).max), np.float32(2.0**-126))
    np.testing.assert_array_equal(got, np.where(amax < 2.0**-126, np.float32(1), exact))
    # The amax maps to the dtype's largest value.
    usual = (amax > 2.0**-126) & (got > 2.0**-126)
    data = rounding.round_scaled(amax[usual], got[usual], dtype)
    np.testing.assert_array_equal(np.asarray(data).astype(np.float32), jnp.finfo(dtype).max)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_power_of_two_scales_are_exact_ceilings(dtype: Any) -> None:
    largest = int(jnp.finfo(dtype).max)
    edges = (np.float32(largest) * np.float32(2.0) ** np.arange(-150, 110)).astype(np.float32)
    rng = np.random.default_rng(2)
    drawn = np.exp(rng.uniform(-80, 80, 500)).astype(np.float32)
    beside = [np.nextafter(edges, np.float32(side)) for side in (0, np.inf)]
    amax = np.concatenate([edges, *beside, drawn, [np.finfo(np.float32).max]])
    amax = amax[amax >= np.float32(2.0**-126)].astype(np.float32)
    got = np.asarray(jax.jit(lambda a: rounding.scale_of(a, dtype, True))(amax))
    for value, scale in zip(amax, got, strict=True):
        quotient = fractions.Fraction(float(value)) / largest
        power = fractions.Fraction(float(scale))
        assert quotient <= power
        assert power < 2 * quotient or scale == 2.0**-126
    stored = np.asarray(rounding.to_e8m0(jnp.asarray(got)))
    assert stored.dtype == jnp.float8_e8m0fnu
    np.testing.assert_array_equal(stored.astype(np.float32), got)
    assert rounding.scale_of(jnp.float32([0, 1e-40]), dtype, True).tolist() == [1, 1]


def test_every_byte_widens_exactly() -> None:
    raw = np.arange(256, dtype=np.uint8)
    for dtype in (*DTYPES, jnp.float8_e8m0fnu):
        wide = jax.jit(lambda x, d=dtype: lax.bitcast_convert_type(x, d).astype(jnp.float32))(raw)
        want = raw.view(dtype).astype(np.float32)
        # CPUs flush a scale below the smallest normal f32; we never store one.
        keep = want != 2.0**-127
        np.testing.assert_array_equal(np.asarray(wide)[keep], want[keep])


def test_delayed_histories_move_on_and_scale_by_their_largest() -> None:
    recipe = recipes.TensorScaling(delayed=True, history=2)
    sizes = jnp.int32([[2, 1], [0, 3]])  # two slabs of the same two experts
    x = np.full((2, 4, 3), np.nan, np.float32)
    x[0, :2], x[0, 2:3], x[1, :3] = 4, 1000, 2000
    w = np.random.default_rng(3).standard_normal((2, 5, 2, 3)).astype(np.float32)
    delayed = Delayed(recipe, 2, (2, 2), ())

    @jax.jit
    def step(x: Any, w: Any, state: Any) -> Any:
        for_x, for_w = delayed.scales(state)
        q = quantize_plain.quantize_rows(recipe, x, sizes, num_experts=2, scale=for_x)
        k = quantize_plain.quantize_kernel(recipe, w, scale=for_w)
        return q, k, delayed.next(state, q.amax, k.amax)

    q, k, state = step(x, w, recipe.init_state(2))
    np.testing.assert_array_equal(q.scale, 1)
    np.testing.assert_array_equal(k.scale, 1)
    # With a scale of 1, values over 448 saturate.
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32)[1, :3], 448)
    np.testing.assert_array_equal(state.x, [[4, 2000], [0, 0]])
    q, k, state = step(0 * x, w, state)
    np.testing.assert_array_equal(q.scale, [np.float32([4, 2000]) / np.float32(448)] * 2)
    np.testing.assert_array_equal(state.x, [[0, 0], [4, 2000]])
    want = reference.quantize_kernel(recipes.TensorScaling(), w)
    np.testing.assert_array_equal(k.scale, want.scale)
    np.testing.assert_array_equal(np.asarray(k.data).view("u1"), want.data.view("u1"))
    q, _, state = step(x, w, state)
    np.testing.assert_allclose(q.dequantize()[1, :3], 2000, rtol=1e-6)
    for _ in range(2):
        q, _, state = step(0 * x, 0 * w, state)
    q, _, _ = step(x, w, state)
    np.testing.assert_array_equal(q.scale, 1)
