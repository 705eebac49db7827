"""jax_debug_nans on clean inputs: rows that nobody may read hold zeros, and nothing raises."""

from __future__ import annotations

from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError

TOKENS, HIDDEN, EXPERTS, TOP_K = 8, 16, 4, 2


@pytest.fixture
def layer(make_group: fakes.MakeGroup) -> Any:
    """A layer whose group fills undefined rows with 0xFF bytes, as EP_RUNTIME_DEBUG=1 does."""
    settings = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "max_top_k": TOP_K}
    group = make_group(
        axes={"ep": 2}, transport="memfd", debug=True, max_tokens_per_rank=TOKENS, **settings
    )
    return group.register_layer("moe", top_k=TOP_K)


def test_ops_return_no_nan_where_jax_looks_for_them(layer: Any) -> None:
    x = jax.random.normal(jax.random.key(0), (2 * TOKENS, HIDDEN))
    idx = np.arange(2 * TOKENS * TOP_K, dtype=np.int32).reshape(-1, TOP_K) % EXPERTS
    without = ep.dispatch(layer, x, idx)
    used = np.asarray(without.group_sizes).sum(-1)
    assert all(np.isnan(without.tokens[slab, rows:]).all() for slab, rows in enumerate(used))
    with jax.debug_nans(True):
        sent = ep.dispatch(layer, x, idx)
        traced = jax.jit(lambda x: ep.dispatch(layer, x, idx).tokens)(x)
        out = ep.combine(layer, sent, jnp.sin(sent.tokens), weights=sent.weights)
    np.testing.assert_array_equal(sent.tokens, traced)
    for slab, rows in enumerate(used):
        np.testing.assert_array_equal(sent.tokens[slab, :rows], without.tokens[slab, :rows])
        assert rows < sent.tokens.shape[1]
        assert not np.asarray(sent.tokens[slab, rows:]).any()
        assert not np.asarray(sent.weights[slab, rows:]).any()
    np.testing.assert_allclose(out, TOP_K * jnp.sin(x), rtol=1e-6)


def test_an_eager_gradient_meets_no_infinity_of_ours(layer: Any) -> None:
    params = ep.init_moe_params(jax.random.key(0), layer, HIDDEN)
    x = jax.random.normal(jax.random.key(1), (2 * TOKENS, HIDDEN))
    router = ep.Router(num_groups=2, group_topk=1, group_score_topk=1)
    with jax.debug_infs(True):
        grad = jax.grad(lambda x: ep.moe(layer, x, params, router=router)[0].sum())(x)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("wrong", [-5, EXPERTS, -(2**40), 2**32 + 1])
def test_an_index_that_names_no_expert_is_told(layer: Any, wrong: int) -> None:
    x = jax.random.normal(jax.random.key(0), (2 * TOKENS, HIDDEN))
    idx = np.arange(2 * TOKENS * TOP_K, dtype=np.int64).reshape(-1, TOP_K) % EXPERTS
    idx[3, 1] = wrong
    seen = np.clip(wrong, -(2**31), 2**31 - 1)
    with (
        jax.enable_x64(True),
        pytest.raises(InvalidArgumentError, match=f"got {seen} at token 3 slot 1"),
    ):
        ep.dispatch(layer, x, idx)


def test_the_gradient_of_a_block_raises_for_nans_of_its_own_alone(layer: Any) -> None:
    x = jax.random.normal(jax.random.key(0), (2 * TOKENS, HIDDEN))
    params = ep.init_moe_params(jax.random.key(1), layer, 8)

    def loss(x: Any, params: Any) -> Any:
        y, _ = ep.moe(layer, x, params)
        return (y * y).sum()

    step = jax.value_and_grad(loss, argnums=(0, 1))
    with jax.debug_nans(True):
        got = step(x, params)  # op by op: the result of each is checked
        with pytest.raises(FloatingPointError):
            step(x.at[0, 0].set(jnp.nan), params)
    want = jax.jit(step)(x, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
