"""Finds the GPU kernels that work on rows in lowered programs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.kernel_programs import lowered

import ep_runtime as ep
from ep_runtime_client.ops.activation import function
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.activation import plain as activation_plain
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.gemm import kernels_bias
from ep_runtime_client.ops.gemm import plain as gemm_plain
from ep_runtime_client.ops.kernels import move_rows, serve
from ep_runtime_client.ops.quantize import kernels as quantize_kernels
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats import recipes
from ep_runtime_client.ops.transports import fp8_sums, nodes

SIZES = np.int32([[5, 0, 9], [1, 13, 2]])
BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(autouse=True)
def _available(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    """Programs lower for GPUs on machines without one."""
    monkeypatch.setattr(serve, "available", lambda: True)


def calls(function: Any, *operands: Any, platform: str = "cuda") -> list[str]:
    """Returns the row kernels of the program, sorted by name."""
    text = lowered(function, *operands, platform=platform)
    return [name for name in sorted(TARGETS) for _ in range(text.count(f"@{name}("))]


TARGETS = (
    *activation_kernels.TARGETS,
    *quantize_kernels.TARGETS,
    *move_rows.TARGETS,
    *kernels_bias.TARGETS,
)


def drawn(*shape: int, dtype: Any = BF16) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def activated(static: Activation, hidden: Any, weights: Any, grad: Any) -> Any:
    out = activation_plain.forward(static, hidden, weights, SIZES)
    return out, activation_plain.pullback(static, hidden, weights, SIZES, grad)


@pytest.mark.parametrize("weighted", [False, True], ids=["bare", "weighted"])
@pytest.mark.parametrize("shape", [(2, 24), (48,)], ids=["pair", "halves"])
def test_gpus_activate_by_kernels_and_cpus_do_not(shape: Any, weighted: bool) -> None:
    operands = (
        drawn(2, 20, *shape),
        drawn(2, 20, dtype=np.float32) if weighted else None,
        drawn(2, 20, 24),
    )
    run = functools.partial(activated, Activation("swish", True, BF16))
    assert calls(run, *operands) == sorted(activation_kernels.TARGETS)
    assert calls(run, *operands, platform="cpu") == []
    there = np.arange(20) < SIZES.sum(1, keepdims=True)
    found = jax.jit(run)(*operands)
    assert np.isfinite(np.asarray(found[0], np.float32)[there]).all()


def test_every_named_function_has_a_kernel() -> None:
    assert {*activation_kernels.FUNCTIONS} == {*function.ACTIVATIONS}
    numbers = {function.ACTIVATIONS[n]: k for n, k in activation_kernels.FUNCTIONS.items()}
    assert sorted(numbers.values()) == list(range(7))


@pytest.mark.parametrize(
    ("static", "inner"),
    [
        (Activation(jax.nn.silu, True, BF16), 24),
        (Activation("silu", True, jnp.dtype(jnp.float32)), 24),
        (Activation("silu", True, BF16), 20),
    ],
    ids=["a function", "another dtype", "M of 20"],
)
def test_what_the_kernels_do_not_take_is_plain_jax(static: Activation, inner: int) -> None:
    grad = drawn(2, 20, inner, dtype=static.dtype)
    run = functools.partial(activated, static)
    assert calls(run, drawn(2, 20, 2, inner), None, grad) == []


def test_gradients_take_the_memory_of_what_they_are_of() -> None:
    run = functools.partial(activated, Activation("gelu", False, BF16))
    text = lowered(run, drawn(2, 20, 16), None, drawn(2, 20, 16))
    line = next(line for line in text.splitlines() if "@ep_activation_bwd_v1(" in line)
    assert "output_operand_alias<output_tuple_indices = [0], operand_index = 1" in line


_QUANTIZED = {
    "tensor": (recipes.TensorScaling(), ["ep_group_amax_v1", "ep_scale_rows_v1"]),
    "blocks": (recipes.BlockScaling(), ["ep_quantize_tiles_v1"]),
    "blocks of e5m2": (
        recipes.BlockScaling(True, gradient_dtype="float8_e5m2"),
        ["ep_quantize_tiles_v1"],
    ),
    "mx": (recipes.MXFP8(), ["ep_quantize_mx_v1"]),
}


@pytest.mark.parametrize(("recipe", "wanted"), _QUANTIZED.values(), ids=_QUANTIZED)
@pytest.mark.parametrize("middle", [(), (2,)], ids=["plain", "middle dim"])
def test_gpus_quantize_rows_by_kernels(recipe: Any, wanted: list[str], middle: Any) -> None:
    def run(x: Any, sizes: Any) -> Any:
        return quantize_plain.quantize_rows(recipe, x, sizes, gradient=True, num_experts=3)

    operands = (drawn(2, 32, *middle, 160), SIZES)
    assert calls(run, *operands) == wanted
    assert calls(run, *operands, platform="cpu") == []
    flat = (drawn(32, *middle, 96, dtype=np.float16), SIZES[0])
    assert calls(run, *flat) == wanted
    assert "format = 1" in lowered(run, *operands) or "e5m2" not in recipe.gradient_dtype
    found = jax.eval_shape(run, *operands)
    assert found.data.shape == operands[0].shape
    assert found.data.dtype == recipe.data_dtype(gradient=True)


@pytest.mark.parametrize("recipe", [each for each, _ in _QUANTIZED.values()], ids=_QUANTIZED)
@pytest.mark.parametrize("middle", [(), (2,)], ids=["plain", "middle dim"])
def test_gpus_quantize_kernels_by_kernels(recipe: Any, middle: Any) -> None:
    w = drawn(3, 64, *middle, 160, dtype=np.float32)
    run = functools.partial(quantize_plain.quantize_kernel, recipe)
    wanted = {
        "TensorScaling": [*_QUANTIZED["tensor"][1]],
        "BlockScaling": ["ep_quantize_blocks_v1"],
    }
    assert calls(run, w) == wanted.get(type(recipe).__name__, ["ep_quantize_mx_v1"])


def test_rows_of_no_group_are_cleared_where_somebody_may_look() -> None:
    def inside(lhs: Any, rhs: Any) -> Any:
        return ep.grouped_gemm(lhs, rhs, SIZES, recipe=recipes.BlockScaling())

    lhs, rhs = drawn(2, 24, 64), drawn(6, 64, 48)
    assert "clear_slack = 0" in lowered(inside, lhs, rhs)
    given = functools.partial(ep.grouped_quantize, recipe=recipes.BlockScaling())
    text = lowered(given, lhs, SIZES)
    assert "clear_slack = 1" in text
    assert "clear_slack = 0" not in text


@pytest.mark.parametrize(
    ("x", "recipe"),
    [
        (drawn(2, 24, 60), recipes.BlockScaling()),
        (drawn(2, 24, 64), recipes.BF16()),
        (drawn(2, 0, 64), recipes.TensorScaling()),
    ],
    ids=["K' of 60", "no scales", "no rows"],
)
def test_what_is_not_quantized_by_kernels(x: Any, recipe: Any) -> None:
    assert calls(functools.partial(quantize_plain.quantize_rows, recipe), x, SIZES) == []


def sorted_and_back(tokens: Any, choice: Any, weights: Any, scale: Any) -> Any:
    p = ep.permute(tokens, choice, num_experts=5)
    return ep.unpermute(p.tokens * scale, p, merging_probs=weights)


@pytest.mark.parametrize("weighted", [False, True], ids=["bare", "weighted"])
def test_gpus_permute_by_kernels(weighted: bool) -> None:
    choice = np.random.default_rng(1).integers(-1, 5, (12, 3))
    weights = drawn(12, 3, dtype=np.float32) if weighted else None

    def run(tokens: Any, weights: Any, scale: Any) -> Any:
        out, pull = jax.vjp(lambda *args: sorted_and_back(args[0], choice, *args[1:]), *given)
        return out, pull(jnp.cos(out))

    given = (drawn(12, 16), weights, jnp.bfloat16(2))
    # Forward spreads and sums rows, and so does backward.
    assert calls(run, *given) == ["ep_spread_rows_v1"] * 2 + ["ep_sum_rows_v1"] * 2
    assert calls(run, *given, platform="cpu") == []
    narrow = functools.partial(sorted_and_back, choice=choice, weights=weights, scale=1)
    assert calls(narrow, drawn(12, 12)) == []
    ints = functools.partial(ep.permute, topk_idx=choice, num_experts=5)
    assert calls(lambda x: ints(x).tokens, drawn(12, 16, dtype=np.int8)) == ["ep_spread_rows_v1"]


def test_slots_of_a_wide_map_are_not_all_looked_at_for_their_products() -> None:
    routed = np.random.default_rng(1).random((12, 40)) < 0.1

    def run(tokens: Any, weights: Any) -> Any:
        def back(tokens: Any, weights: Any) -> Any:
            p = ep.permute(tokens, routing_map=routed, num_experts=40, num_out_tokens=96)
            return ep.unpermute(p.tokens, p, merging_probs=weights)

        out, pull = jax.vjp(back, tokens, weights)
        return pull(out)

    found = calls(run, drawn(12, 16), drawn(12, 40, dtype=np.float32))
    assert found == ["ep_gather_rows_v1", "ep_spread_rows_v1"] + ["ep_sum_rows_v1"] * 2


def test_one_list_of_chunks_is_sorted_by_a_kernel() -> None:
    order = np.int32([2, 0, 1])

    def run(sizes: Any) -> Any:
        return jax.grad(lambda x: jnp.sin(ep.sort_chunks(x, sizes, order)).sum())

    assert calls(run(SIZES[0]), drawn(40, 8, dtype=np.float32)) == ["ep_gather_rows_v1"] * 2
    assert calls(run(SIZES), drawn(40, 8, dtype=np.float32)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_of_8_bits_are_made_and_added_by_kernels(dtype: str) -> None:
    sums = drawn(20, 328, dtype=jnp.dtype(dtype))
    slot_row = np.random.default_rng(1).integers(-1, 20, (9, 3), dtype=np.int32)

    def run(sums: Any, slot_row: Any) -> Any:
        return nodes.sum_scaled(fp8_sums.scaled(sums), slot_row, sums.dtype)

    names = ["ep_quantize_tiles_v1", "ep_sum_scaled_rows_v1"]
    assert calls(run, sums, slot_row) == names
    assert calls(run, sums, slot_row, platform="cpu") == []
    odd = sums[:, :327]  # not a multiple of the values a lane converts at once
    assert calls(run, odd, slot_row) == []


def test_gradients_of_a_bias_are_summed_by_a_kernel() -> None:
    grad = drawn(2, 24, 2, 16)
    for cast, wanted in ((None, ["ep_group_sums_v1"]), (jnp.float32, [])):
        gemm = gemm_plain.Gemm(BF16, compute_dtype=cast)
        run = functools.partial(gemm_plain.bias_grad, gemm, num_experts=3)
        assert calls(run, grad, SIZES) == wanted
        assert jax.eval_shape(run, grad, SIZES).shape == (3, 2, 16)


def test_one_call_after_the_other_under_vmap() -> None:
    static = Activation("relu", False, BF16)
    mapped = jax.vmap(lambda h, g: activated(static, h, None, g))
    operands = (drawn(3, 2, 20, 8), drawn(3, 2, 20, 8))
    assert calls(mapped, *operands) == sorted(activation_kernels.TARGETS)


def test_gpus_of_another_kind_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(serve, "installed", lambda: True)
    monkeypatch.setattr(serve, "_has_kernels", lambda capability: capability != "8.0")
    several = (("9.0", "9.0"), True), (("9.0", "8.0"), False), (("9.0", "10.0"), True)
    for found, wanted in (((), False), *several):
        monkeypatch.setattr(serve, "register_for_gpus", lambda found=found: found)
        assert serve.available() == wanted
