"""f32 products by GPU kernels in tf32: which programs hold them, and whether their operands give
the right products. Stand-ins multiply in NumPy according to the calls' attributes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import kernel_programs
from ops.kernel_programs import SIZES, calls, graded, loss
from ops.test_fp8_kernels import ranges, transpose_rows, wide_rows

import ep_runtime as ep
from ep_runtime_client.ops.gemm import kernels_8, kernels_16, kernels_32
from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.quantize.pair import Pair

GRADED = {
    "ep_grouped_gemm_v1": 2,
    "ep_tf32_grouped_gemm_dw_v1": 1,
    "ep_transpose_rows_v1": 2,
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    """Programs lower for GPUs without the CUDA library."""
    monkeypatch.setattr(serve, "installed", lambda: True)


def drawn(k: int = 36, n: tuple[int, ...] = (2, 14), dtype: Any = np.float32, **more: Any) -> Any:
    return kernel_programs.drawn(k, n, dtype, **more)


def test_gpus_get_the_kernels_and_cpus_do_not() -> None:
    assert calls(graded(), *drawn()) == GRADED
    assert calls(graded(), *drawn(), platform="cpu") == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_operand_beside_an_f32_one_is_widened(dtype: str) -> None:
    lhs, rhs, bias = drawn(k=40, n=(24,))
    # The incoming gradient has out_dtype.
    assert calls(graded(out_dtype=dtype), lhs, rhs, bias) == GRADED
    found = calls(graded(), lhs.astype(jnp.dtype(dtype)), rhs, bias)
    assert found == {"ep_grouped_gemm_v1": 2, "ep_grouped_gemm_dw_v1": 1}


@pytest.mark.parametrize(
    ("precision", "served"),
    [
        ("default", True),
        ("tensorfloat32", True),
        ("high", False),
        ("highest", False),
        ("float32", False),
    ],
)
def test_precisions_above_tf32_stay_with_xla(precision: str, served: bool) -> None:
    """Backward has the precision that forward was given, wherever it is traced."""
    lhs, rhs, bias = drawn()

    def pulled(*operands: Any) -> Any:
        with jax.default_matmul_precision(precision):
            out, pull = jax.vjp(loss, *operands)
        return pull(jnp.ones_like(out))

    assert calls(pulled, lhs, rhs, bias) == (GRADED if served else {})


@pytest.mark.parametrize(
    "given", [{"k": 38}, {"n": (3, 7)}, {"dtype": np.float64}], ids=["K'", "N'", "f64"]
)
def test_what_the_kernels_do_not_take_is_not_theirs(given: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        assert calls(graded(), *drawn(**given)) == {}


def test_shapes_that_gpus_run_as_plain_jax_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "register_for_gpus", lambda: ("9.0",))
    for _ in range(2):
        calls(loss, *drawn(k=42))
    said = [line.message for line in caplog.records if "K'=42" in line.message]
    assert [line.count("multiples of 4") for line in said] == [1]


def test_exports_hold_the_kernels_for_gpus() -> None:
    exported = jax.export.export(
        jax.jit(graded()), platforms=("cpu", "cuda"), disabled_checks=ep.export_checks()
    )(*drawn())
    assert "@ep_tf32_grouped_gemm_dw_v1(" in exported.mlir_module()


# The code below calls the stand-ins.


def rounded(x: Any) -> Any:
    """Rounds to tf32, ties to even, and returns f64."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    even = (bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), even.view(np.float32), x).astype(np.float64)


def multiply_rows(shape: Any, sizes: Any, lhs: Any, rhs: Any, bias: Any, **way: Any) -> Any:
    return wide_rows(shape, sizes, rounded(lhs), rounded(rhs), bias, **way)


def multiply_columns(shape: Any, sizes: Any, lhs: Any, grad: Any, *, slab_rows: int) -> Any:
    out = np.zeros(shape)
    x, g = rounded(lhs), rounded(grad)
    for group, first, last in ranges(sizes, slab_rows, padded=True):
        last = first + -(-(last - first) // 32) * 32
        out[group % shape[0]] += x[:, first:last] @ g[:, first:last].T
    return out


def transposed_rows(shape: Any, sizes: Any, rows: Any) -> Any:
    """Moves f32 values as four separate bytes."""
    parts = np.asarray(rows).view(np.uint8).reshape(*rows.shape, 4)
    moved = [transpose_rows(shape, sizes, parts[..., byte]) for byte in range(4)]
    return np.stack(moved, -1).reshape(*shape, 4).view(np.float32)[..., 0]


STANDS_IN = {
    "ep_grouped_gemm_v1": multiply_rows,
    "ep_tf32_grouped_gemm_dw_v1": multiply_columns,
    "ep_transpose_rows_v1": transposed_rows,
}


def stand_in(target: str, shapes: Any, *operands: Any, **way: Any) -> list[jax.Array]:
    given = [np.asarray(x) for x in operands]
    if len(given) == 5:  # the second array of a pair
        given[2] = np.concatenate([given[2], given.pop()], 2)
    copies: list[jax.Array] = []
    if way.get("data_grad") == 0:  # the call's memory for transposed weights
        *shapes, copy = shapes
        assert copy == np.swapaxes(given[2], 1, 2).shape
        copies = [jnp.full(copy, jnp.nan)]
    shape = (*shapes[0][:-1], len(shapes) * shapes[0][-1])
    made: Any = STANDS_IN[target](shape, *given, **way)
    assert made.shape == shape
    parts = np.split(made, len(shapes), -1)
    return [*(jnp.asarray(part, jnp.float32) for part in parts), *copies]


def stand_in_as(target: str, shapes: Any, dtype: Any, *operands: Any, **way: Any) -> Any:
    return [made.astype(dtype) for made in stand_in(target, shapes, *operands, **way)]


@pytest.mark.parametrize("experts", [8, 4], ids=["own experts", "shared experts"])
def test_what_the_kernels_are_given_makes_the_products(
    experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_8, "calls", stand_in_as)
    monkeypatch.setattr(kernels_16, "_calls", stand_in_as)
    lhs, rhs, bias = (jnp.asarray(x) for x in drawn(experts=experts))
    rng = np.random.default_rng(1)
    grad = jnp.asarray(rng.standard_normal((2, 192, 2, 14)), jnp.float32)
    sizes, gemm = jnp.asarray(SIZES), gemm_plain.Gemm(jnp.float32)

    @jax.jit
    def products(lhs: Any, rhs: Any, grad: Any) -> Any:
        return (
            gemm_plain._forward(gemm, lhs, rhs, bias, sizes),
            gemm_plain._gradients(gemm, None, rhs, grad, sizes)[0],
            gemm_plain._gradients(gemm, lhs, None, grad, sizes, experts, jnp.float32)[0],
        )

    out, d_rows, want = products(lhs, rhs, grad)
    near(kernels_16.forward(jnp.float32, jnp.float32, lhs, rhs, bias, sizes), out)
    got = kernels_16.data_grad(jnp.float32, jnp.float32, True, grad, rhs, sizes)
    near(got, d_rows)
    for slab, used in enumerate(SIZES.sum(-1)):
        np.testing.assert_array_equal(got[slab, used:], 0)
    got = kernels_32.weight_grad(jnp.float32, None, experts, False, lhs, grad, sizes)
    assert np.abs(np.asarray(got - want)).max() <= limit(want)


@pytest.mark.parametrize("half", [64, 14])
def test_a_pair_makes_the_products_of_its_one_array(
    half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that can read two arrays do so; for others the arrays are copied into one."""
    seen: list[int] = []

    def counted(target: str, shapes: Any, dtype: Any, *operands: Any, **way: Any) -> Any:
        seen.append(len(shapes) + len(operands))
        return stand_in(target, shapes, *operands, **way)

    monkeypatch.setattr(kernels_8, "calls", counted)
    monkeypatch.setattr(kernels_16, "_calls", counted)
    rng = np.random.default_rng(0)
    shapes = [(2, 192, 36), (8, 36, 2, half), (8, 2, half), (2, 192, 2, half)]
    lhs, rhs, bias, grad = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    sizes = jnp.asarray(SIZES)

    def products(rhs: Any, paired: bool) -> list[Any]:
        seen.clear()
        return [
            kernels_16.forward(jnp.float32, jnp.float32, lhs, rhs, bias, sizes),
            kernels_16.data_grad(jnp.float32, jnp.float32, True, grad, rhs, sizes),
            kernels_32.weight_grad(jnp.float32, None, 8, paired, lhs, grad, sizes),
        ]

    want, alone = products(rhs, False), [*seen]
    got = products(Pair(rhs[:, :, 0], rhs[:, :, 1]), True)
    apart = int(half % 64 == 0)
    assert seen == [count + apart * (index in (0, 1, 4)) for index, count in enumerate(alone)]
    got[2] = jnp.stack([got[2].gate, got[2].up], 2)
    for mine, meant in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, meant)


def limit(want: Any) -> float:
    """Each operand is off by up to 2^-11, a product by less than twice that."""
    return 2.0**-10 * float(np.abs(np.asarray(want)).max())


def near(got: Any, want: Any) -> None:
    for slab, used in enumerate(SIZES.sum(-1)):
        np.testing.assert_allclose(got[slab, :used], want[slab, :used], rtol=0, atol=limit(want))
