"""Second derivatives are right, or an error names the op that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep

TOKENS, HIDDEN, EXPERTS, TOP_K = 16, 16, 4, 2
SIZES = jnp.full(EXPERTS, TOKENS // EXPERTS, jnp.int32)


@pytest.fixture
def layer(make_group: fakes.MakeGroup) -> Any:
    settings = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "max_top_k": TOP_K}
    group = make_group(axes={"ep": 2}, max_tokens_per_rank=TOKENS, **settings)
    return group.register_layer("moe", top_k=TOP_K)


@pytest.fixture
def inputs() -> tuple[Any, Any]:
    """tokens [T, H], topk_idx [T, K]."""
    idx = np.arange(TOKENS * TOP_K, dtype=np.int32).reshape(TOKENS, TOP_K) % EXPERTS
    return jax.random.normal(jax.random.key(0), (TOKENS, HIDDEN)), idx


def twice(function: Callable[..., Any]) -> Any:
    """Differentiates the sine of a gradient."""
    once = jax.grad(lambda x: jnp.cos(function(x)).sum())
    return jax.jit(jax.grad(lambda x: jnp.sin(once(x)).sum()))


def test_second_derivatives_are_refused_by_the_name_of_the_op(
    layer: Any, inputs: tuple[Any, Any]
) -> None:
    x, idx = inputs
    params = ep.init_moe_params(jax.random.key(1), layer, 8)
    kernel = params.wo[:, :HIDDEN]
    rows = jax.ShapeDtypeStruct((TOKENS, kernel.shape[1]), x.dtype)

    def combined(x: Any) -> Any:
        sent = ep.dispatch(layer, jnp.zeros_like(x), idx)
        return ep.combine(layer, sent, sent.tokens * x.sum())

    def block(wi: Any) -> Any:
        return ep.moe(layer, inputs[0], ep.MoEParams(params.router, wi, params.wo))[0]

    cases = (
        ("dispatch", lambda x: ep.dispatch(layer, x, idx).tokens, x),
        ("combine", combined, x),
        ("grouped_gemm", lambda rows: ep.grouped_gemm(rows, kernel, SIZES), rows),
        ("dense", lambda x: ep.dense(x, params.router), x),
        ("moe", lambda x: ep.moe(layer, x, params)[0], x),
        ("moe", block, params.wi),
    )
    for name, function, operand in cases:
        with pytest.raises(NotImplementedError, match=f"ep.{name} has no second derivatives"):
            jax.eval_shape(twice(function), operand)


def test_a_cotangent_that_is_differentiated_is_a_second_derivative(
    layer: Any, inputs: tuple[Any, Any]
) -> None:
    x, idx = inputs

    def slope(scale: Any) -> Any:
        total = jax.grad(lambda x: (scale * ep.dispatch(layer, x, idx).tokens).sum())
        return total(x).sum()

    with pytest.raises(NotImplementedError, match="ep.dispatch has no second derivatives"):
        jax.eval_shape(jax.grad(slope), 1.0)


def test_permute_has_second_derivatives(inputs: tuple[Any, Any]) -> None:
    x, idx = inputs

    def there_and_back(x: Any) -> Any:
        lined = ep.permute(x, idx, num_experts=EXPERTS)
        return ep.unpermute(jnp.sin(lined.tokens), lined)

    meant = twice(lambda x: TOP_K * jnp.sin(x))(x)
    np.testing.assert_allclose(twice(there_and_back)(x), meant, rtol=1e-5, atol=1e-5)
