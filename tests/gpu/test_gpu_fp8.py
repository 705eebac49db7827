"""Grouped GEMM of 8-bit recipes by the GPU kernels: against CPU, and inside programs.

Both sides get the same quantized operands where numbers are compared closely.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import gemm_programs
from gpu.gemm_programs import SIZES, graded, loss, multiply, same_every_time, scanned, spread
from gpu.jobs.layouts import TRIAL
from ops import grouped_cases as cases

from ep_runtime_client.ops.gemm import kernels_8, kernels_16
from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes
from ep_runtime_client.ops.quantize.rounding import quantize_tiles

_RECIPES = {
    "tensor": recipes.TensorScaling(),
    "tensor, e4m3 gradients": recipes.TensorScaling(gradient_dtype="float8_e4m3fn"),
    "block": recipes.BlockScaling(),
    "block, powers of two, e5m2 gradients": recipes.BlockScaling(
        power_of_two_scales=True, gradient_dtype="float8_e5m2"
    ),
    "mx": recipes.MXFP8(),
}
_ON_GPUS = pytest.mark.skipif(TRIAL, reason="the calls are those of GPUs")
_EACH = pytest.mark.parametrize("recipe", _RECIPES.values(), ids=_RECIPES)
# Relative to the sum of magnitudes: tensor cores keep some 13 bits of a stage's sums, a bf16 result
# has 8.
_SUMS, _RESULT = 2e-3, 2.0**-8
# Largest error of a gradient's element relative to the largest element, and of its norm. One 8-bit
# value that rounds to its other neighbour is enlarged by three products in a row: on CPU, noise of
# a thousandth in x changes up to 0.16 and 0.13.
_ONE, _THREE = (2.0**-4, 2.0**-4), (0.25, 0.2)
_SHAPES = [((160, (256,)), "float32"), ((256, (2, 128)), "bfloat16"), ((32, (32,)), "bfloat16")]


@functools.cache
def _products(recipe: Any, out_dtype: str) -> Any:
    """Forward, data gradient and weight gradient of one slab, from quantized operands."""
    gemm = gemm_plain.Gemm(jnp.dtype(out_dtype))

    def run(lhs: Any, rhs: Any, bias: Any, grad: Any, sizes: Any) -> Any:
        return (
            gemm_plain.forward(gemm, lhs, rhs, bias, sizes),
            gemm_plain.data_grad(gemm, grad, rhs, sizes),
            gemm_plain.weight_grad(gemm, lhs, grad, sizes, rhs.shape[0], gemm.out_dtype),
        )

    return jax.jit(run)


def _quantized(recipe: Any, lhs: Any, rhs: Any, grad: Any, sizes: Any) -> Any:
    """Quantizes on CPU, so that data are the same everywhere; rows past the last group are NaN."""
    with jax.default_device(jax.devices("cpu")[0]):
        counts = jnp.asarray(sizes)
        return (
            quantize_plain.quantize_rows(recipe, jnp.asarray(lhs), counts),
            quantize_plain.quantize_kernel(recipe, jnp.asarray(rhs)),
            quantize_plain.quantize_rows(recipe, jnp.asarray(grad), counts, gradient=True),
        )


def _magnitudes(lhs: Any, rhs: Any, grad: Any, bias: Any, sizes: Any) -> Any:
    """Sums of the products' magnitudes, in f64, as the measure of errors."""
    x, w, g = (np.abs(np.asarray(q.dequantize(), np.float64)) for q in (lhs, rhs, grad))
    w, g = w.reshape(*w.shape[:2], -1), g.reshape(len(g), -1)
    out, back, weights = np.zeros((len(x), w.shape[2])), np.zeros(x.shape), np.zeros(w.shape)
    first = 0
    for group, size in enumerate(sizes):
        last = min(first + int(size), len(x))
        out[first:last] = x[first:last] @ w[group] + np.abs(bias[group]).reshape(-1)
        back[first:last] = g[first:last] @ w[group].T
        weights[group] = x[first:last].T @ g[first:last]
        first = last
    return out, back, weights


def _assert_close(got: Any, want: Any, sums: Any, share: float, name: str) -> None:
    got, want = (np.asarray(x).astype(np.float64).reshape(sums.shape) for x in (got, want))
    assert (np.abs(got - want) <= share * sums + 1e-6 * sums.max(initial=1e-9)).all(), (
        name,
        float((np.abs(got - want) / np.maximum(sums, 1e-30)).max()),
    )


@_ON_GPUS
@pytest.mark.parametrize("gradient", [False, True], ids=["rows", "gradients"])
@pytest.mark.parametrize("recipe", [r for name, r in _RECIPES.items() if "block" in name], ids=str)
def test_rows_that_are_contracted_are_quantized_again_bit_for_bit(
    gpus: list[Any], recipe: Any, gradient: bool
) -> None:
    again = jax.jit(kernels_8._requantized_rows)
    for name, sizes in cases.SIZES.items():
        given, counts = cases.operands(sizes, 160, (256,)), np.int32(sizes)
        values = given.grad if gradient else given.lhs
        with jax.default_device(jax.devices("cpu")[0]):
            q = quantize_plain.quantize_rows(
                recipe, jnp.asarray(values), jnp.asarray(counts), gradient=gradient
            )
            wide = np.asarray(q.dequantize(), np.float32)
        data, scales = jax.device_get(again(*jax.device_put((q, counts), gpus[0])))
        first = at = 0
        for size in sizes:
            last = min(first + int(size), len(wide))
            for start in range(first, last, 128):
                block = np.zeros((128, wide.shape[1]), np.float32)
                block[: min(128, last - start)] = wide[start : min(start + 128, last)]
                with jax.default_device(jax.devices("cpu")[0]):
                    bits, its = jax.device_get(
                        quantize_tiles(
                            jnp.asarray(block),
                            {0: 128, 1: 128},
                            q.dtype,
                            recipe.power_of_two_scales,
                        )
                    )
                np.testing.assert_array_equal(data[:, at : at + 128], bits.view(np.uint8).T, name)
                np.testing.assert_array_equal(scales[at // 128], its[0], name)
                at += 128
            first = last


@_EACH
@pytest.mark.parametrize(("shape", "out_dtype"), _SHAPES, ids=str)
def test_products_are_those_of_cpu_for_any_sizes(
    gpus: list[Any], shape: Any, out_dtype: str, recipe: Any
) -> None:
    exact = isinstance(recipe, recipes.MXFP8)
    for name, sizes in cases.SIZES.items():
        given = cases.operands(sizes, *shape)
        lhs, rhs, grad = _quantized(recipe, given.lhs, given.rhs, given.grad, np.int32(sizes))
        operands = (lhs, rhs, given.bias, grad, np.int32(sizes))
        run = _products(recipe, out_dtype)
        want = _products(recipe, "float32")(*jax.device_put(operands, jax.devices("cpu")[0]))
        there = jax.device_put(operands, gpus[0])
        got, again = run(*there), run(*there)
        used = sum(sizes)
        sums = _magnitudes(lhs, rhs, grad, given.bias, sizes)
        rounding = _RESULT if out_dtype == "bfloat16" else 0
        for way, mine, meant, size in zip(("forward", "rows"), got, want, sums, strict=False):
            share = rounding + (1e-5 if exact else _SUMS)
            _assert_close(mine[:used], meant[:used], size[:used], share, f"{name}: {way}")
        share = rounding + (1e-5 if exact else _SUMS)
        _assert_close(got[2], want[2], sums[2], share, f"{name}: weights")
        np.testing.assert_array_equal(np.asarray(got[1])[used:], 0)
        for mine, before in zip(again, got, strict=True):
            kept = slice(None) if mine.ndim == given.rhs.ndim else slice(used)
            np.testing.assert_array_equal(mine[kept], before[kept])


# The tests below run whole programs.
_drawn = functools.partial(gemm_programs.drawn, 128)


@_EACH
@pytest.mark.parametrize(
    ("program", "limits"),
    [(multiply, _ONE), (scanned, _THREE)],
    ids=["plain", "scan with remat"],
)
def test_programs_give_what_they_give_on_cpu_every_time(
    gpus: list[Any], program: Any, limits: tuple[float, float], recipe: Any
) -> None:
    run = graded(functools.partial(program, recipe=recipe))
    got = same_every_time(run, jax.device_put(_drawn(), gpus[0]))
    _compare(got, run(*jax.device_put(_drawn(), jax.devices("cpu")[0])), limits)


def _compare(got: Any, want: Any, limits: tuple[float, float] = _ONE) -> None:
    """Loss and gradients of x, kernel and bias; rows past the last group have zeros.

    A value between two 8-bit ones may be rounded to the other: single gradients differ by more
    than sums do.
    """
    np.testing.assert_allclose(got[0], want[0], rtol=2e-2, atol=1)
    for name, mine, theirs in zip(("x", "kernel", "bias"), got[1], want[1], strict=True):
        mine, theirs = (np.asarray(a).astype(np.float64) for a in (mine, theirs))
        single = limits[0] * max(np.abs(theirs).max(), 1e-9)
        norm = limits[1] * max(float(np.linalg.norm(theirs)), 1e-9)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=single, err_msg=name)
        np.testing.assert_array_less(np.linalg.norm(mine - theirs), norm, err_msg=name)
    for slab, used in enumerate(SIZES.sum(-1)):
        np.testing.assert_array_equal(np.asarray(got[1][0])[slab, used:], 0)


@_EACH
@pytest.mark.parametrize("mode", ["shard_map", "rule"])
def test_spread_over_gpus(gpus: list[Any], mode: str, recipe: Any) -> None:
    """Slabs and experts are sharded over all GPUs."""
    product = functools.partial(multiply, recipe=recipe)
    want = graded(product)(*jax.device_put(_drawn(), jax.devices("cpu")[0]))
    _compare(spread(gpus, mode, product, _drawn()), want)


@_ON_GPUS
@_EACH
def test_compiled_programs_hold_the_calls(gpus: list[Any], recipe: Any) -> None:
    product = functools.partial(multiply, recipe=recipe)
    run = jax.jit(jax.grad(functools.partial(loss, product), argnums=(0, 1)))
    text = run.lower(*jax.device_put(_drawn(), gpus[0])).compile().as_text()
    products = (*kernels_8.TARGETS[:2], *kernels_16.TARGETS)
    found = sum(text.count(f'custom_call_target="{name}"') for name in products)
    assert found == 3  # forward, and for each operand's gradient
    assert " conditional(" not in text
