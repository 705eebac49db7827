"""The activation between the products: rows, blocks, precision, cost; and users' functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fakes
import hlo_scan
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep
from ep_runtime_client.moe.api import MoEParams, init_moe_params, moe
from ep_runtime_client.ops.activation import plain as activation_plain
from ep_runtime_client.ops.activation.function import Activation, activation_of
from ep_runtime_client.ops.kernels import serve

F32, INNER = jnp.dtype(jnp.float32), 6
FORMS = {
    "pair of halves": ((2, INNER), "silu", lambda h: jax.nn.silu(h[:, 0]) * h[:, 1]),
    "halves in one dim": (
        (2 * INNER,),
        "gelu",
        lambda h: jax.nn.gelu(h[:, :INNER]) * h[:, INNER:],
    ),
    "two arguments": (
        (2, INNER),
        lambda gate, up: jnp.tanh(gate) * (up + 1),
        lambda h: jnp.tanh(h[:, 0]) * (h[:, 1] + 1),
    ),
    "ungated": ((INNER,), "squared_relu", lambda h: jnp.square(jax.nn.relu(h))),
    "not zero at zero": ((INNER,), "sigmoid", jax.nn.sigmoid),
}


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def graded(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result and the gradients of the arguments."""
    out, pull = jax.vjp(function, *args)
    return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_there_and_no_others(form: str) -> None:
    """Blocks of 256 rows: none, several, a partial last one, all rows; other rows hold NaN."""
    shape, function, meant = FORMS[form]
    static, _ = activation_of(function, len(shape) == 2 or shape[0] != INNER, F32, INNER)

    def whole(hidden: jax.Array, weights: jax.Array) -> jax.Array:
        out = meant(hidden.reshape(1200, *shape))
        return out.reshape(2, 600, INNER) * weights[..., None]

    @jax.jit
    def wanted(hidden: Any, weights: Any, grad: Any) -> Any:
        out, pull = jax.vjp(whole, hidden, weights)
        return out, pull(grad)

    rng = np.random.default_rng(0)
    hidden, weights, grad = (
        rng.standard_normal((2, 600, *each)).astype(np.float32) for each in (shape, (), (INNER,))
    )
    for sizes in ([0, 0, 0], [8, 0, 296], [16, 296, 288], [0, 600, 0]):
        slabs = np.int32([sizes, [8, 24, 0]])
        there = np.arange(600) < slabs.sum(1, keepdims=True)

        def keep(x: Any, other: float, there: Any = there) -> Any:
            kept = there.reshape(2, 600, *([1] * (x.ndim - 2)))
            return np.where(kept, x, np.float32(other))

        given = (static, keep(hidden, np.nan), weights, slabs)
        got = jax.jit(activation_plain.forward, static_argnums=0)(*given)
        found = jax.jit(activation_plain.pullback, static_argnums=0)(*given, keep(grad, np.nan))
        want, meant_grads = wanted(keep(hidden, 0), weights, keep(grad, 0))
        np.testing.assert_allclose(got, keep(want, 0), rtol=1e-6, atol=1e-6)
        for left, right in zip(found, meant_grads, strict=True):
            np.testing.assert_allclose(keep(left, 0), keep(right, 0), rtol=1e-5, atol=1e-5)


def test_the_long_blocks_of_gpus_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    static = Activation("silu", True, jnp.dtype(jnp.bfloat16))
    slabs = jnp.int32([[16, 296, 288], [8, 24, 0]])
    there = np.arange(600) < np.asarray(slabs).sum(1, keepdims=True)
    hidden = jnp.where(there[..., None, None], draw(2, 600, 2, INNER), jnp.nan)
    grad = jnp.where(there[..., None], draw(2, 600, INNER), jnp.nan)
    operands = (hidden.astype(jnp.bfloat16), draw(2, 600), slabs)

    def both(grad: Any, *operands: Any) -> Any:
        out = activation_plain.forward(static, *operands)
        return out, *activation_plain.pullback(static, *operands, grad)

    want = jax.jit(lambda *args: both(*args))(grad.astype(jnp.bfloat16), *operands)
    monkeypatch.setattr(activation_plain, "register_for_gpus", lambda: ("9.0",))
    monkeypatch.setattr(activation_plain, "GPU_BLOCK_ROWS", 512)
    monkeypatch.setattr(serve, "choose", lambda gpu, here, *operands: gpu(*operands))
    got = jax.jit(lambda *args: both(*args))(grad.astype(jnp.bfloat16), *operands)
    for mine, meant in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[there], np.asarray(meant)[there])
    np.testing.assert_array_equal(np.asarray(got[2])[~there], 0)


def test_half_precision_is_rounded_once() -> None:
    static = Activation("silu", True, jnp.dtype(jnp.bfloat16))
    hidden, weights, sizes = (
        draw(1, 64, 2, INNER).astype(jnp.bfloat16),
        draw(1, 64),
        jnp.int32([[64]]),
    )
    got = jax.jit(activation_plain.forward, static_argnums=0)(static, hidden, weights, sizes)
    gate, up = np.moveaxis(np.asarray(hidden, np.float64), 2, 0)
    meant = gate / (1 + np.exp(-gate)) * up * np.asarray(weights)[..., None]
    assert got.dtype == jnp.bfloat16
    # Half a unit of the last of 8 bits, and the rounding of f32.
    np.testing.assert_allclose(np.asarray(got, np.float64), meant, rtol=2**-8 * 1.01)
    d_hidden, _ = activation_plain.pullback(static, hidden, None, sizes, got)
    assert d_hidden.dtype == jnp.bfloat16


def test_cost_follows_the_rows_and_not_the_capacity() -> None:
    """Work is in loops whose trip counts come from the sizes; no other code reads whole slabs."""
    static = Activation("silu", True, F32)
    text = (
        jax.jit(activation_plain.pullback, static_argnums=0)
        .lower(static, draw(1, 4096, 2, 8), draw(1, 4096), jnp.int32([[8, 8]]), draw(1, 4096, 8))
        .compile()
        .as_text()
    )
    assert " while(" in text
    assert hlo_scan.maps_of(text, 4096) == []
    mapped = jax.jit(lambda x: x * 2).lower(draw(4096, 8)).compile().as_text()
    assert len(hlo_scan.maps_of(mapped, 4096)) == 1


def test_a_function_is_named_by_what_it_computes() -> None:
    def scaled(factor: float) -> Callable[..., jax.Array]:
        return lambda gate, up: jax.nn.silu(factor * gate) * up

    def with_slope(slope: float) -> Callable[..., jax.Array]:
        kept = jax.custom_jvp(lambda gate: gate)
        kept.defjvp(lambda primals, tangents: (primals[0], slope * tangents[0]))
        return lambda gate, up: kept(gate) * up

    def reads(table: Any) -> Callable[..., jax.Array]:
        return lambda gate, up: gate * up * jnp.asarray(table)

    for made, other in ((scaled, 2.0), (with_slope, 3.0), (reads, np.float32([2.0]))):
        first, again, different = (
            repr(activation_of(made(value), True, F32, INNER)[0]) for value in (1.0, 1.0, other)
        )
        assert first == again != different


@pytest.fixture
def block(make_group: fakes.MakeGroup) -> Callable[..., jax.Array]:
    """Computes y of a block with this activation, from tokens x."""
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
    """An activation with an inner jitted function, and an argument per column."""
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
