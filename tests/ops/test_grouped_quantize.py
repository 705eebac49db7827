"""Quantization of rows and kernels against NumPy, bit for bit."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import grouped_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from references import grouped as reference

import ep_runtime as ep
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes

SCALED = cases.RECIPES[1:]
PLAIN = recipes.TensorScaling()


@functools.cache
def compiled(recipe: recipes.Recipe, gradient: bool = False) -> Any:
    run = functools.partial(quantize_plain.quantize_rows, recipe, gradient=gradient)
    return jax.jit(run)


def assert_same_bits(got: ep.QuantizedTensor, want: reference.Quantized) -> None:
    for name in want._fields:
        left, right = getattr(got, name), getattr(want, name)
        assert (left is None) == (right is None), name
        if left is None:
            continue
        left = np.asarray(left)
        if name.startswith("scale"):
            left = left.astype(np.float32)
        assert (left.shape, left.dtype) == (right.shape, right.dtype), name
        assert left.tobytes() == right.tobytes(), name


def rows(sizes: Any, *shape: int) -> Any:
    """[ROWS, *shape] with values that are hard to round or scale; rows past the
    last group are NaN.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((cases.ROWS, *shape)).astype(np.float32)
    x *= np.exp(rng.uniform(-30, 30, (cases.ROWS, *[1] * len(shape)))).astype(np.float32)
    x[::7] = 0
    x[1::11] *= np.float32(2.0**-60)
    x[sum(sizes) :] = np.nan
    return x


@pytest.mark.parametrize("recipe", cases.RECIPES, ids=str)
def test_rows_have_the_bits_of_the_reference(recipe: Any) -> None:
    for sizes, gradient in itertools.product(cases.SIZES.values(), (False, True)):
        x = rows(sizes, 2, 160)
        got = compiled(recipe, gradient)(x, np.int32(sizes))
        assert_same_bits(got, reference.quantize_rows(recipe, x, sizes, gradient=gradient))
        assert got.data.dtype == recipe.data_dtype(gradient)


@pytest.mark.parametrize("recipe", [*cases.RECIPES[:4], recipes.BF16()], ids=str)
def test_dims_that_no_block_divides(recipe: Any) -> None:
    sizes = cases.SIZES["slack"]
    x = rows(sizes, 131)
    assert_same_bits(
        compiled(recipe)(x, jnp.int32(sizes)), reference.quantize_rows(recipe, x, sizes)
    )
    w = cases.drawn(131, (3, 137)).rhs
    got = jax.jit(lambda w: ep.grouped_quantize(w, None, recipe))(w)
    assert_same_bits(got, reference.quantize_kernel(recipe, w))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    recipe=st.sampled_from(cases.RECIPES[:4]),
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    slack=st.integers(0, 70),
    inner=st.integers(1, 300),
)
def test_random_rows(recipe: Any, sizes: list[int], slack: int, inner: int) -> None:
    rng = np.random.default_rng(inner)
    x = rng.standard_normal((sum(sizes) + slack, inner)).astype(np.float32)
    x[sum(sizes) :] = np.nan
    got = compiled(recipe)(x, jnp.int32(sizes))
    assert_same_bits(got, reference.quantize_rows(recipe, x, sizes))


@pytest.mark.parametrize("recipe", cases.RECIPES, ids=str)
@pytest.mark.parametrize("shape", [(160, (32,)), (256, (2, 160))], ids=str)
def test_kernels_have_the_bits_of_the_reference(recipe: Any, shape: Any) -> None:
    w = cases.drawn(*shape).rhs
    got = jax.jit(lambda w: ep.grouped_quantize(w, None, recipe))(w)
    assert_same_bits(got, reference.quantize_kernel(recipe, w))
    assert not got.is_rows
    assert (got.shape, got.ndim) == (w.shape, w.ndim)


SHAPES = {
    recipes.BF16(): (None, None, None, None),
    recipes.TensorScaling(): ((2, 3), None, (4,), None),
    recipes.BlockScaling(): ((2, 64, 2), None, (4, 2, 1), None),
    recipes.MXFP8(): ((2, 64, 5), (2, 2, 160), (4, 5, 96), (4, 160, 3)),
}


@pytest.mark.parametrize("recipe", SHAPES, ids=str)
def test_scales_have_the_shapes_of_the_contract(recipe: Any) -> None:
    x, w = jnp.ones((2, 64, 160), jnp.bfloat16), jnp.ones((4, 160, 96))
    q = ep.grouped_quantize(x, jnp.int32([[3, 0, 9], [60, 4, 0]]), recipe)
    k = ep.grouped_quantize(w, None, recipe)
    found = (q.scale, q.scale_columns, k.scale, k.scale_columns)
    assert tuple(None if s is None else s.shape for s in found) == SHAPES[recipe]
    stored = jnp.float8_e8m0fnu if recipe == recipes.MXFP8() else jnp.float32
    assert {s.dtype for s in found if s is not None} <= {np.dtype(stored)}
    assert (q.amax is None) == (recipe != recipes.TensorScaling())
    assert q.recipe == recipe
    np.testing.assert_array_equal(k.dequantize(jnp.bfloat16), w.astype(jnp.bfloat16))


def test_slabs_are_quantized_as_if_alone() -> None:
    sizes = np.int32([[3, 60], [0, 0], [20, 1]])
    x = rows((cases.ROWS,), 64).reshape(3, 64, 64)
    for slab, pair in enumerate(sizes):
        x[slab, pair.sum() :] = np.nan
    for recipe in SCALED:
        got = ep.grouped_quantize(x, sizes, recipe)
        want = [reference.quantize_rows(recipe, *pair) for pair in zip(x, sizes, strict=True)]
        for name in reference.Quantized._fields:
            parts = [getattr(one, name) for one in want]
            if parts[0] is not None:
                found = np.asarray(getattr(got, name))
                np.testing.assert_array_equal(found, np.stack(parts).astype(found.dtype))


@pytest.mark.parametrize("recipe", SCALED, ids=str)
def test_values_that_are_not_finite_stay_so_alone(recipe: Any) -> None:
    """A NaN or infinity of a valid row stays one, in its place, and changes no other value."""
    x = np.random.default_rng(2).standard_normal((cases.ROWS, 64)).astype(np.float32)
    broken = x.copy()
    broken[3, 5], broken[17, 40], broken[17, 41] = np.nan, np.inf, -np.inf
    zeroed = np.where(np.isfinite(broken), x, 0)
    for gradient in (False, True):
        run = compiled(recipe, gradient)
        got, want = (run(v, jnp.int32(cases.SIZES["all rows"])) for v in (broken, zeroed))
        for columns in {False, recipe == recipes.MXFP8()}:
            left, right = (np.asarray(q.dequantize(columns=columns)) for q in (got, want))
            np.testing.assert_array_equal(np.isfinite(left), np.isfinite(broken))
            np.testing.assert_array_equal(np.where(np.isfinite(left), left, 0), right)
    kernel = ep.grouped_quantize(jnp.asarray(broken)[None], None, recipe).dequantize()[0]
    np.testing.assert_array_equal(np.isfinite(kernel), np.isfinite(broken))


@pytest.mark.parametrize("recipe", cases.RECIPES, ids=str)
def test_gradients_go_straight_through(recipe: Any) -> None:
    sizes = jnp.int32(cases.SIZES["slack"])
    x, w = rows(cases.SIZES["slack"], 64), cases.drawn(64, (32,)).rhs
    g = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32)
    inside = np.arange(cases.ROWS)[:, None] < int(sizes.sum())
    g = np.where(inside, g, np.nan).astype(np.float32)

    def run(x: Any, w: Any) -> Any:
        q, k = ep.grouped_quantize(x, sizes, recipe), ep.grouped_quantize(w, None, recipe)
        return q.dequantize(), k.dequantize()

    (out, _), pull = jax.vjp(jax.jit(run), x.astype(jnp.bfloat16), w)
    d_rows, d_kernel = jax.jit(pull)((g, 2 * w))
    assert d_rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(d_rows, np.where(inside, g, 0).astype(jnp.bfloat16))
    np.testing.assert_array_equal(d_kernel, 2 * w)
    assert np.isfinite(out).all()
    detached = jax.grad(
        lambda w: ep.grouped_quantize(w, None, recipe).detached().dequantize().sum()
    )
    np.testing.assert_array_equal(detached(w), 0)


@pytest.mark.parametrize("recipe", [recipes.TensorScaling(), recipes.MXFP8()], ids=str)
def test_under_remat_scan_and_donation(recipe: Any) -> None:
    sizes = jnp.int32(cases.SIZES["uneven, one empty"])
    x = jnp.nan_to_num(rows(cases.SIZES["uneven, one empty"], 64))

    def once(x: Any, _: Any) -> Any:
        out = ep.grouped_quantize(x, sizes, recipe).dequantize()
        return out, out.sum()

    def loss(x: Any) -> Any:
        out, sums = jax.lax.scan(jax.checkpoint(once), x, None, length=2)
        return (out * out).sum(), sums

    (_, sums), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    plain, _ = once(x, None)
    twice, _ = once(plain, None)
    np.testing.assert_allclose(sums, [plain.sum(), twice.sum()], rtol=1e-5)
    np.testing.assert_allclose(grad, 2 * twice, rtol=1e-6)
    q = ep.grouped_quantize(x, sizes, recipe).detached()
    moved = jax.jit(lambda q: q, donate_argnums=0)(jax.tree.map(jnp.copy, q))
    np.testing.assert_array_equal(moved.dequantize(), q.dequantize())


def test_amax_is_taken_over_the_axes_that_split_rows_and_no_others() -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    x = np.random.default_rng(4).standard_normal((8, 32, 8)).astype(np.float32)
    x *= np.arange(1, 9, dtype=np.float32)[:, None, None]
    sizes = np.int32([[20, 12]] * 8)
    slab = PartitionSpec(("dp", "ep"))

    def local(x: Any, sizes: Any) -> Any:
        q = quantize_plain.quantize_rows(recipes.TensorScaling(), x[0], sizes[0], ("dp",))
        return q.amax[None], q.dequantize()[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=slab, out_specs=slab)
    amax, out = jax.jit(mapped)(x, sizes)
    joined = np.abs(x).reshape(2, 4, 32, 8)
    want = np.stack([joined[:, :, :20].max((0, 2, 3)), joined[:, :, 20:].max((0, 2, 3))], -1)
    np.testing.assert_array_equal(np.asarray(amax).reshape(2, 4, 2), [want, want])
    one = quantize_plain.quantize_rows(recipes.TensorScaling(), x, sizes, num_experts=8)
    np.testing.assert_array_equal(out, one.dequantize())


@pytest.mark.parametrize("recipe", [recipes.TensorScaling(), recipes.BlockScaling()], ids=str)
def test_dequantizing_what_types_say_lies_on_a_mesh(recipe: Any) -> None:
    """Explicit axes: the kernel's gradient is sharded like the kernel, 64 rows of K' each."""
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(AxisType.Explicit,) * 2)
    x, w = cases.drawn(128, (128,)).lhs.reshape(8, 24, 128), cases.drawn(128, (128,)).rhs
    sizes = np.int32([[20], [0], [24], [1]] * 2)

    def run(x: Any, sizes: Any, w: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            q, k = ep.grouped_quantize(x, sizes, recipe), ep.grouped_quantize(w, None, recipe)
            found = q.dequantize(), k.dequantize()
            return sum((out * out).sum() for out in found), found

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(x, w)

    specs = PartitionSpec(("dp", "ep")), PartitionSpec(("dp", "ep")), PartitionSpec("ep", "dp")
    arrays = zip((x, sizes, w), specs, strict=True)
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in arrays]
    got, want = jax.jit(run)(*placed), jax.jit(run)(x, sizes, w)
    assert got[0][1].sharding.spec == PartitionSpec("ep", "dp", None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_arguments_that_do_not_fit_say_so() -> None:
    sizes, x = jnp.int32([1, 2]), jnp.ones((64, 64))
    wrong = [
        ((x, sizes, "fp8"), r"one of ep.recipes.BF16\(\), .* got 'fp8'"),
        ((x, sizes, recipes.TensorScaling(delayed=True)), r"TensorScaling\(\) here"),
        ((x.astype(jnp.int8), sizes, PLAIN), "floating, got int8"),
        ((x, None, PLAIN), r"\[E, K', N'\] without group_sizes, got \(64, 64\)"),
        ((x, sizes[None], PLAIN), r"\[R, C, K'\] for group_sizes \[R, L\], got \(64, 64\)"),
        ((x, sizes.astype(jnp.float32), PLAIN), r"integers .*float32\[2\]"),
        (
            (x[:, :33], sizes, recipes.MXFP8()),
            r"last dim of x .*32 for MXFP8, got 33 of \(1, 64, 33\)",
        ),
        ((x[:33], sizes, recipes.MXFP8()), r"rows of x .*32 for MXFP8, got 33 of \(1, 33, 64\)"),
        ((x[None, :33], None, recipes.MXFP8()), r"dim 1 of the kernel .*got 33 of \(1, 33, 64\)"),
        ((x[None, :, :7], None, recipes.MXFP8()), r"last dim of the kernel .*got 7"),
    ]
    for args, message in wrong:
        with pytest.raises(ep.InvalidArgumentError, match=message):
            ep.grouped_quantize(*args)
