"""A user's own activation: values that it reads are followed; traced ones have gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep
from ep_runtime_client.moe.api import MoEParams, init_moe_params, moe

INNER = 6


@pytest.fixture
def block(make_group: fakes.MakeGroup) -> Callable[..., jax.Array]:
    """y of a block with this activation, of tokens x."""
    group = make_group(transport="memfd", axes={"ep": 2}, num_experts=4, max_top_k=2)
    layer = group.register_layer("moe", top_k=2)
    params: MoEParams = init_moe_params(jax.random.key(0), layer, INNER)
    hidden = group.spec.hidden_size
    x = jax.random.normal(jax.random.key(1), (8, hidden))
    return lambda activation, x=x: moe(layer, x, params, activation=activation)[0]


class Swish:
    def __init__(self, beta: Any) -> None:
        self.beta = beta

    def __call__(self, gate: jax.Array) -> jax.Array:
        return gate * jax.nn.sigmoid(self.beta * gate)


def closed_over(beta: Any) -> Callable[..., jax.Array]:
    return lambda gate: gate * jax.nn.sigmoid(beta * gate)


def default(beta: Any) -> Callable[..., jax.Array]:
    return lambda gate, beta=beta: gate * jax.nn.sigmoid(beta * gate)


def keyword(beta: Any) -> Callable[..., jax.Array]:
    return functools.partial(lambda gate, *, beta: gate * jax.nn.sigmoid(beta * gate), beta=beta)


def both_halves(beta: Any) -> Callable[..., jax.Array]:
    """In a function inside, and of each column."""
    inside = jax.jit(lambda gate: gate * jax.nn.sigmoid(beta * gate))
    return lambda gate, up: inside(gate) * up


READERS = [closed_over, default, keyword, Swish, both_halves]
BETA = 1.7


@pytest.mark.parametrize("made", READERS)
@pytest.mark.parametrize("row", [(), (INNER,)])
def test_a_traced_value_that_it_reads_has_a_gradient(
    block: Callable[..., jax.Array], made: Callable[..., Any], row: tuple[int, ...]
) -> None:
    def f(beta: jax.Array) -> jax.Array:
        return jnp.sin(block(made(beta))).sum()

    beta = jnp.linspace(1.0, 2.0, INNER) if row else jnp.float32(BETA)
    value, grad = jax.jit(jax.value_and_grad(f))(beta)
    np.testing.assert_allclose(value, f(np.asarray(beta)), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(f)(beta), grad, rtol=1e-5)
    step = 1e-2
    for at in range(beta.size):
        apart = step * np.eye(beta.size, dtype=np.float32)[at].reshape(beta.shape)
        slope = (f(np.asarray(beta + apart)) - f(np.asarray(beta - apart))) / (2 * step)
        np.testing.assert_allclose(np.ravel(grad)[at], slope, rtol=2e-2, atol=2e-3)


def test_a_traced_integer_is_an_operand_without_a_gradient(
    block: Callable[..., jax.Array],
) -> None:
    def f(power: jax.Array, scale: jax.Array) -> jax.Array:
        return block(lambda gate: scale * jnp.where(power > 1, gate * gate, gate)).sum()

    for power in (1, 2):
        want = block(lambda gate, power=power: 0.5 * gate**power).sum()
        value, grad = jax.jit(jax.value_and_grad(f, argnums=1))(jnp.int32(power), 0.5)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(grad, 2 * want, rtol=1e-5)


def test_a_value_under_scan_and_remat_is_followed(block: Callable[..., jax.Array]) -> None:
    betas = jnp.float32([1.0, 2.0])

    def f(betas: jax.Array) -> jax.Array:
        step = jax.checkpoint(lambda total, beta: (total + block(closed_over(beta)).sum(), None))
        return jax.lax.scan(step, 0.0, betas)[0]

    value, grad = jax.jit(jax.value_and_grad(f))(betas)
    each = [jax.value_and_grad(lambda b: block(closed_over(b)).sum())(b) for b in betas]
    np.testing.assert_allclose(value, sum(one[0] for one in each), rtol=1e-5)
    np.testing.assert_allclose(grad, [one[1] for one in each], rtol=1e-5)


def test_another_value_of_the_same_function_is_followed(block: Callable[..., jax.Array]) -> None:
    cell, swish = [1.0], Swish(1.0)

    def with_default(gate: jax.Array, beta: float = 1.0) -> jax.Array:
        return gate * jax.nn.sigmoid(beta * gate)

    readers = (lambda gate: gate * jax.nn.sigmoid(cell[0] * gate), swish, with_default)
    for beta in (1.0, 2.0, 1.0):
        cell[0] = swish.beta = beta
        with_default.__defaults__ = (beta,)
        want = np.asarray(block(closed_over(beta)))
        for reader in readers:
            np.testing.assert_array_equal(block(reader), want)


def test_a_value_that_changes_before_backward_is_refused(block: Callable[..., jax.Array]) -> None:
    swish = Swish(1.0)
    y, pull = jax.vjp(lambda x: block(swish, x), jnp.ones((8, 16)))
    swish.beta = 2.0
    with pytest.raises(ep.InvalidArgumentError, match="changed after the call began"):
        pull(y)


def test_a_function_without_a_derivative_runs_forward(block: Callable[..., jax.Array]) -> None:
    def rounded(gate: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
        return jax.pure_callback(np.round, shape, gate, vmap_method="sequential")

    np.testing.assert_array_equal(block(rounded), block(jnp.round))
