"""Several layers, handles and microbatches in one program never mix their rows.

On CPU, XLA starts independent calls in another order on each device; the windows must pair the
right ones. Transport memfd alone, also between nodes: the other one has XLA's own ordering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.moe.api import init_moe_params, moe

TOKENS, HIDDEN = 32, 16


def draw(seed: int, top_k: int = 2, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    idx = cases.routing(cases.Case("", tokens=TOKENS, top_k=top_k), 1, seed)[0]
    weights = rng.uniform(0.2, 1, (TOKENS, top_k)).astype(np.float32)
    return rng.standard_normal((TOKENS, HIDDEN)).astype(dtype), idx, weights


def block(layer: Any, x: Any, idx: Any, weights: Any, handle: int = 0) -> Any:
    sent = ep.dispatch(layer, x, idx, weights, handle=handle)
    return ep.combine(layer, sent, jnp.tanh(sent.tokens), weights=sent.weights)


def meant(x: Any, weights: Any) -> Any:
    return jnp.tanh(x) * weights.sum(-1, keepdims=True).astype(x.dtype)


@pytest.fixture(params=["memfd", pytest.param("memfd/2", marks=pytest.mark.slow)])
def group(make_group: fakes.MakeGroup, request: pytest.FixtureRequest) -> fakes.LocalGroup:
    return make_group(transport=request.param, debug=True, max_top_k=4, lanes=2)


def both_ways(function: Callable[..., Any]) -> Callable[..., Any]:
    """Values and gradients of a function from (list of x, list of weights) to a list of outputs."""

    def run(xs: Any, ws: Any) -> Any:
        outs, pull = jax.vjp(function, xs, ws)
        return outs, pull([jnp.cos(out) for out in outs])

    return jax.jit(run)


def assert_all_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(left, np.float32),
            np.asarray(right, np.float32),
            rtol=tolerance,
            atol=tolerance,
        )


def test_unlike_layers_interleaved_forward_and_backward(group: fakes.LocalGroup) -> None:
    settings: list[tuple[dict[str, int], Any]] = [
        ({"top_k": 2}, np.float32),
        ({"top_k": 2}, np.float32),
        ({"top_k": 4}, np.float32),
        ({"top_k": 1, "alignment": 1}, np.float32),
        ({"top_k": 2}, jnp.bfloat16),
    ]
    layers = [group.register_layer(f"l{i}", **s) for i, (s, _) in enumerate(settings)]
    data = [draw(i, s["top_k"], dtype) for i, (s, dtype) in enumerate(settings)]
    xs, ws = [d[0] for d in data], [d[2] for d in data]

    def run(xs: Any, ws: Any) -> Any:
        return [
            block(layer, x, d[1], w) for layer, x, d, w in zip(layers, xs, data, ws, strict=True)
        ]

    def wanted(xs: Any, ws: Any) -> Any:
        return [meant(x, w) for x, w in zip(xs, ws, strict=True)]

    got, want = both_ways(run), both_ways(wanted)(xs, ws)
    for _ in range(5):
        assert_all_close(got(xs, ws), want, tolerance=5e-2)
    exact = [i for i, (_, dtype) in enumerate(settings) if dtype is np.float32]
    outs, (d_xs, d_ws) = got(xs, ws)
    for i in exact:
        assert_all_close((outs[i], d_xs[i], d_ws[i]), (want[0][i], want[1][0][i], want[1][1][i]))


@pytest.mark.parametrize("handles", [(0, 1, 0, 1), (0, 0, 0, 0)], ids=["two handles", "one"])
def test_four_independent_microbatches_of_one_layer(
    group: fakes.LocalGroup, handles: tuple[int, ...]
) -> None:
    layer = group.register_layer("moe", top_k=2, in_flight=2)
    data = [draw(i) for i in range(4)]
    xs, ws = [d[0] for d in data], [d[2] for d in data]
    kernel = np.eye(HIDDEN, dtype=np.float32)

    def run(xs: Any, ws: Any) -> Any:
        return [
            block(layer, x @ kernel, d[1], w, handle) @ kernel
            for x, d, w, handle in zip(xs, data, ws, handles, strict=True)
        ]

    def wanted(xs: Any, ws: Any) -> Any:
        return [meant(x, w) for x, w in zip(xs, ws, strict=True)]

    got, want = both_ways(run), both_ways(wanted)(xs, ws)
    for _ in range(10):
        assert_all_close(got(xs, ws), want)


def test_dispatches_that_stay_open_beside_each_other(group: fakes.LocalGroup) -> None:
    """in_flight=2: both dispatches before either combine, in one program."""
    layer = group.register_layer("moe", top_k=2, in_flight=2)
    data = [draw(i) for i in range(2)]

    @jax.jit
    def run(xs: Any) -> Any:
        sent = [
            ep.dispatch(layer, x, d[1], d[2], handle=i)
            for i, (x, d) in enumerate(zip(xs, data, strict=True))
        ]
        rows = [jnp.tanh(s.tokens) for s in sent]
        return [
            ep.combine(layer, s, r, weights=s.weights) for s, r in zip(sent, rows, strict=True)
        ][::-1]

    xs = [d[0] for d in data]
    for _ in range(10):
        assert_all_close(run(xs), [meant(d[0], d[2]) for d in data][::-1])


@pytest.mark.parametrize("steps", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_steps_are_bit_identical(group: fakes.LocalGroup, steps: int) -> None:
    layer = group.register_layer("moe", top_k=4)
    params = init_moe_params(jax.random.key(0), layer, 8)
    x = jax.device_put(draw(0)[0], NamedSharding(group.mesh, PartitionSpec("ep")))

    @jax.jit
    def step(x: Any, params: Any) -> Any:
        return jax.value_and_grad(lambda x, p: jnp.sin(moe(layer, x, p)[0]).sum(), (0, 1))(
            x, params
        )

    first = [np.asarray(leaf) for leaf in jax.tree.leaves(step(x, params))]
    differing = 0
    for _ in range(steps):
        for left, right in zip(jax.tree.leaves(step(x, params)), first, strict=True):
            differing += not np.array_equal(left, right)
    assert differing == 0


def test_many_unawaited_launches(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=2)
    x, idx, weights = draw(0)
    run = jax.jit(lambda x: block(layer, x, idx, weights) + 0 * x.sum())
    outs = [run(x * i) for i in range(200)]
    for i in (0, 50, 199):
        assert_all_close(outs[i], meant(x * i, weights))
    y = x
    for _ in range(50):
        y = run(y)
    assert np.isfinite(np.asarray(jax.block_until_ready(y))).all()
