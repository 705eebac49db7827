"""Values between two 8-bit values are rounded in the same way wherever they are quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import grouped as reference

import ep_runtime as ep

EXPERTS, ROWS, WIDTH = 2, 128, 128
SIZES = np.full(EXPERTS, ROWS, np.int32)
# Earlier ops of a program: XLA folds their constant factors into others.
MADE: list[tuple[Any, Callable[[Any], Any]]] = [
    (ep.recipes.TensorScaling(), lambda x: x * 0.3),
    (ep.recipes.BlockScaling(), lambda x: x / 3),
]


def near_ties(made: Callable[[Any], Any]) -> Any:
    """f32 [EXPERTS, ROWS, WIDTH] that `made` turns into ties, or values a bit or two from a tie."""
    rng = np.random.default_rng(0)
    codes = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    wanted = rng.choice((codes[1:] + codes[:-1]) / 2, (EXPERTS, ROWS, WIDTH))
    wanted[:, :, ::128] = 448  # every tile's largest
    scale = rng.uniform(0.5, 2, (EXPERTS, 1, 1)) / 448 / made(1.0)
    x = (wanted * scale).astype(np.float32)
    bits = x.view(np.int32) + rng.integers(-2, 3, x.shape, np.int32)
    signs = rng.choice(np.float32([-1, 1]), x.shape)
    return bits.view(np.float32) * signs


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("recipe", "made"), MADE, ids=["times a constant", "over a constant"])
def test_operands_are_rounded_as_the_reference_rounds_them(
    recipe: Any, made: Callable[[Any], Any]
) -> None:
    given = near_ties(made)
    x = np.asarray(jax.jit(made)(given))
    q = reference.quantize_kernel(recipe, x)
    r = reference.quantize_rows(recipe, x.reshape(-1, WIDTH), SIZES)
    eye = np.broadcast_to(np.eye(WIDTH, dtype=np.float32), (EXPERTS, WIDTH, WIDTH))

    @jax.jit
    def quantized(w: Any) -> Any:
        w = made(w)
        rows = ep.grouped_quantize(w.reshape(-1, WIDTH), jnp.asarray(SIZES), recipe)
        return ep.grouped_quantize(w, None, recipe).data, rows.data

    @jax.jit
    def multiplied(w: Any) -> Any:
        w, options = made(w), {"recipe": recipe}
        picked = np.tile(np.eye(ROWS, dtype=np.float32), (EXPERTS, 1))
        return (
            ep.grouped_gemm(picked, w, SIZES, **options),
            ep.grouped_gemm(w.reshape(-1, WIDTH), eye, SIZES, **options),
            ep.dense(picked[:ROWS], w[0], **options),
        )

    for got, want in zip(quantized(given), (q.data, r.data), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))
    # Products with ones: the neighbouring 8-bit value is 6% away.
    kernels, rows = _widened(q), _widened(r)
    for got, want in zip(multiplied(given), (kernels, rows, kernels[:ROWS]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def _widened(q: reference.Quantized) -> Any:
    """Returns data * scale [EXPERTS * ROWS, WIDTH]; a scale covers a row, or a whole kernel."""
    data = q.data.astype(np.float32).reshape(-1, WIDTH)
    return data * np.repeat(q.scale.reshape(-1, 1), len(data) // q.scale.size, axis=0)
