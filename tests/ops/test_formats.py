"""A new recipe is one file, its class and its format, and one line in the table of formats."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.kernels.row_blocks import cut, loop
from ep_runtime_client.ops.quantize.formats.format import Format, Leaves, RowOptions
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import FORMATS, format_of
from ep_runtime_client.ops.quantize.formats.tensor import TensorFormat
from ep_runtime_client.ops.quantize.rounding import quantize_tiles

SIZES = np.int32([5, 0, 9, 3])


# The code up to the next comment would be a file of formats/.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MoreRange(Recipe):
    """`TensorScaling` with rows and kernels in e5m2."""

    def data_dtype(self, gradient: bool = False) -> Any:
        return jnp.dtype(jnp.float8_e5m2)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SmallTiles(Recipe):
    """One f32 scale per 16 values of K', for rows and kernels."""


class Tiles16(Format):
    tile = 16

    def leaves(self, recipe: Recipe) -> dict[str, Any]:
        return {"data": recipe.data_dtype(), "scale": jnp.dtype(jnp.float32)}

    def tiles(self, ndim: int, lead: int | None, *, columns: bool = False) -> dict[int, int]:
        return {1 if lead is None else ndim - 1: self.tile}

    def quantize_rows(
        self, recipe: Recipe, x: jax.Array, group_sizes: jax.Array, options: RowOptions
    ) -> Leaves:
        rows = x.reshape(-1, x.shape[-1])
        blocks = cut(x.shape[group_sizes.ndim - 1], group_sizes)
        used = loop(blocks, lambda block, out: block.write(out, block.read(rows)), rows * 0, rows)
        made = self._made(recipe.data_dtype(options.gradient), used.reshape(x.shape), x.ndim - 1)
        return dict(zip(("data", "scale"), made, strict=True))

    def quantize_kernel(
        self, recipe: Recipe, w: jax.Array, reduce_axes: Any, *, transposed: bool
    ) -> Leaves:
        return dict(zip(("data", "scale"), self._made(recipe.data_dtype(), w, 1), strict=True))

    def _made(self, dtype: Any, x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        return quantize_tiles(x.astype(jnp.float32), {axis: self.tile}, dtype, False)


# And these would be the lines of the table.
NEW: dict[type[Recipe], Format] = {MoreRange: TensorFormat(), SmallTiles: Tiles16()}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, form in NEW.items():
        monkeypatch.setitem(FORMATS, kind, form)


def drawn() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = ((20, 48), (4, 48, 32), (4, 32))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("recipe", [MoreRange(), SmallTiles()], ids=lambda r: type(r).__name__)
def test_grouped_gemm_and_its_gradients_multiply_what_a_new_recipe_makes(recipe: Any) -> None:
    x, w, bias = drawn()
    used = np.arange(20)[:, None] < SIZES.sum()

    def product(x: Any, w: Any, **options: Any) -> Any:
        return ep.grouped_gemm(x, w, SIZES, bias=bias, **options)

    out, pull = jax.vjp(jax.jit(functools.partial(product, recipe=recipe)), x, w)
    quantize = jax.jit(lambda x, sizes: ep.grouped_quantize(x, sizes, recipe).detached())
    q_x, q_w = quantize(x, SIZES), quantize(w, None)
    assert q_x.dtype == q_w.dtype == recipe.data_dtype()
    values = q_x.dequantize(), q_w.dequantize()
    near_x, near_w = (
        np.abs(np.asarray(v) - o).max() for v, o in zip(values, (x * used, w), strict=True)
    )
    assert 0 < max(near_x, near_w) < 0.4  # 2 bits of a value with 3
    want, plain_pull = jax.vjp(jax.jit(product), *values)
    near(out[:17], want[:17])
    grad = np.asarray(jnp.cos(out)) * used
    rounded = quantize(grad, SIZES).dequantize()
    for got, wanted in zip(pull(grad), plain_pull(rounded), strict=True):
        near(got, wanted)


def near(got: Any, want: Any) -> None:
    limit = 1e-5 * float(np.abs(np.asarray(want)).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=limit)


def test_gpus_multiply_a_new_format_in_plain_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "installed", lambda: True)
    x, w, _ = drawn()
    run = functools.partial(ep.grouped_gemm, recipe=SmallTiles())
    text = jax.jit(run).trace(x, w, SIZES).lower(lowering_platforms=("cuda",)).as_text()
    assert "ep_" not in text.replace("ep_runtime", "")


def test_dense_and_layouts_ask_the_format_too() -> None:
    x, w, _ = drawn()
    got = jax.jit(functools.partial(ep.dense, recipe=SmallTiles()))(x, w[0])
    np.testing.assert_allclose(got, x @ w[0], rtol=0, atol=2.0)
    np.testing.assert_allclose(np.linalg.norm(got - x @ w[0]), 0, atol=0.05 * np.linalg.norm(got))


def test_a_recipe_made_from_another_has_its_format_and_one_of_none_is_refused() -> None:
    class Own(ep.recipes.BlockScaling):
        pass

    @dataclasses.dataclass(frozen=True)
    class Nobodys(Recipe):
        pass

    assert format_of(Own()) is FORMATS[ep.recipes.BlockScaling]
    with pytest.raises(InvalidArgumentError, match="Nobodys"):
        format_of(Nobodys())
