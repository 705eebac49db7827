"""Finds the GPU kernels of grouped_gemm in lowered programs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import kernel_programs
from ops.kernel_programs import SIZES, calls, graded, loss, lowered, pulled, spread

import ep_runtime as ep
from ep_runtime_client.ops.gemm import kernel_weights, kernels_16
from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.gemm.product import Product
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.quantize.formats import recipes


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs lower for GPUs without the CUDA library. Another file tests f32."""
    monkeypatch.setattr(serve, "installed", lambda: True)
    monkeypatch.setattr(gemm_plain, "FAMILIES", (kernels_16.KERNELS,))


def drawn(dtype: Any = jnp.bfloat16, k: int = 104, n: int = 88) -> Any:
    return kernel_programs.drawn(k, (n,), dtype)


FORWARD = {kernels_16.TARGETS[0]: 1}
GRADED = {kernels_16.TARGETS[0]: 2, kernels_16.TARGETS[1]: 1}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gpus_get_the_kernels_and_cpus_do_not(dtype: Any) -> None:
    operands = drawn(dtype)
    assert calls(graded(), *operands) == GRADED
    assert calls(graded(), *operands, platform="cpu") == {}
    assert calls(jax.checkpoint(loss), *operands) == FORWARD


@pytest.mark.parametrize(
    "operands", [drawn(jnp.float32), drawn(k=100), drawn(n=84)], ids=["f32", "K'", "N'"]
)
def test_what_the_kernels_do_not_take_is_plain_jax(operands: Any) -> None:
    assert calls(graded(), *operands) == {}


@pytest.mark.parametrize(("experts", "taken"), [(1024, True), (1025, False)])
def test_the_kernels_take_so_many_experts(experts: int, taken: bool) -> None:
    rows = jax.ShapeDtypeStruct((24, 104), jnp.bfloat16)
    product = Product(rows, rows, (experts,), experts, (104, 88))
    assert kernels_16.supports_shape(kernels_16.MULTIPLE, product, 24) == taken


def test_the_bf16_recipe_takes_the_kernels_for_f32_parameters() -> None:
    assert calls(graded(recipe=recipes.BF16()), *drawn(jnp.float32)) == GRADED
    # f32 gradients times bf16 operands are f32 products.
    wide = graded(recipe=recipes.BF16(), out_dtype=jnp.float32)
    assert calls(wide, *drawn(jnp.float32)) == FORWARD


@pytest.mark.parametrize("half", [64, 40])
def test_the_kernels_read_and_make_a_pair_where_it_lies(
    half: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel_weights._say_copied.cache_clear()
    monkeypatch.setattr(serve, "register_for_gpus", lambda: ("9.0",))
    lhs, rhs, bias = drawn(n=2 * half)
    pair = (rhs[..., :half], rhs[..., half:])
    operands = (lhs, pair, bias.reshape(8, 2, half))
    assert calls(graded(), *operands) == GRADED
    text = lowered(graded(), *operands)
    copied = half % 64 != 0
    one = f"tensor<8x104x{2 * half}xbf16>", f"tensor<8x104x2x{half}xbf16>"
    assert any(array in text for array in one) == copied
    said = [record.getMessage() for record in caplog.records if "got 40" in record.getMessage()]
    assert len(said) == int(copied)


def test_gpus_of_another_kind_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_has_kernels", lambda capability: capability != "8.0")
    of_each = (("9.0", "9.0"), GRADED), (("9.0", "8.0"), {}), (("9.0", "10.0"), {})
    for found, wanted in of_each:
        monkeypatch.setattr(serve, "register_for_gpus", lambda found=found: found)
        assert calls(graded(), *drawn(n=40 + 8 * len(set(found)))) == wanted


def test_rows_of_no_group_get_a_gradient_of_zero_unless_nobody_looks() -> None:
    _, rhs, _ = drawn()
    grad = jnp.zeros((2, 192, rhs.shape[-1]), rhs.dtype)
    for clear in (True, False):
        static = gemm_plain.Gemm(rhs.dtype, clear_slack=clear)
        text = lowered(functools.partial(gemm_plain.data_grad, static), grad, rhs, SIZES)
        assert f"clear_slack = {int(clear)} : i64, data_grad = 1" in text


def test_without_the_library_every_program_is_plain_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "installed", lambda: False)
    assert calls(graded(), *drawn(k=136)) == {}


@pytest.mark.parametrize("checked", [True, False], ids=["check_vma", "unchecked"])
def test_a_shard_map_of_the_user_gives_the_same_numbers(checked: bool) -> None:
    operands, run = drawn(), spread(checked)
    assert calls(run, *operands) == GRADED
    whole = pulled(lambda lhs, rhs, bias: ep.grouped_gemm(lhs, rhs, SIZES, bias=bias))
    got, want = jax.jit(run)(*operands), jax.jit(whole)(*operands)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_one_export_serves_both_platforms() -> None:
    operands = drawn()
    exported = jax.export.export(
        jax.jit(graded()), platforms=("cpu", "cuda"), disabled_checks=ep.export_checks()
    )(*operands)
    assert all(f"@{name}(" in exported.mlir_module() for name in kernels_16.TARGETS)
    again = jax.export.deserialize(exported.serialize())
    wanted = jax.jit(graded())(*operands)
    jax.tree.map(np.testing.assert_array_equal, again.call(*operands), wanted)


def test_a_weight_gradient_is_rounded_where_it_is_summed() -> None:
    """f32 sums of a large weight would take twice its memory."""
    lhs, rhs, _ = drawn()

    def run(lhs: Any, rhs: Any) -> Any:
        gemm = gemm_plain.Gemm(jnp.bfloat16)
        return gemm_plain.weight_grad(gemm, lhs, lhs, SIZES, 8, out_dtype=jnp.bfloat16)

    made = [eqn.outvars[0].aval for eqn in jax.make_jaxpr(run)(lhs, rhs).eqns]
    assert made[-1].dtype == jnp.bfloat16
    text = lowered(graded(), *drawn())
    line = next(line for line in text.splitlines() if "@ep_grouped_gemm_dw_v1(" in line)
    assert line.rstrip().endswith("-> tensor<8x104x88xbf16>")
