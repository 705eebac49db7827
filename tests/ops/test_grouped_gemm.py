"""grouped_gemm on one device: values, gradients, recipes, pairs, and errors."""

from __future__ import annotations

import functools
import re
from typing import Any

import grouped_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep
from ep_runtime_client.ops.quantize.formats import recipes

SIZES = {
    "uneven": [[5, 0, 9, 3], [1, 13, 2, 0]],
    "one group with everything": [[0, 24, 0, 0], [24, 0, 0, 0]],
    "nothing": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "full": [[6, 6, 6, 6], [8, 8, 8, 0]],
}


def draw(sizes: Any, *, k: int = 7, n: tuple[int, ...] = (5,)) -> tuple[Any, ...]:
    """lhs [R, 24, K'] with NaN past the last row, rhs, bias, group_sizes; experts are R * L."""
    rng = np.random.default_rng(0)
    sizes = np.array(sizes, np.int32)
    lhs = rng.standard_normal((len(sizes), 24, k)).astype(np.float32)
    for slab, used in enumerate(sizes.sum(-1)):
        lhs[slab, used:] = np.nan
    rhs = rng.standard_normal((sizes.size, k, *n)).astype(np.float32)
    bias = rng.standard_normal((sizes.size, *n)).astype(np.float32)
    return lhs, rhs, bias, sizes


def meant(lhs: Any, rhs: Any, bias: Any, sizes: Any) -> Any:
    """Returns f64 [R, C, *N'] and which rows are defined."""
    out = np.zeros((*lhs.shape[:2], *rhs.shape[2:]))
    defined = np.zeros(lhs.shape[:2], bool)
    for slab, counts in enumerate(sizes):
        row = 0
        for group, count in enumerate(counts):
            expert = (slab * len(counts) + group) % len(rhs)
            part = lhs[slab, row : row + count].astype(np.float64)
            product = np.tensordot(part, rhs[expert].astype(np.float64), 1)
            out[slab, row : row + count] = product + bias[expert]
            defined[slab, row : row + count] = True
            row += count
    return out, defined


@pytest.mark.parametrize("n", [(5,), (2, 3)], ids=["N", "2xM"])
def test_rows_meet_their_experts_kernel(n: tuple[int, ...]) -> None:
    for each in SIZES.values():
        lhs, rhs, bias, sizes = draw(each, n=n)
        out = jax.jit(ep.grouped_gemm)(lhs, rhs, sizes, bias=bias)
        wanted, defined = meant(lhs, rhs, bias, sizes)
        np.testing.assert_allclose(np.array(out)[defined], wanted[defined], rtol=1e-5, atol=1e-5)
    flat = ep.grouped_gemm(lhs[0], rhs[: sizes.shape[1]], sizes[0], bias=bias[: sizes.shape[1]])
    np.testing.assert_array_equal(np.array(flat)[defined[0]], np.array(out)[0][defined[0]])


def test_gradients_are_those_of_the_formula_and_nan_in_the_slack_stays_out() -> None:
    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def given(lhs: Any, rhs: Any, bias: Any, sizes: Any, defined: Any) -> Any:
        out = ep.grouped_gemm(lhs, rhs, sizes, bias=bias)
        return jnp.sin(jnp.where(defined[..., None], out, 0)).sum()

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def dense(lhs: Any, rhs: Any, bias: Any, row_expert: Any, defined: Any) -> Any:
        out = jnp.einsum("rck,rckn->rcn", lhs, rhs[row_expert]) + bias[row_expert]
        return jnp.sin(jnp.where(defined[..., None], out, 0)).sum()

    for each in SIZES.values():
        lhs, rhs, bias, sizes = draw(each)
        _, defined = meant(lhs, rhs, bias, sizes)
        experts = (np.arange(sizes.size) % len(rhs)).reshape(sizes.shape)
        row_expert = np.zeros(defined.shape, np.int32)
        for slab, counts in enumerate(sizes):
            row_expert[slab, : counts.sum()] = np.repeat(experts[slab], counts)
        grads = given(lhs, rhs, bias, sizes, defined)
        wanted = dense(np.where(defined[..., None], lhs, 0), rhs, bias, row_expert, defined)
        np.testing.assert_allclose(np.array(grads[0])[defined], wanted[0][defined], 1e-4, 1e-4)
        for got, want in zip(grads[1:], wanted[1:], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


RECIPES = [
    (recipes.TensorScaling(), 0.09, 64),
    (recipes.TensorScaling(), 0.09, 65),  # not a multiple of anything that kernels need
    (recipes.BlockScaling(), 0.06, 64),
    (recipes.BlockScaling(), 0.06, 65),
    (recipes.BlockScaling(power_of_two_scales=True), 0.08, 64),
    (recipes.MXFP8(), 0.08, 64),
]


@pytest.mark.parametrize(("recipe", "tolerance", "k"), RECIPES)
def test_a_recipe_quantizes_both_operands_and_the_gradient(
    recipe: Any, tolerance: float, k: int
) -> None:
    lhs, rhs, bias, sizes = draw([[5, 0, 9, 3], [1, 13, 2, 0]], k=k, n=(k // 2,))
    lhs = np.pad(np.nan_to_num(lhs), ((0, 0), (0, 8), (0, 0)))
    defined = np.arange(32) < sizes.sum(-1)[:, None]

    def loss(lhs: Any, rhs: Any, **options: Any) -> Any:
        out = ep.grouped_gemm(lhs, rhs, sizes, bias=bias, **options)
        return jnp.sin(jnp.where(defined[..., None], out, 0) / 8).sum(), out

    def both(**options: Any) -> Any:
        f = jax.grad(lambda *args: loss(*args, **options), argnums=(0, 1), has_aux=True)
        return jax.jit(f)

    (exact, out), (rounded, quantized) = both()(lhs, rhs), both(recipe=recipe)(lhs, rhs)
    assert not np.array_equal(np.array(out)[defined], np.array(quantized)[defined])
    for got, want in zip((*rounded, quantized), (*exact, out), strict=True):
        keep = defined if got.shape[:2] == defined.shape else slice(None)
        got, want = np.array(got)[keep], np.array(want)[keep]
        assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def test_quantized_operands_give_what_the_recipe_gives_and_pass_gradients_on() -> None:
    lhs, rhs, bias, sizes = draw([[5, 0, 9, 3]], k=64, n=(32,))
    recipe = recipes.TensorScaling()

    def apart(lhs: Any, rhs: Any) -> Any:
        q_lhs, q_rhs = (
            ep.grouped_quantize(lhs, sizes, recipe),
            ep.grouped_quantize(rhs, None, recipe),
        )
        return ep.grouped_gemm(q_lhs, q_rhs, sizes, recipe=recipe, out_dtype=jnp.float32)[0, :17]

    def together(lhs: Any, rhs: Any) -> Any:
        return ep.grouped_gemm(lhs, rhs, sizes, recipe=recipe)[0, :17]

    def run(f: Any) -> Any:
        def loss(*args: Any) -> Any:
            out = f(*args)
            return jnp.sin(out).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(lhs, rhs)

    (grads, out), (wanted, same) = run(apart), run(together)
    np.testing.assert_array_equal(out, same)
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_array_equal(np.array(got)[..., :17, :], np.array(want)[..., :17, :])


def test_bf16_rounds_operands_alone_and_out_dtype_is_free() -> None:
    lhs, rhs, _, sizes = draw([[24, 0, 0, 0], [0, 0, 0, 24]])
    out = ep.grouped_gemm(lhs, rhs, sizes, recipe=recipes.BF16(), out_dtype=jnp.float32)
    rounded = [np.array(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (lhs, rhs)]
    wanted, _ = meant(*rounded, np.zeros((8, 5)), sizes)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


# Each recipe with a dtype, and each dtype with and without a recipe.
DTYPES = [
    *((None, jnp.dtype(dtype)) for dtype in ("f4", "bfloat16", "f2")),
    *zip(cases.RECIPES, map(jnp.dtype, ("f4", "bfloat16", "f2", "bfloat16", "f4")), strict=True),
]


@pytest.mark.parametrize(("recipe", "dtype"), DTYPES, ids=str)
def test_results_have_the_dtype_of_rows_or_of_the_recipe_or_what_is_asked(
    recipe: Any, dtype: Any
) -> None:
    lhs, rhs, sizes = jnp.ones((1, 32, 32), dtype), jnp.ones((1, 32, 32), dtype), jnp.int32([[32]])

    def shapes(lhs: Any, rhs: Any) -> Any:
        gemm = functools.partial(ep.grouped_gemm, recipe=recipe)
        asked = gemm(lhs, rhs, sizes, out_dtype=jnp.float32)
        return gemm(lhs, rhs, sizes), ep.dense(lhs[0], rhs[0], recipe=recipe), asked

    wanted = jnp.bfloat16 if recipe == recipes.BF16() else dtype
    found = jax.eval_shape(shapes, lhs, rhs)
    assert [one.dtype for one in found] == [wanted, wanted, jnp.float32]
    if recipe is not None:
        q = jax.eval_shape(lambda x: ep.grouped_quantize(x, sizes, recipe), lhs)
        product = jax.eval_shape(lambda q, w: ep.grouped_gemm(q, w, sizes), q, rhs)
        assert product.dtype == jnp.bfloat16


def test_remat_with_saved_copies_quantizes_each_operand_once() -> None:
    lhs, rhs, _, sizes = draw([[5, 0, 9, 3]], k=64, n=(32,))
    recipe = recipes.TensorScaling()

    def step(lhs: Any, rhs: Any) -> Any:
        return jnp.sin(ep.grouped_gemm(jnp.nan_to_num(lhs), rhs, sizes, recipe=recipe)).sum()

    def casts(policy: Any) -> int:
        f = jax.checkpoint(step, policy=policy)
        text = jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(lhs, rhs).as_text("hlo")
        return sum(
            "f8e4m3fn[" in line and " convert(" in line.split("=")[1] for line in text.splitlines()
        )

    saved = casts(ep.remat_policy(save=("ep_q_x", "ep_q_w")))
    assert casts(jax.checkpoint_policies.nothing_saveable) == 2 * saved
    assert saved == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lhs": np.zeros((2, 24, 6), np.float32)}, ["rhs", "[E, 6"]),
        ({"lhs": np.zeros((3, 24, 7), np.float32)}, ["lhs", "[2, C, K']", "[3, 24, 7]"]),
        ({"lhs": np.zeros((2, 24, 7), np.int32)}, ["lhs", "int32"]),
        ({"rhs": np.zeros((8, 7), np.float32)}, ["rhs", "[8, 7]"]),
        ({"sizes": np.zeros((2, 4), np.float32)}, ["group_sizes", "float32"]),
        ({"bias": np.zeros((8, 4), np.float32)}, ["bias", "[8, 5]", "[8, 4]"]),
        ({"recipe": "fp8"}, ["recipe", "'fp8'"]),
    ],
)
def test_operands_that_do_not_fit_are_named_with_their_sizes(change: Any, words: Any) -> None:
    lhs, rhs, bias, sizes = draw(SIZES["full"])
    given = {"lhs": lhs, "rhs": rhs, "bias": bias, "sizes": sizes, "recipe": None} | change
    with pytest.raises(ValueError, match="must be") as caught:
        ep.grouped_gemm(
            given["lhs"], given["rhs"], given["sizes"], bias=given["bias"], recipe=given["recipe"]
        )
    for word in words:
        assert word in str(caught.value)


def test_vmap_is_refused_with_the_reason() -> None:
    lhs, rhs, _, sizes = draw(SIZES["full"])
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(lambda x: ep.grouped_gemm(x, rhs, sizes))(jnp.stack([lhs, lhs]))


def test_delayed_scaling_takes_scales_from_the_history_and_pushes_this_amax() -> None:
    lhs, rhs, _, sizes = draw([[5, 0, 9, 3], [1, 13, 2, 0]], k=32, n=(16,))
    defined = np.arange(24) < sizes.sum(-1)[:, None]
    recipe = recipes.TensorScaling(delayed=True, history=2)
    state = recipe.init_state(8)

    def loss(lhs: Any, rhs: Any, state: Any) -> Any:
        out, after = ep.grouped_gemm(lhs, rhs, sizes, recipe=recipe, state=state)
        return jnp.sin(jnp.where(defined[..., None], out, 0)).sum(), (out, after)

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    grads, (_, first) = run(lhs, rhs, state)
    for leaf in jax.tree.leaves(grads[2]):
        np.testing.assert_array_equal(leaf, np.zeros((2, 8)))
    current = ep.grouped_quantize(lhs, sizes, recipes.TensorScaling()).amax
    np.testing.assert_array_equal(first.x, [np.ravel(current), np.zeros(8)])
    np.testing.assert_array_equal(first.w, [np.abs(rhs).max((1, 2)), np.zeros(8)])
    # From then on, the history of equal calls gives the results of current scaling.
    delayed, (out, second) = run(lhs, rhs, first)
    np.testing.assert_array_equal(second.x, [first.x[0], first.x[0]])
    now = ep.grouped_gemm(lhs, rhs, sizes, recipe=recipes.TensorScaling())
    np.testing.assert_array_equal(np.array(out)[defined], np.array(now)[defined])
    assert np.isfinite(delayed[1]).all()
    # A larger value is cut off, because the history does not contain it yet.
    cut, (_, third) = run(lhs * 4, rhs, second)
    np.testing.assert_array_equal(third.x[0], 4 * first.x[0])


@pytest.mark.parametrize(
    ("recipe", "state", "words"),
    [
        (recipes.TensorScaling(delayed=True), None, "needs state="),
        (recipes.TensorScaling(), recipes.TensorScaling(delayed=True).init_state(8), "state goes"),
        (
            recipes.TensorScaling(delayed=True, history=3),
            recipes.TensorScaling(delayed=True, history=2).init_state(8),
            r"\[3, 8\], got float32 \[2, 8\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_the_recipe_is_an_error(
    recipe: Any, state: Any, words: str
) -> None:
    lhs, rhs, _, sizes = draw(SIZES["full"])
    with pytest.raises(ep.InvalidArgumentError, match=words):
        ep.grouped_gemm(lhs, rhs, sizes, recipe=recipe, state=state)


PAIR_SIZES = np.array([[5, 0, 40, 3], [1, 13, 2, 30]], np.int32)
EXPERTS, ROWS, K, M = 4, 64, 160, 96  # neither is a multiple of a block of 128


def draw_pair(dtype: Any) -> tuple[Any, Any, Any, Any]:
    """lhs, rhs [E, K', 2, M], bias, grad; rows past the last group are NaN."""
    rng = np.random.default_rng(0)
    shapes = [(2, ROWS, K), (EXPERTS, K, 2, M), (EXPERTS, 2, M), (2, ROWS, 2, M)]
    lhs, rhs, bias, grad = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    for slab, used in enumerate(PAIR_SIZES.sum(-1)):
        lhs[slab, used:] = grad[slab, used:] = np.nan
    rhs[:, :, 1] *= 3  # gate alone would have another amax
    return tuple(jnp.array(x, dtype) for x in (lhs, rhs, bias, grad))


def apart(rhs: Any) -> tuple[Any, Any]:
    return rhs[:, :, 0], rhs[:, :, 1]


def step(recipe: Any, lhs: Any, rhs: Any, bias: Any, grad: Any) -> Any:
    """Values and gradients of one product, and the next state of a delayed recipe."""
    delayed = recipe is not None and recipe.delayed
    state = recipe.init_state(EXPERTS) if delayed else None

    def forward(lhs: Any, rhs: Any, bias: Any) -> Any:
        made = ep.grouped_gemm(lhs, rhs, PAIR_SIZES, bias=bias, recipe=recipe, state=state)
        return made if delayed else (made, None)

    out, pull, state = jax.vjp(forward, lhs, rhs, bias, has_aux=True)
    return out, pull(grad.astype(out.dtype)), state


def defined(out: Any) -> Any:
    return np.array(out)[np.arange(ROWS) < PAIR_SIZES.sum(-1)[:, None]]


DELAYED = recipes.TensorScaling(delayed=True, history=2)
STEPS = [(None, "bfloat16"), *((r, "float32") for r in (None, *cases.RECIPES, DELAYED))]


@pytest.mark.parametrize(("recipe", "dtype"), STEPS, ids=repr)
def test_values_and_gradients_are_those_of_the_one_array_bit_for_bit(
    recipe: Any, dtype: str
) -> None:
    lhs, rhs, bias, grad = draw_pair(dtype)
    run = jax.jit(step, static_argnums=0)
    out, (d_lhs, d_rhs, d_bias), state = run(recipe, lhs, rhs, bias, grad)
    found = run(recipe, lhs, apart(rhs), bias, grad)
    np.testing.assert_array_equal(defined(found[0]), defined(out))
    np.testing.assert_array_equal(defined(found[1][0]), defined(d_lhs))
    assert isinstance(found[1][1], tuple)
    for got, want in zip(found[1][1], apart(d_rhs), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.array(got), np.array(want))
    assert np.any(np.array(found[1][1][1]))
    np.testing.assert_array_equal(np.array(found[1][2]), np.array(d_bias))
    jax.tree.map(np.testing.assert_array_equal, found[2], state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_program_holds_the_weights_as_one_array(dtype: str) -> None:
    lhs, rhs, bias, grad = draw_pair(dtype)
    lowered = jax.jit(step, static_argnums=0).lower(None, lhs, apart(rhs), bias, grad)
    both = re.compile(rf"\[{EXPERTS},{K},(2,{M}|{2 * M})\]")
    assert not both.search(lowered.compile().as_text())
    assert not both.search(lowered.as_text("hlo"))
    one = jax.jit(step, static_argnums=0).lower(None, lhs, rhs, bias, grad)
    assert both.search(one.compile().as_text())


def test_a_call_of_concrete_arrays_takes_a_pair_too() -> None:
    lhs, rhs, bias, _ = draw_pair("float32")
    found = ep.grouped_gemm(lhs, apart(rhs), PAIR_SIZES, bias=bias)
    np.testing.assert_array_equal(
        defined(found), defined(ep.grouped_gemm(lhs, rhs, PAIR_SIZES, bias=bias))
    )


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (lambda rhs: (rhs[:, :, 0],), "a pair (gate, up), got 1 values"),
        (lambda rhs: (rhs[:, :, 0], rhs[:, :, 1, 1:]), "[4, 160, 96] and float32[4, 160, 95]"),
        (
            lambda rhs: (rhs[:, :, 0], rhs[:, :, 1].astype("bfloat16")),
            "float32[4, 160, 96] and bfloat16[4, 160, 96]",
        ),
        (lambda rhs: (rhs, rhs), "two arrays [E, K', M]"),
    ],
)
def test_a_pair_that_is_none_is_refused_with_its_shapes(pair: Any, words: str) -> None:
    lhs, rhs, _, _ = draw_pair("float32")
    with pytest.raises(ep.InvalidArgumentError) as caught:
        ep.grouped_gemm(lhs, pair(rhs), PAIR_SIZES)
    assert words in str(caught.value)
