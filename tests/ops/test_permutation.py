"""permute and unpermute on one shard, against the reference; and effects of padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import permutations
import pytest
from permutations import CASES, Case
from references import permutation as reference

import ep_runtime as ep

DTYPES = ("uint8", "int8", "float8_e4m3fn", "bfloat16", "float16", "float32")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_are_those_of_the_reference(case: Case) -> None:
    inputs = permutations.inputs_of(case)
    got = permutations.run_ops(case, inputs.joined())
    permutations.assert_same(got, permutations.run_reference(case, inputs))


@pytest.mark.parametrize("from_map", [False, True], ids=["indices", "map"])
def test_nothing_is_dropped_without_a_bound(from_map: bool) -> None:
    """The default room is exact: the worst routing fills it, whatever the alignment."""
    for tokens, experts, alignment in ((1, 3, 8), (9, 4, 4), (5, 7, 3)):
        case = Case("", tokens=tokens, num_experts=experts, top_k=2, from_map=from_map)
        case = permutations.dataclasses.replace(case, align_size=alignment)
        if from_map:
            worst = np.ones((tokens, experts), bool)
            p = ep.permute(np.ones((tokens, 1)), routing_map=worst, **case.options)
        else:
            # One slot for every expert and the rest for one expert fills the most blocks.
            worst = np.minimum(np.arange(tokens * 2), experts - 1).reshape(tokens, 2)
            p = ep.permute(np.ones((tokens, 1)), worst, **case.options)
        assert p.plan.dropped[0] == 0
        assert p.tokens.shape[0] - int(p.group_sizes.sum()) < alignment
        assert int(p.tokens.sum()) == (worst >= 0).sum() if not from_map else worst.sum()


def test_slots_up_to_num_out_tokens_never_drop_for_padding() -> None:
    idx = np.arange(6).reshape(6, 1)
    p = ep.permute(np.ones((6, 2)), idx, num_experts=6, num_out_tokens=6, align_size=16)
    assert p.tokens.shape == (96, 2)
    np.testing.assert_array_equal(p.group_sizes, [[16] * 6])
    np.testing.assert_array_equal(p.plan.dropped, [0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_copied_bit_by_bit(dtype: str) -> None:
    bits = np.random.default_rng(0).integers(0, 100, (9, 5))
    tokens = jnp.asarray(bits).astype(dtype)
    case = Case("", tokens=9, align_size=4)
    idx = permutations.choice_of(case)[0]
    p = ep.permute(tokens, idx, **case.options)
    plan = reference.permutation(idx, num_experts=5, rows=case.rows, alignment=4)
    wanted = np.where((plan.source >= 0)[:, None], np.asarray(tokens)[plan.source // 3], 0)
    assert p.tokens.dtype == tokens.dtype
    np.testing.assert_array_equal(np.asarray(p.tokens), wanted.astype(tokens.dtype))


def test_f64_is_summed_in_f64() -> None:
    with jax.enable_x64(True):
        tokens = np.array([[1.0], [1e-12]])
        idx = np.array([[0, 1], [1, 1]])
        p = ep.permute(tokens, idx, num_experts=2)
        factors = np.array([1.0, 1e-12, 1.0, 1.0])[:, None]
        back = ep.unpermute(p.tokens * factors, p)
        assert back.dtype == jnp.float64
        np.testing.assert_array_equal(back, [[1.0 + 1e-12], [2e-12]])


def test_sums_of_bfloat16_are_rounded_once() -> None:
    """256 + 1 + 1 is 258; rounded after each sum it would stay 256."""
    idx = np.zeros((1, 3), np.int32)
    p = ep.permute(np.ones((1, 4), np.float32), idx, num_experts=1)
    rows = jnp.asarray([[256.0] * 4, [1.0] * 4, [1.0] * 4], jnp.bfloat16)
    back = ep.unpermute(rows, p)
    assert back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(back.astype(np.float32), [[258.0] * 4])
    grad = jax.grad(lambda x: (ep.permute(x, idx, num_experts=1).tokens * rows).sum())
    d_tokens = grad(jnp.ones((1, 4), jnp.bfloat16))
    assert d_tokens.dtype == jnp.bfloat16
    np.testing.assert_array_equal(d_tokens.astype(np.float32), [[258.0] * 4])


@pytest.mark.parametrize("from_map", [False, True], ids=["indices", "map"])
def test_rows_without_a_token_reach_nothing(from_map: bool) -> None:
    """NaN and infinity in padding, in dropped slots and in the tail spread to no other row."""
    case = Case("", align_size=4, num_out_tokens=8, from_map=from_map)
    given = permutations.inputs_of(case)
    inputs = given.joined()
    key = "routing_map" if from_map else "topk_idx"
    plan = reference.permutation(
        given.choice[0], num_experts=5, rows=case.rows, alignment=case.align_size or 1
    )
    assert plan.dropped
    empty = (plan.source < 0)[:, None]
    poison = np.where(empty, np.array([np.nan, np.inf] * 3, np.float32), 0).astype(np.float32)

    def run(tokens: Any, probs: Any, merging: Any, extra: Any) -> Any:
        p = ep.permute(tokens, **{key: inputs.choice}, probs=probs, **case.options)
        rows = jnp.where(empty, extra, jnp.tanh(p.tokens))
        back = ep.unpermute(rows, p, merging_probs=merging)
        return (back * inputs.cotangent).sum(), (p, back)

    def values(extra: Any) -> Any:
        step = jax.jit(jax.grad(run, argnums=(0, 1, 2, 3), has_aux=True))
        return step(inputs.tokens, inputs.probs, inputs.merging, extra)

    clean, poisoned = values(np.zeros_like(poison)), values(poison)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    np.testing.assert_array_equal(poisoned[0][3][empty[:, 0]], 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(poisoned))

    # Cotangents of rows without a token do not reach gradients either.
    p, pullback = jax.vjp(
        lambda x, w: ep.permute(x, **{key: inputs.choice}, probs=w, **case.options).tokens,
        inputs.tokens,
        inputs.probs,
    )
    d_clean = pullback(jnp.ones_like(p))[0]
    d_poisoned = pullback(jnp.where(empty, poison, 1.0))[0]
    np.testing.assert_array_equal(d_clean, d_poisoned)


@pytest.mark.parametrize("from_map", [False, True], ids=["indices", "map"])
def test_nans_of_tokens_come_through_and_stay_in_their_token(from_map: bool) -> None:
    case = Case("", from_map=from_map, align_size=2)
    inputs = permutations.inputs_of(case).joined()
    bad = int(np.flatnonzero((inputs.choice > 0).any(1))[2])
    tokens = inputs.tokens.copy()
    tokens[bad, 1] = np.nan
    key = "routing_map" if from_map else "topk_idx"

    def run(tokens: Any) -> Any:
        p = ep.permute(tokens, **{key: inputs.choice}, **case.options)
        back = ep.unpermute(p.tokens * p.tokens, p)
        return back.sum(), back

    grad, back = jax.grad(run, has_aux=True)(tokens)
    for value in (back, grad):
        wanted = np.zeros(tokens.shape, bool)
        wanted[bad, 1] = True
        np.testing.assert_array_equal(np.isnan(value), wanted)


def test_a_nan_weight_comes_through_where_its_slot_is_used() -> None:
    idx = np.array([[0, 1], [1, -1]])
    p = ep.permute(np.ones((2, 3), np.float32), idx, num_experts=2)
    weights = np.array([[np.nan, 1], [2, np.nan]], np.float32)
    back = ep.unpermute(p.tokens, p, merging_probs=weights)
    np.testing.assert_array_equal(back, [[np.nan] * 3, [2] * 3])


def test_three_dims_come_back_as_they_were() -> None:
    case = Case("", tokens=12, align_size=4)
    inputs = permutations.inputs_of(case).joined()
    flat = permutations.run_ops(case, inputs)
    shaped = permutations.dataclasses.replace(
        inputs,
        **{
            name: getattr(inputs, name).reshape(3, 4, -1)
            for name in ("choice", "tokens", "probs", "merging", "cotangent")
        },
    )
    got = permutations.run_ops(case, shaped)
    for name, value in flat.items():
        np.testing.assert_array_equal(np.asarray(got[name]).reshape(value.shape), value, name)
    assert got["back"].shape == got["d_tokens"].shape == (3, 4, permutations.HIDDEN)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_narrow_and_unsigned_indices_meet_sizes_that_they_do_not_hold(dtype: str) -> None:
    """128 is the first number that int8 cannot hold, 256 the first that uint8 cannot."""
    idx = jnp.arange(128, dtype=dtype)[:, None]
    for num_experts in (128, 256):
        p = ep.permute(jnp.ones((128, 2)), idx, num_experts=num_experts)
        np.testing.assert_array_equal(p.group_sizes[0], np.arange(num_experts) < 128)
        loss = ep.aux_loss(
            ep.Routing(idx, jnp.ones((128, 1)), jnp.ones((128, num_experts))), coeff=1.0
        )
        assert loss == num_experts
    _, padded, _ = ep.pad_tokens(3, jnp.ones((128, 2)), idx)
    np.testing.assert_array_equal(padded[128:], -1)


def test_an_index_that_int32_does_not_hold_is_out_of_range() -> None:
    p = ep.permute(jnp.ones((1, 2)), jnp.uint32([[2**32 - 1]]), num_experts=2)
    assert p.group_sizes.sum() == 0


def test_runs_eagerly_and_differentiates_twice() -> None:
    idx = np.array([[0, 2], [2, -1], [1, 1]])
    tokens = jnp.arange(6.0).reshape(3, 2)

    def run(tokens: Any) -> Any:
        p = ep.permute(tokens, idx, num_experts=3)
        return (ep.unpermute(p.tokens**3, p) ** 2).sum()

    count = (idx >= 0).sum(1, keepdims=True)
    np.testing.assert_allclose(run(tokens), ((count * tokens**3) ** 2).sum())
    np.testing.assert_allclose(jax.jit(jax.grad(run))(tokens), 6 * count**2 * tokens**5)
    second = jax.jit(jax.grad(lambda x: jax.grad(run)(x).sum()))(tokens)
    np.testing.assert_allclose(second, 30 * count**2 * tokens**4)


def test_integer_tokens_have_no_gradient_and_their_probs_have_one() -> None:
    idx = np.array([[0, 1], [1, -1]])
    tokens = jnp.arange(4, dtype=jnp.int8).reshape(2, 2)
    grad = jax.grad(lambda w: ep.permute(tokens, idx, num_experts=2, probs=w).probs.sum())
    np.testing.assert_array_equal(grad(jnp.ones((2, 2))), [[1, 1], [1, 0]])


@pytest.mark.parametrize("from_map", [False, True], ids=["indices", "map"])
def test_under_remat_scan_and_donation(from_map: bool) -> None:
    case = Case("", align_size=4, num_out_tokens=30, from_map=from_map)
    given = permutations.inputs_of(case).joined()

    def layer(tokens: Any, _: Any = None) -> Any:
        inputs = permutations.dataclasses.replace(given, tokens=tokens)
        back, _, _ = permutations.there_and_back(case, inputs)
        return tokens + back, None

    def unrolled(tokens: Any) -> Any:
        for _ in range(3):
            tokens, _ = layer(tokens)
        return (tokens * given.cotangent).sum()

    def scanned(tokens: Any) -> Any:
        tokens, _ = jax.lax.scan(jax.checkpoint(layer), tokens, length=3)
        return (tokens * given.cotangent).sum()

    wanted = jax.jit(jax.grad(unrolled))(given.tokens)
    got = jax.jit(jax.grad(scanned), donate_argnums=0)(jnp.array(given.tokens))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("from_map", [False, True], ids=["indices", "map"])
def test_batches_of_permutations(from_map: bool) -> None:
    case = Case("", tokens=6, align_size=4, from_map=from_map)
    inputs = permutations.inputs_of(case, 3)

    def there_and_back(tokens: Any, choice: Any) -> Any:
        p = ep.permute(
            tokens, **{"routing_map" if from_map else "topk_idx": choice}, **case.options
        )
        return ep.unpermute(p.tokens**2, p)

    got = jax.jit(jax.vmap(there_and_back))(inputs.tokens, inputs.choice)
    used = inputs.choice if from_map else inputs.choice >= 0
    wanted = inputs.tokens**2 * used.sum(-1, keepdims=True)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_a_plan_serves_rows_of_another_width_and_dtype() -> None:
    case = Case("", align_size=4)
    inputs = permutations.inputs_of(case).joined()
    p = ep.permute(inputs.tokens, inputs.choice, **case.options)
    rows = jnp.ones((case.rows, 9), jnp.bfloat16)
    back = jax.jit(lambda rows, p: ep.unpermute(rows, p))(rows, p)
    assert back.dtype == jnp.bfloat16
    used = (inputs.choice >= 0).sum(1, keepdims=True)
    np.testing.assert_array_equal(back.astype(np.float32), used * np.ones((1, 9)))
    np.testing.assert_array_equal(back, ep.unpermute(rows, p.plan))


@pytest.mark.parametrize("from_map", [False, True], ids=["indices", "map"])
def test_programs_do_not_grow_with_the_experts(from_map: bool) -> None:
    def text_of(num_experts: int) -> list[str]:
        case = Case("", tokens=16, num_experts=num_experts, from_map=from_map, align_size=8)
        case = permutations.dataclasses.replace(case, num_out_tokens=64)
        inputs = permutations.inputs_of(case).joined()

        lowered = permutations.program(case).lower(inputs).as_text()
        return [line for line in lowered.splitlines() if "stablehlo" in line]

    assert len(text_of(8)) == len(text_of(256))


GOOD = {"tokens": np.ones((4, 3)), "topk_idx": np.zeros((4, 2), np.int32), "num_experts": 5}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"num_experts": 2.0}, "num_experts must be an integer, got 2.0"),
        ({"align_size": 2.0}, "align_size must be an integer, got 2.0"),
        ({"topk_idx": None}, "needs one of topk_idx and routing_map, got none"),
        ({"routing_map": np.zeros((4, 5), bool)}, "got both"),
        ({"topk_idx": np.zeros((4, 2))}, "topk_idx must have an integer dtype"),
        ({"topk_idx": np.zeros((3, 2), int)}, r"leading dims of tokens \(4,\)"),
        ({"topk_idx": None, "routing_map": np.zeros((4, 4), bool)}, "end in num_experts=5"),
        ({"topk_idx": None, "routing_map": np.zeros((4, 5))}, "routing_map must have bool"),
        ({"tokens": np.ones(4)}, r"tokens must be \[T, H\]"),
        ({"probs": np.ones((4, 3))}, r"probs must be \[4, 2\], one per slot"),
        ({"probs": np.ones((4, 2), int)}, "probs must have a float dtype"),
        ({"num_out_tokens": -1}, "num_out_tokens must be at least 0, got -1"),
        ({"align_size": 0}, "align_size must be at least 1, got 0"),
        ({"num_out_tokens": 2**31}, "must have less than 2147483647 slots and rows"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ep.permute(**(GOOD | changes))


def test_rows_that_do_not_fit_the_plan() -> None:
    p = ep.permute(**GOOD)
    with pytest.raises(ValueError, match=r"rows must be \[8, H'\]"):
        ep.unpermute(np.ones((7, 3)), p)
    with pytest.raises(ValueError, match="rows must have a float dtype"):
        ep.unpermute(np.ones((8, 3), int), p)
    with pytest.raises(ValueError, match=r"merging_probs must be \[4, 2\]"):
        ep.unpermute(p.tokens, p, merging_probs=np.ones((4, 1)))
    with pytest.raises(ValueError, match="p must be a result of ep.permute"):
        ep.unpermute(p.tokens, (p.tokens,))
