"""The router against its definition, written out in NumPy."""

from __future__ import annotations

from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy.special import softmax

import ep_runtime as ep
from ep_runtime_client.ops.partitioning.roles import say_once

TOKENS, EXPERTS = 40, 12


@pytest.fixture(scope="module")
def logits() -> Any:
    return np.random.default_rng(0).standard_normal((TOKENS, EXPERTS)).astype(np.float32)


def test_ties_go_to_the_lower_index() -> None:
    flat = np.zeros((3, EXPERTS), np.float32)
    np.testing.assert_array_equal(ep.route(flat, 4).topk_idx, [[0, 1, 2, 3]] * 3)
    grouped = ep.route(flat, 2, router=ep.Router(num_groups=4, group_topk=1)).topk_idx
    np.testing.assert_array_equal(grouped, [[0, 1]] * 3)


def test_masked_experts_are_picked_last_and_never_twice() -> None:
    masked = np.full((2, EXPERTS), -np.inf, np.float32)
    masked[:, 5] = 1.0
    np.testing.assert_array_equal(ep.route(masked, 3).topk_idx, [[5, 0, 1]] * 2)
    np.testing.assert_array_equal(ep.route(masked, 3).topk_weights, [[1, 0, 0]] * 2)


def test_aux_loss_is_its_formula_and_the_coefficient_when_balanced(logits: Any) -> None:
    routing = ep.route(logits, 2)
    slots = np.bincount(np.asarray(routing.topk_idx).ravel(), minlength=EXPERTS)
    wanted = 0.1 * EXPERTS / (2 * TOKENS**2) * (softmax(logits, axis=-1).sum(0) * slots).sum()
    np.testing.assert_allclose(ep.aux_loss(routing, coeff=0.1), wanted, rtol=1e-5)
    even = ep.Routing(
        jnp.arange(EXPERTS, dtype=jnp.int32)[:, None],
        jnp.ones((EXPERTS, 1)),
        jnp.full((EXPERTS, EXPERTS), 1 / EXPERTS),
    )
    np.testing.assert_allclose(ep.aux_loss(even, coeff=0.1), 0.1, rtol=1e-6)


def test_what_makes_no_sense_together_is_refused(logits: Any) -> None:
    routing = ep.route(logits, 2)
    assert routing.probs is not None
    few = routing._replace(probs=routing.probs[:3])
    with pytest.raises(ValueError, match=r"routing.probs must be \[.*, 'E'\] for topk_idx"):
        ep.aux_loss(few, coeff=1.0)
    with pytest.raises(ValueError, match=r"logits must be \[\.\.\., E\], got a scalar"):
        ep.route(jnp.zeros(()), 1)


def test_bias_update_pushes_towards_the_mean_load() -> None:
    bias = ep.update_expert_bias(jnp.zeros(4), jnp.array([0, 4, 8, 4]), 0.5)
    np.testing.assert_allclose(bias, [0.5, 0, -0.5, 0])
    for wrong in ((3, 4), (1, 4)):
        with pytest.raises(ValueError, match=rf"\[E\] both, got \[{wrong[0]}\] and \[4\]"):
            ep.update_expert_bias(jnp.zeros(wrong[0]), jnp.zeros(wrong[1], int), 0.5)
    for bias, loads, text in (
        (jnp.ones(4, jnp.bfloat16), jnp.arange(4), "bias must be float32.*got bfloat16"),
        (jnp.ones(4), jnp.ones(4), "tokens_per_expert must be integers, got float32"),
    ):
        with pytest.raises(ep.InvalidArgumentError, match=text):
            ep.update_expert_bias(bias, loads, 1e-3)


@pytest.mark.parametrize(
    ("experts", "mean"), [(60, 100_000), (256, 2_000_000), (384, 2_000_000), (1024, 2_000_000_000)]
)
def test_bias_updates_are_exact_at_real_loads(experts: int, mean: int) -> None:
    """f32 counts exactly to 2^24; the sum of the last case overflows int32."""
    rng = np.random.default_rng(experts)
    step = jax.jit(lambda loads: ep.update_expert_bias(jnp.zeros(experts), loads, 1.0))
    for _ in range(20):
        nearly = mean + rng.integers(-3, 4, experts)
        equal = np.full(experts, mean + int(rng.integers(0, 1000)))
        for loads in (nearly, equal):
            meant = np.sign(loads.sum() - experts * loads)  # int64
            np.testing.assert_array_equal(step(jnp.asarray(loads, jnp.int32)), meant)


def test_padding_adds_tokens_without_slots() -> None:
    tokens, idx, weights = np.ones((5, 3)), np.zeros((5, 2), np.int32), np.ones((5, 2))
    padded = ep.pad_tokens(4, tokens, idx, weights)
    assert [x.shape[0] for x in padded if x is not None] == [8, 8, 8]
    np.testing.assert_array_equal(padded[1][5:], -1)
    np.testing.assert_array_equal(padded[0][5:], 0)
    assert ep.pad_tokens(5, tokens, idx)[2] is None
    with pytest.raises(
        ValueError, match=r"topk_idx must have the T of tokens \[5, 3\], got \[4, 2"
    ):
        ep.pad_tokens(4, tokens, idx[:4])
    with pytest.raises(ValueError, match="multiple must be an integer, got 8.0"):
        ep.pad_tokens(8.0, tokens, idx)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_top_k_is_a_stable_descending_sort(dtype: Any) -> None:
    x = np.random.default_rng(0).integers(-3, 4, (5, 7, 11)).astype(np.float32)
    x[0, 0, 3] = -np.inf
    order = np.argsort(-x, axis=-1, kind="stable")[..., :6]
    factors = np.random.default_rng(1).standard_normal(order.shape).astype(np.float32)

    def loss(x: Any) -> Any:
        values, idx = ep.top_k(x, 6)
        return (values.astype(jnp.float32) * factors).sum(), (values, idx)

    narrow = jnp.asarray(x, dtype)
    grad, (values, idx) = jax.jit(jax.grad(loss, has_aux=True))(narrow)
    assert (values.dtype, idx.dtype, grad.dtype) == (dtype, jnp.int32, dtype)
    np.testing.assert_array_equal(idx, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))
    want = np.zeros_like(x)
    np.put_along_axis(want, order, factors, -1)
    np.testing.assert_array_equal(grad, np.asarray(jnp.asarray(want, dtype)))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_top_k_of_narrow_floats_names_every_index_once(dtype: str) -> None:
    """float8_e4m3fn has no -inf to replace values that were already picked."""
    values, idx = ep.top_k(jnp.asarray([1, 3, 2, 0.5, -448, -0.0, 0.0]).astype(dtype), 7)
    np.testing.assert_array_equal(idx, [1, 2, 0, 3, 5, 6, 4])
    np.testing.assert_array_equal(values.astype(float), [3, 2, 1, 0.5, 0, 0, -448])


def test_top_k_puts_minus_infinity_behind_the_least_number() -> None:
    x = jnp.array([-np.inf, jnp.finfo(jnp.float32).min, 0.0, np.nan, -np.inf])
    values, idx = ep.top_k(x, 5)
    np.testing.assert_array_equal(idx, [3, 2, 1, 0, 4])
    np.testing.assert_array_equal(values, x[idx])


def test_an_expert_outside_of_the_best_groups_comes_behind_minus_infinity() -> None:
    logits = jnp.array([[5.0, -np.inf, 1.0, 1.0]])
    picked = ep.route(
        logits, 2, router=ep.Router(num_groups=2, group_topk=1, group_score_topk=1)
    ).topk_idx
    np.testing.assert_array_equal(picked, [[0, 1]])


def test_lists_are_arrays() -> None:
    routing = ep.route(
        *([[0.0, 2.0, 1.0]], 1),
        router=ep.Router(use_pre_softmax=True),
        expert_bias=[9.0, 0.0, 0.0],
    )
    np.testing.assert_array_equal(routing.topk_idx, [[0]])


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, True),
        ({"use_pre_softmax": True}, False),
        ({"use_pre_softmax": True, "normalize_weights": True}, True),
        ({"score_function": "sigmoid"}, False),
    ],
)
def test_one_expert_with_the_weight_one_is_warned_of(
    options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    say_once.cache_clear()
    for _ in range(2):
        weights = ep.route(
            jnp.array([[0.0, 2.0, 1.0]]), 1, router=ep.Router(**options)
        ).topk_weights
    np.testing.assert_equal(float(weights[0, 0]) == 1.0, warns)
    said = [line for line in caplog.messages if "use_pre_softmax=True" in line]
    assert len(said) == int(warns)


def test_top_k_refuses_what_it_cannot_sort() -> None:
    with pytest.raises(ValueError, match=r"k must be 1 to the last dim of x \[2, 3\], got 4"):
        ep.top_k(jnp.zeros((2, 3)), 4)
    wrong: Any = 2.0
    with pytest.raises(ValueError, match="k must be an integer, got 2.0"):
        ep.top_k(jnp.zeros((2, 3)), wrong)
    with pytest.raises(ValueError, match="x must have a float dtype, got int32"):
        ep.top_k(jnp.zeros((2, 3), jnp.int32), 1)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_top_k_of_a_sharded_batch_moves_nothing(explicit: bool) -> None:
    mesh = fakes.mesh_of({"ep": 4}, explicit=explicit)
    rows = NamedSharding(mesh, PartitionSpec("ep"))
    x = jax.device_put(np.random.default_rng(2).standard_normal((16, 8)), rows)
    with jax.set_mesh(mesh):
        program = jax.jit(lambda x: ep.top_k(x, 2)).lower(x).compile()
        values, idx = program(x)
    assert "all-" not in program.as_text()
    assert values.sharding.is_equivalent_to(rows, 2)
    np.testing.assert_array_equal(idx, jax.lax.top_k(np.asarray(x), 2)[1])
