"""Quantized products by GPU kernels: which programs hold them, and whether their operands give the
right products. Stand-ins multiply in NumPy according to the calls' attributes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.kernel_programs import SIZES, calls, drawn, graded, loss, lowered, spread

import ep_runtime as ep
from ep_runtime_client.ops.gemm import kernels_8, kernels_16
from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.gemm.product import Product
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.quantize.rounding import quantize_tiles

TENSOR, BLOCK, MX = recipes.TensorScaling(), recipes.BlockScaling(), recipes.MXFP8()
RECIPES = pytest.mark.parametrize("recipe", [TENSOR, BLOCK, MX], ids=["tensor", "block", "mx"])


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs lower for GPUs without the CUDA library."""
    monkeypatch.setattr(serve, "installed", lambda: True)


WANTED = {
    TENSOR: {
        "ep_fp8_grouped_gemm_v1": 2,
        "ep_fp8_grouped_gemm_dw_v1": 1,
        "ep_transpose_rows_v1": 2,
        "ep_transpose_weights_v1": 1,
    },
    BLOCK: {
        "ep_fp8_grouped_gemm_v1": 2,
        "ep_fp8_grouped_gemm_dw_v1": 1,
        "ep_transpose_weights_v1": 1,
        "ep_requantize_rows_v1": 2,
    },
    MX: {"ep_grouped_gemm_v1": 2, "ep_grouped_gemm_dw_v1": 1, "ep_dequantize_v1": 6},
}


@RECIPES
def test_gpus_get_the_kernels_and_cpus_do_not(recipe: Any) -> None:
    operands = drawn()
    assert calls(graded(recipe=recipe), *operands) == WANTED[recipe]
    assert calls(graded(recipe=recipe), *operands, platform="cpu") == {}


def test_remat_scan_and_delayed_scales_keep_the_kernels() -> None:
    lhs, rhs, bias = drawn(n=(160,))

    def run(lhs: Any, rhs: Any, bias: Any) -> Any:
        def step(x: Any, scale: Any) -> Any:
            out = ep.grouped_gemm(x, rhs * scale, SIZES, bias=bias, recipe=TENSOR)
            return jnp.tanh(out), None

        scales = jnp.ones(3, jnp.bfloat16)
        return jax.lax.scan(jax.checkpoint(step), lhs, scales)[0].astype(jnp.float32).sum()

    found = calls(jax.grad(run, argnums=(0, 1)), lhs, rhs, bias)
    assert found["ep_fp8_grouped_gemm_dw_v1"] == 1
    recipe = recipes.TensorScaling(delayed=True)
    state = recipe.init_state(8)

    def delayed(lhs: Any, rhs: Any) -> Any:
        return ep.grouped_gemm(lhs, rhs, SIZES, recipe=recipe, state=state)[0]

    assert calls(delayed, lhs, rhs)["ep_fp8_grouped_gemm_v1"] == 1


@pytest.mark.parametrize(
    ("shape", "recipe"),
    [
        ({"k": 152}, TENSOR),
        ({"n": (136,)}, BLOCK),
        ({"n": (2, 64)}, BLOCK),
    ],
    ids=["K' of 152", "N' of 136", "parts of blocks"],
)
def test_what_the_kernels_do_not_take_is_plain_jax(shape: Any, recipe: Any) -> None:
    assert calls(graded(recipe=recipe), *drawn(**shape)) == {}


def test_shapes_that_gpus_run_as_plain_jax_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "register_for_gpus", lambda: ("9.0",))
    for _ in range(2):
        calls(functools.partial(loss, recipe=TENSOR), *drawn(k=120))
    assert [line.message.count("K'=120") for line in caplog.records] == [1]


def test_products_that_are_wide_on_gpus_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "register_for_gpus", lambda: ("9.0",))
    kernels_8._say_wide.cache_clear()
    for recipe in (TENSOR, MX, MX):
        calls(functools.partial(loss, recipe=recipe), *drawn())
    said = [record.getMessage() for record in caplog.records]
    assert [text.count("MXFP8 run in bf16") for text in said] == [1]


def test_gpus_of_another_kind_leave_programs_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "register_for_gpus", lambda: ("9.0", "8.0"))
    monkeypatch.setattr(serve, "_has_kernels", lambda capability: capability != "8.0")
    assert calls(graded(recipe=TENSOR), *drawn(k=192)) == {}


@pytest.mark.parametrize("checked", [True, False], ids=["check_vma", "unchecked"])
def test_a_shard_map_of_the_user_keeps_the_kernels(checked: bool) -> None:
    assert calls(spread(checked, recipe=TENSOR), *drawn()) == WANTED[TENSOR]


@RECIPES
def test_exports_hold_the_kernels_for_gpus(recipe: Any) -> None:
    lhs, rhs, bias = drawn()
    exported = jax.export.export(
        jax.jit(functools.partial(loss, recipe=recipe)),
        platforms=("cpu", "cuda"),
        disabled_checks=ep.export_checks(),
    )(lhs, rhs, bias)
    wanted = "ep_dequantize_v1" if recipe == MX else "ep_fp8_grouped_gemm_v1"
    assert f"@{wanted}(" in exported.mlir_module()


# The code below calls the stand-ins.


def widened(raw: Any, e5m2: int) -> Any:
    return np.asarray(raw).view(jnp.float8_e5m2 if e5m2 else jnp.float8_e4m3fn).astype(np.float64)


def ranges(sizes: Any, slab_rows: int, padded: bool = False) -> Any:
    """Yields (group, first row, row after the last one) of every group, or its range in a padded
    line.
    """
    slabs, groups = sizes.shape
    line = kernels_8.padded_rows(slab_rows, groups) if padded else slab_rows
    for slab in range(slabs):
        start = slab * line
        for group, size in enumerate(np.asarray(sizes[slab])):
            yield slab * groups + group, start, start + int(size)
            start += -(-int(size) // 128) * 128 if padded else int(size)


def multiply_rows(shape: Any, sizes: Any, lhs: Any, rhs: Any, *rest: Any, **way: Any) -> Any:
    lhs_scale, rhs_scale, bias = (np.asarray(x, np.float64) for x in rest)
    out = np.full(shape, np.nan)
    x, w = widened(lhs, way["e5m2"]), widened(rhs, 0)
    if way["block"]:
        x = x * np.repeat(lhs_scale, 128, 1)[:, : x.shape[1]]
        kernel = np.repeat(np.repeat(rhs_scale, 128, 1), 128, 2)
        dims = (0, 1, 2) if way["data_grad"] else (0, 2, 1)
        w = w * kernel.transpose(dims)[:, : w.shape[1], : w.shape[2]]
    for group, first, last in ranges(sizes, len(x) // len(sizes)):
        expert = group % len(w)
        out[first:last] = x[first:last] @ w[expert].T
        if not way["block"]:
            out[first:last] *= lhs_scale.reshape(-1)[group] * rhs_scale[expert]
        if bias.size:
            out[first:last] += bias[expert]
    return np.nan_to_num(out) if way["clear_slack"] else out


def multiply_columns(shape: Any, sizes: Any, lhs: Any, grad: Any, *scales: Any, **way: Any) -> Any:
    out = np.zeros(shape)
    x, g = widened(lhs, 0), widened(grad, way["e5m2"])
    if way["block"]:
        spread = (np.repeat(np.repeat(np.asarray(each), 128, 0), 128, 1).T for each in scales)
        x, g = (a * b[: len(a)] for a, b in zip((x, g), spread, strict=True))
        scales = ()
    for group, first, last in ranges(sizes, way["slab_rows"], padded=True):
        last = first + -(-(last - first) // 128) * 128
        scale = np.prod([np.asarray(each, np.float64).reshape(-1)[group] for each in scales])
        out[group % shape[0]] += scale * (x[:, first:last] @ g[:, first:last].T)
    return out


def transpose_rows(shape: Any, sizes: Any, rows: Any) -> Any:
    out = np.full(shape, 0x7F, np.uint8)  # NaN
    slab_rows = rows.shape[0] // sizes.shape[0]
    places = ranges(sizes, slab_rows, padded=True)
    for (_, first, last), (_, at, end) in zip(ranges(sizes, slab_rows), places, strict=True):
        out[:, at : at + -(-(end - at) // 128) * 128] = 0
        out[:, at:end] = np.asarray(rows)[first:last].T
    return out


def requantize_rows(results: Any, sizes: Any, rows: Any, scale: Any, **way: Any) -> Any:
    """Quantizes the transposed blocks again with quantize_plain, one at a time."""
    data = np.full(results[0].shape, 0x7F, np.uint8)  # NaN
    scales = np.full(results[1].shape, np.nan, np.float32)
    slab_rows = rows.shape[0] // sizes.shape[0]
    dtype = jnp.float8_e5m2 if way["e5m2"] else jnp.float8_e4m3fn
    wide = widened(rows, way["e5m2"]).astype(np.float32)
    wide = wide * np.repeat(np.asarray(scale), 128, 1)[:, : wide.shape[1]]
    places = ranges(sizes, slab_rows, padded=True)
    for (_, first, last), (_, at, _) in zip(ranges(sizes, slab_rows), places, strict=True):
        for start in range(first, last, 128):
            block = np.zeros((128, wide.shape[1]), np.float32)
            block[: min(128, last - start)] = wide[start : min(start + 128, last)]
            to = at + start - first
            made, its = quantize_tiles(
                jnp.asarray(block), {0: 128, 1: 128}, dtype, way["power_of_two"]
            )
            data[:, to : to + 128] = np.asarray(made).view(np.uint8).T
            scales[to // 128] = np.asarray(its)[0]
    return [data, scales]


def dequantize(shape: Any, sizes: Any, data: Any, scale: Any, **way: Any) -> Any:
    wide = scale.view(jnp.float8_e8m0fnu) if scale.dtype == np.uint8 else scale
    factors = np.asarray(wide).astype(np.float64)
    for dim, name in ((1, "line_values"), (2, "column_values")):
        factors = np.repeat(factors, way[name], dim)
    out = widened(data, way["e5m2"]) * factors[:, : shape[1], : shape[2]]
    for _, first, last in ranges(sizes, shape[1]) if sizes.size else ():
        assert np.isfinite(out.reshape(-1, shape[2])[first:last]).all()
    return out


def wide_rows(shape: Any, sizes: Any, lhs: Any, rhs: Any, bias: Any, **way: Any) -> Any:
    out = np.full(shape, np.nan)
    x, w, bias = (np.asarray(each, np.float64) for each in (lhs, rhs, bias))
    for group, first, last in ranges(sizes, len(x) // len(sizes)):
        kernel = w[group % len(w)]
        out[first:last] = x[first:last] @ (kernel.T if way["data_grad"] else kernel)
        out[first:last] += bias[group % len(w)] if bias.size else 0
    return np.nan_to_num(out) if way["clear_slack"] else out


def wide_columns(shape: Any, sizes: Any, lhs: Any, grad: Any) -> Any:
    out = np.zeros(shape)
    x, g = (np.asarray(each, np.float64) for each in (lhs, grad))
    for group, first, last in ranges(sizes, len(x) // len(sizes)):
        out[group % shape[0]] += x[first:last].T @ g[first:last]
    return out


STANDS_IN = {
    "ep_fp8_grouped_gemm_v1": multiply_rows,
    "ep_fp8_grouped_gemm_dw_v1": multiply_columns,
    "ep_transpose_rows_v1": transpose_rows,
    "ep_transpose_weights_v1": lambda shape, w: np.asarray(w).transpose(0, 2, 1),
    "ep_dequantize_v1": dequantize,
    "ep_grouped_gemm_v1": wide_rows,
    "ep_grouped_gemm_dw_v1": wide_columns,
}


def stand_in(target: str, shapes: Any, dtype: Any, *operands: Any, **way: Any) -> list[jax.Array]:
    shape = (*shapes[0][:-1], len(shapes) * shapes[0][-1])
    made = STANDS_IN[target](shape, *(np.asarray(x) for x in operands), **way)
    assert made.shape == shape
    return [jnp.asarray(part, dtype) for part in np.split(made, len(shapes), -1)]


def launched(target: str, results: Any, *operands: Any, **way: Any) -> list[jax.Array]:
    assert target == "ep_requantize_rows_v1"
    made = requantize_rows(results, *(np.asarray(x) for x in operands), **way)
    return [jnp.asarray(each) for each in made]


@pytest.mark.parametrize(
    ("recipe", "experts"),
    [
        (TENSOR, 8),
        pytest.param(TENSOR, 4, marks=pytest.mark.slow),
        (BLOCK, 8),
        pytest.param(BLOCK, 4, marks=pytest.mark.slow),
        pytest.param(MX, 8, marks=pytest.mark.slow),
    ],
    ids=["tensor", "tensor, shared experts", "block", "block, shared experts", "mx"],
)
def test_what_the_kernels_are_given_makes_the_products(
    recipe: Any, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_8, "calls", stand_in)
    monkeypatch.setattr(kernels_8, "launch", launched)
    monkeypatch.setattr(kernels_16, "_calls", stand_in)
    lhs, rhs, bias = (x[:experts] for x in drawn(dtype=np.float32))
    grad = np.random.default_rng(1).standard_normal((2, 192, 2, 128)).astype(np.float32)
    sizes = jnp.asarray(SIZES)
    gemm = gemm_plain.Gemm(jnp.float32)

    @jax.jit
    def quantized(lhs: Any, rhs: Any, grad: Any) -> Any:
        rows = functools.partial(quantize_plain.quantize_rows, recipe)
        kernel = quantize_plain.quantize_kernel(recipe, rhs)
        return rows(lhs, sizes), kernel, rows(grad, sizes, gradient=True)

    @jax.jit
    def products(rows: Any, kernel: Any, grads: Any) -> Any:
        return (
            gemm_plain._forward(gemm, rows, kernel, bias, sizes),
            gemm_plain._gradients(gemm, None, kernel, grads, sizes)[0],
            gemm_plain._gradients(gemm, rows, None, grads, sizes, experts, jnp.float32)[0],
        )

    rows, kernel, grads = quantized(lhs, rhs, grad)
    out, d_rows, want = products(rows, kernel, grads)
    near(kernels_8.forward(jnp.float32, None, rows, kernel, jnp.asarray(bias), sizes), out)
    near(kernels_8.data_grad(jnp.float32, None, False, grads, kernel, sizes), d_rows)
    got = kernels_8.weight_grad(jnp.float32, None, experts, False, rows, grads, sizes)
    limit = 1e-5 * np.abs(np.asarray(want)).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=limit)
    pair = kernels_8.weight_grad(jnp.float32, None, experts, True, rows, grads, sizes)
    np.testing.assert_array_equal(jnp.stack([pair.gate, pair.up], 2), got)


def near(got: Any, want: Any) -> None:
    for slab, used in enumerate(SIZES.sum(-1)):
        limit = 1e-5 * float(np.abs(np.asarray(want)).max())
        np.testing.assert_allclose(got[slab, :used], want[slab, :used], rtol=0, atol=limit)


def test_gradients_of_both_types_and_no_others_are_served() -> None:
    sizes = jnp.asarray(SIZES)
    lhs, rhs, _ = (jnp.asarray(x) for x in drawn(dtype=np.float32))
    quantize = functools.partial(quantize_plain.quantize_rows, TENSOR)
    kernel = jax.eval_shape(functools.partial(quantize_plain.quantize_kernel, TENSOR), rhs)
    rows = jax.eval_shape(quantize, lhs, sizes)
    grads = jax.eval_shape(functools.partial(quantize, gradient=True), lhs, sizes)

    def served(left: QuantizedTensor, right: Any, experts: int = 8) -> bool:
        return kernels_8.supports(Product(left, right, SIZES.shape, experts, (160, 2, 128)))

    assert served(rows, kernel)
    assert served(grads, kernel)
    assert served(rows, grads)
    assert not served(grads, rows)
    assert not served(rows, rhs)
    assert served(rows, grads, experts=1024)
    assert not served(rows, grads, experts=1025)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("recipe", [TENSOR, BLOCK], ids=["tensor", "block"])
def test_kernels_come_from_the_quantizer_in_both_layouts(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = drawn()
    alone = jax.jit(graded(recipe=recipe))(*operands)
    monkeypatch.setattr(serve, "available", lambda: True)
    jax.clear_caches()
    found = calls(graded(recipe=recipe), *operands)
    wanted = {name: n for name, n in WANTED[recipe].items() if name != "ep_transpose_weights_v1"}
    assert found == wanted
    assert lowered(graded(recipe=recipe), *operands).count("@ep_quantize_weights_v1(") == 1
    both = jax.jit(graded(recipe=recipe))(*operands)
    for left, right in zip(both, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    # Odd K' cannot be stored along memory.
    odd = calls(graded(recipe=recipe), *drawn(k=152))
    assert odd == {}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("recipe", [TENSOR, BLOCK], ids=["tensor", "block"])
def test_a_kernel_that_was_quantized_apart_is_transposed_by_no_product(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart(lhs: Any, rhs: Any, bias: Any) -> Any:
        return loss(lhs, ep.grouped_quantize(rhs, None, recipe), bias, recipe=recipe)

    operands = drawn()
    monkeypatch.setattr(serve, "available", lambda: True)
    assert "ep_transpose_weights_v1" not in calls(jax.grad(apart, argnums=(0, 1, 2)), *operands)
    inside = jax.jit(graded(recipe=recipe))(*operands)
    found = jax.jit(jax.grad(apart, argnums=(0, 1, 2)))(*operands)
    for left, right in zip(found, inside, strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("recipe", [TENSOR, BLOCK], ids=["tensor", "block"])
def test_a_copy_with_the_contracted_dim_along_memory_is_what_is_multiplied(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_8, "calls", stand_in)
    monkeypatch.setattr(kernels_8, "launch", launched)
    monkeypatch.delitem(STANDS_IN, "ep_transpose_weights_v1")
    lhs, rhs, bias = (jnp.asarray(x) for x in drawn(dtype=np.float32))
    sizes = jnp.asarray(SIZES)
    rows = jax.jit(functools.partial(quantize_plain.quantize_rows, recipe))(lhs, sizes)
    transposed = functools.partial(quantize_plain.quantize_kernel, recipe, transposed=True)
    kernel = jax.jit(transposed)(rhs)
    assert kernel.transposed is not None
    assert kernel.transposed.shape == (8, 2, 128, 160)
    operands = (rows, kernel, bias, sizes)
    near(
        kernels_8.forward(jnp.float32, None, *operands),
        jax.jit(functools.partial(gemm_plain._forward, gemm_plain.Gemm(jnp.float32)))(*operands),
    )
