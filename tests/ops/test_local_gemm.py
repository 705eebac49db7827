"""Grouped GEMM of one device against NumPy in f64."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import grouped_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec
from references import grouped as reference

from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.kernels import row_blocks
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes

# A GEMM does not depend on the source of scales: block scales with powers of two are enough.
RECIPES = (*cases.RECIPES[:3], recipes.MXFP8())
F32 = gemm_plain.Gemm(jnp.float32)


def all_four(gemm: Any, lhs: Any, rhs: Any, bias: Any, grad: Any, sizes: Any) -> Any:
    """Returns out, dX, dW and dbias."""
    return (
        gemm_plain.forward(gemm, lhs, rhs, bias, sizes),
        gemm_plain.data_grad(gemm, grad, rhs, sizes),
        gemm_plain.weight_grad(gemm, lhs, grad, sizes),
        gemm_plain.bias_grad(gemm, grad, sizes),
    )


def expected(given: cases.Operands, sizes: Any) -> Any:
    return (
        reference.grouped_gemm(given.lhs, given.rhs, given.bias, sizes),
        reference.data_grad(given.grad, given.rhs, sizes),
        reference.weight_grad(given.lhs, given.grad, sizes),
        reference.bias_grad(given.grad, sizes),
    )


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Allows `tolerance` of each array's largest value; rows or experts of zeros must be exact."""
    for left, right in zip(got, want, strict=True):
        assert left.shape == right.shape
        left = np.asarray(left, np.float64)
        limit = tolerance * max(np.abs(right).max(initial=0), 1e-9)
        np.testing.assert_allclose(left, right, rtol=0, atol=limit)
        zeros = (right == 0).all(tuple(range(1, right.ndim)))
        np.testing.assert_array_equal(left[zeros], 0)


@functools.cache
def compiled(gemm: Any = F32) -> Any:
    return jax.jit(functools.partial(all_four, gemm))


@functools.cache
def quantized(recipe: recipes.Recipe) -> Any:
    """Computes all four from plain arrays, quantizing each operand once."""

    def run(lhs: Any, rhs: Any, bias: Any, grad: Any, sizes: Any) -> Any:
        rows = quantize_plain.quantize_rows(recipe, lhs, sizes)
        grads = quantize_plain.quantize_rows(recipe, grad, sizes, gradient=True)
        kernel = quantize_plain.quantize_kernel(recipe, rhs)
        return (rows, kernel, grads), all_four(F32, rows, kernel, bias, grads, sizes)

    return jax.jit(run)


@pytest.mark.parametrize("shape", [(7, (5,)), (33, (2, 9))], ids=str)
def test_arrays_of_any_sizes(shape: Any) -> None:
    for sizes in cases.SIZES.values():
        given = cases.operands(sizes, *shape)
        assert_close(compiled()(*given, np.int32(sizes)), expected(given, sizes), 1e-6)


def quantized_again(x: Any, sizes: Any) -> Any:
    """Rounds rows [C, *mid, W] to e4m3 with one scale per 128 rows of a group x 128 values."""
    made, first = np.zeros_like(x), 0
    for size in sizes:
        last = min(first + int(size), len(x))
        for row, column in itertools.product(range(first, last, 128), range(0, x.shape[-1], 128)):
            for mid in np.ndindex(x.shape[1:-1]):
                at = (slice(row, min(row + 128, last)), *mid, slice(column, column + 128))
                scale = np.float32(np.abs(x[at]).max()) / np.float32(448) or np.float32(1)
                data = (x[at] * (np.float32(1) / scale)).astype(jnp.float8_e4m3fn)
                made[at] = data.astype(np.float32) * scale
        first = last
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_quantized_operands_are_multiplied_as_they_dequantize(recipe: Any) -> None:
    for sizes in cases.SIZES.values():
        check_quantized(recipe, sizes)


def check_quantized(recipe: Any, sizes: Any) -> None:
    given = cases.operands(sizes, 160, (2, 32))
    (rows, kernel, grads), got = quantized(recipe)(*given, np.int32(sizes))
    columns = isinstance(recipe, recipes.MXFP8)
    first = cases.Operands(rows.dequantize(), kernel.dequantize(), given.bias, grads.dequantize())
    second = cases.Operands(
        rows.dequantize(columns=columns),
        kernel.dequantize(columns=columns),
        given.bias,
        grads.dequantize(columns=columns),
    )
    if isinstance(recipe, recipes.BlockScaling):
        again = (quantized_again(np.asarray(x), sizes) for x in (first.lhs, first.grad))
        second = second._replace(lhs=next(again), grad=next(again))
    want = (
        expected(first, sizes)[0],
        expected(second._replace(grad=first.grad), sizes)[1],
        expected(second, sizes)[2],
        expected(first, sizes)[3],
    )
    assert_close(got, want, 1e-6)


def test_one_operand_may_be_quantized_and_the_other_not() -> None:
    sizes = cases.SIZES["slack"]
    given = cases.operands(sizes, 33, (9,))
    by_blocks = functools.partial(quantize_plain.quantize_kernel, recipes.BlockScaling())
    by_tensor = functools.partial(quantize_plain.quantize_rows, recipes.TensorScaling())
    kernel, rows = jax.jit(by_blocks)(given.rhs), jax.jit(by_tensor)(given.lhs, np.int32(sizes))
    mixed = given._replace(rhs=kernel.dequantize())
    got = compiled()(given.lhs, kernel, given.bias, given.grad, jnp.int32(sizes))
    assert_close(got, expected(mixed, sizes), 1e-6)
    mixed = given._replace(lhs=rows.dequantize())
    got = compiled()(rows, given.rhs, given.bias, given.grad, jnp.int32(sizes))
    assert_close(got, expected(mixed, sizes), 1e-6)


def test_bf16_sums_in_f32_and_f64_in_f64() -> None:
    sizes = cases.SIZES["aligned"]
    given = cases.operands(sizes, 33, (9,))
    narrow = cases.Operands(*(x.astype(jnp.bfloat16) for x in given))
    got = compiled(gemm_plain.Gemm(jnp.bfloat16))(*narrow, jnp.int32(sizes))
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]
    want = expected(narrow, sizes)
    assert_close(got[:2], want[:2], 4e-3)  # the results' own rounding
    assert_close(got[2:], want[2:], 1e-6)
    cast = gemm_plain.Gemm(jnp.float32, compute_dtype=jnp.bfloat16)
    rounded = given._replace(lhs=narrow.lhs, rhs=narrow.rhs, grad=narrow.grad)
    assert_close(compiled(cast)(*given, jnp.int32(sizes)), expected(rounded, sizes), 1e-6)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in given]
        got = all_four(gemm_plain.Gemm(jnp.float64), *wide, jnp.int32(sizes))
        assert {x.dtype for x in got} == {np.dtype(np.float64)}
        assert_close(got, expected(given, sizes), 1e-14)
        # One f64 operand is enough.
        for lhs, grad in ((wide[0], given.grad), (given.lhs, wide[3])):
            got = gemm_plain.weight_grad(gemm_plain.Gemm(jnp.float64), lhs, grad, jnp.int32(sizes))
            assert got.dtype == np.float64
            assert_close([got], expected(given, sizes)[2:3], 1e-14)


def test_several_slabs_share_the_experts() -> None:
    given = cases.operands(cases.SIZES["slack"], 7, (5,))
    sizes = np.int32([[3, 9], [0, 64], [40, 2], [0, 0], [1, 1], [2, 0]])  # E = 4, two per slab
    lhs, grad = (np.full((6, 64, n), np.nan, np.float32) for n in (7, 5))
    for slab, (first, second) in enumerate(sizes):
        lhs[slab, : first + second] = given.lhs[: first + second]
        grad[slab, : first + second] = given.grad[: first + second]
    run = jax.jit(
        lambda lhs, grad: (
            gemm_plain.forward(F32, lhs, given.rhs, given.bias, sizes),
            gemm_plain.data_grad(F32, grad, given.rhs, sizes),
            gemm_plain.weight_grad(F32, lhs, grad, sizes, 4),
            gemm_plain.bias_grad(F32, grad, sizes, 4),
        )
    )
    want: list[Any] = [np.zeros_like(x) for x in run(lhs, grad)]
    for slab, pair in enumerate(sizes):
        experts = slice(slab % 2 * 2, slab % 2 * 2 + 2)
        part = cases.Operands(lhs[slab], given.rhs[experts], given.bias[experts], grad[slab])
        out, d_rows, d_kernel, d_bias = expected(part, pair)
        want[0][slab], want[1][slab] = out, d_rows
        want[2][experts] += d_kernel
        want[3][experts] += d_bias
    assert_close(run(lhs, grad), want, 1e-6)


def test_sizes_past_the_slab_are_cut() -> None:
    given = cases.operands((cases.ROWS,), 7, (5,))
    sizes, cut = jnp.int32([100, 150, 9, 9]), (100, 92, 0, 0)
    assert_close(compiled()(*given, sizes), expected(given, cut), 1e-6)


def test_slabs_without_rows_and_devices_without_groups() -> None:
    given = cases.operands((0,), 32, (32,))
    for recipe in (recipes.TensorScaling(), recipes.MXFP8()):
        none = jax.tree.map(lambda x: x[:0], given)._replace(rhs=given.rhs, bias=given.bias)
        out, d_rows, d_kernel, d_bias = quantized(recipe)(*none, jnp.zeros(4, jnp.int32))[1]
        assert (out.shape, d_rows.shape) == ((0, 32), (0, 32))
        np.testing.assert_array_equal(d_kernel, np.zeros_like(given.rhs))
        np.testing.assert_array_equal(d_bias, np.zeros_like(given.bias))
    rows = gemm_plain.forward(F32, given.lhs, given.rhs[:0], None, jnp.zeros(0, jnp.int32))
    np.testing.assert_array_equal(rows, np.zeros((cases.ROWS, 32)))


SLABS = [[0, 0], [70, 0], [0, 0], [0, 96], [1, 64], [0, 0]]  # of 96 rows each


@pytest.mark.parametrize(
    ("capacity", "sizes"),
    [*((cases.ROWS, [sizes]) for sizes in cases.SIZES.values()), (96, SLABS)],
    ids=[*cases.SIZES, "slabs"],
)
def test_work_follows_the_rows_that_are_there(capacity: int, sizes: Any) -> None:
    """The loop's steps are blocks of rows, whatever the capacity and the number of experts."""
    blocks = row_blocks.cut(capacity, jnp.int32(sizes))
    place, steps, seen = jnp.int32(0), 0, []
    while place < blocks.end[-1]:
        block, place = blocks.at(place)
        rows = np.asarray(block.row)[np.asarray(block.valid)]
        seen += [(int(block.group), int(row)) for row in rows]
        steps += 1
    assert steps == sum(-(-size // blocks.rows) for slab in sizes for size in slab)
    zones = [
        (number * len(slab) + group, number * capacity + row)
        for number, slab in enumerate(sizes)
        for group, rows in reference.zones(slab)
        for row in range(rows.start, rows.stop)
    ]
    assert seen == zones


@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=str)
def test_a_program_is_as_long_for_many_experts(recipe: Any) -> None:
    def operations(experts: int) -> int:
        args = [
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((256, 32), (experts, 32, 32), (experts, 32), (256, 32))
        ]
        run = compiled() if recipe is None else quantized(recipe)
        text = run.lower(*args, jax.ShapeDtypeStruct((experts,), jnp.int32)).as_text()
        return len(re.findall(r" = ", text))

    assert operations(8) == operations(256)


def test_in_a_manual_region_that_tracks_what_varies() -> None:
    """Rows over (dp, ep), kernels over ep; amax over dp; the caller sums gradients."""
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(5)
    lhs = rng.standard_normal((8, 32, 32)).astype(np.float32)
    rhs = rng.standard_normal((8, 32, 32)).astype(np.float32)
    sizes = rng.integers(0, 16, (8, 2)).astype(np.int32)
    recipe = recipes.TensorScaling()

    def local(lhs: Any, rhs: Any, sizes: Any) -> Any:
        rows = quantize_plain.quantize_rows(recipe, lhs[0], sizes[0], ("dp",))
        kernel = quantize_plain.quantize_kernel(recipe, rhs)
        out = gemm_plain.forward(F32, rows, kernel, None, sizes[0])
        d_kernel = gemm_plain.weight_grad(F32, rows, out, sizes[0])
        return out[None], rows.amax, jax.lax.psum(d_kernel, "dp")

    slab, ep = PartitionSpec(("dp", "ep")), PartitionSpec("ep")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(slab, ep, slab), out_specs=(slab, ep, ep))
    out, amax, d_kernel = jax.jit(mapped)(lhs, rhs, sizes)
    rows = quantize_plain.quantize_rows(recipe, lhs, sizes, num_experts=8)
    np.testing.assert_array_equal(amax, np.asarray(rows.amax).reshape(2, 8)[0])
    kernel = quantize_plain.quantize_kernel(recipe, rhs)
    whole = gemm_plain.forward(F32, rows, kernel, None, sizes)
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-5)
    summed = gemm_plain.weight_grad(F32, rows, whole, sizes, 8)
    np.testing.assert_allclose(d_kernel, summed, rtol=1e-5, atol=1e-3)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    slack=st.integers(0, 70),
    inner=st.integers(1, 140),
    outer=st.integers(1, 140),
)
def test_random_shapes(sizes: list[int], slack: int, inner: int, outer: int) -> None:
    rng = np.random.default_rng(inner)
    rows = sum(sizes) + slack
    given = cases.Operands(
        rng.standard_normal((rows, inner)).astype(np.float32),
        rng.standard_normal((len(sizes), inner, outer)).astype(np.float32),
        rng.standard_normal((len(sizes), outer)).astype(np.float32),
        rng.standard_normal((rows, outer)).astype(np.float32),
    )
    given.lhs[sum(sizes) :] = given.grad[sum(sizes) :] = np.nan
    assert_close(compiled()(*given, jnp.int32(sizes)), expected(given, sizes), 1e-5)
