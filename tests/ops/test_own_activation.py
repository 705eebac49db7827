"""A user's own activation: fixed values that it reads are followed, traced ones refused."""

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
from ep_runtime_client.block.moe import MoEParams, init_moe_params, moe

INNER = 6


@pytest.fixture
def block(make_group: Callable[..., fakes.LocalGroup]) -> Callable[..., jax.Array]:
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


def in_its_derivative(beta: Any) -> Callable[..., jax.Array]:
    kept = jax.custom_jvp(lambda gate: gate)
    kept.defjvp(lambda primals, tangents: (primals[0], beta * tangents[0]))
    return lambda gate: kept(gate)


READERS = [closed_over, default, keyword, Swish, both_halves, in_its_derivative]


@pytest.mark.parametrize("made", READERS)
@pytest.mark.parametrize("row", [(), (INNER,)])
def test_a_traced_value_is_refused_by_name(
    block: Callable[..., jax.Array], made: Callable[..., Any], row: tuple[int, ...]
) -> None:
    def f(beta: jax.Array) -> jax.Array:
        return block(made(beta)).sum()

    beta = jnp.full(row, 1.7)
    named = "a value|beta"
    if made not in (both_halves, in_its_derivative):  # where it is further inside than Python says
        named = "beta"
    text = rf"activation .* must not close over .* it reads ({named}) \(float32\[{'6' * len(row)}\]"
    ways = (jax.jit(f), jax.grad(f), jax.jit(jax.grad(f)), jax.jit(jax.value_and_grad(f)))
    for way in ways if not row else ways[2:3]:
        with pytest.raises(ep.InvalidArgumentError, match=text):
            way(beta)


def test_a_traced_integer_and_a_vmapped_value_are_refused(block: Callable[..., jax.Array]) -> None:
    def f(power: jax.Array) -> jax.Array:
        return block(lambda gate: jnp.where(power > 1, gate * gate, gate)).sum()

    for way, given in ((jax.jit(f), jnp.int32(2)), (jax.vmap(f), jnp.arange(2))):
        with pytest.raises(ep.InvalidArgumentError, match=r"it reads power \(int32\[\]"):
            way(given)


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
