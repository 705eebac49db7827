"""Tokens quantized where they are sent: the bits of rows quantized where they arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import movement
import numpy as np
import pytest
from fakes import MakeGroup

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.quantize import row_bytes

BLOCK = ep.recipes.BlockScaling()
CASES = (
    cases.Case("bf16", dtype="bfloat16", hidden=256, precision="fast"),
    cases.Case("a last block that is smaller", dtype="bfloat16", hidden=200, weighted=False),
    cases.Case("a rank sends nothing", routing="silent rank"),
    cases.Case("no tokens", tokens=0),
    cases.Case("3-D over both dims", split=(("dp",), ("ep",), 2, 3), **cases.DP_EP),
    cases.Case("drops", capacity=24, top_k=4, routing="skewed", hidden=136, **cases.DP_EP),
)
_OF_TRANSPORT = {"memfd": CASES, "xla": CASES[-1:], "memfd/2": CASES[-1:]}
RUNS = [
    pytest.param(transport, case, id=f"{transport}-{case.name}")
    for transport, some in _OF_TRANSPORT.items()
    for case in some
]


def prepared(make_group: MakeGroup, case: cases.Case, transport: str) -> tuple[Any, Any]:
    """The layer of a case and its inputs; what nobody wrote holds NaNs."""
    group = make_group(transport=transport, debug=True, **case.group_settings)
    layer = group.register_layer("moe", top_k=case.top_k)
    inputs = movement.inputs_of(case, group.spec, movement.capacity_of(case, layer))
    tokens = inputs.tokens.copy()
    if tokens.size:
        tokens.flat[[0, tokens.size // 2]] = np.nan, np.inf
    inputs = dataclasses.replace(inputs, tokens=tokens)
    return layer, movement.placed(inputs, case, group)


def trained(layer: Any, case: cases.Case, inputs: Any, send: Callable[..., Any]) -> Any:
    """What dispatch gives by `send`, and loss and gradients of a product of its rows."""
    hidden, given = case.hidden, (inputs.tokens, inputs.weights)
    shape = (case.num_experts, hidden, hidden)
    kernel = np.random.default_rng(3).standard_normal(shape).astype(np.float32)

    def loss(tokens: Any, weights: Any, kernel: Any) -> Any:
        how = {"capacity": case.capacity, "tokens_spec": movement.spec_hint(case)}
        sent = send(
            tokens, lambda x, **more: ep.dispatch(layer, x, inputs.topk_idx, weights, **how, **more)
        )
        y = ep.grouped_gemm(
            sent.tokens, kernel, sent.group_sizes, layer=layer, recipe=BLOCK, out_dtype=case.dtype
        )
        out = ep.combine(layer, sent, y, weights=sent.weights if case.weighted else None)
        q = sent.tokens
        if not isinstance(q, ep.QuantizedTensor):
            q = ep.grouped_quantize(q, sent.group_sizes, BLOCK, layer=layer)
        arrived = (jax.lax.bitcast_convert_type(q.data, jnp.uint8), q.scale, sent.weights)
        finite = jnp.where(jnp.isfinite(out), out, 0).astype(jnp.float32)
        return (jnp.sin(finite) * inputs.cotangent).sum(), (arrived, out, sent.plan)

    wrt = (0, 1, 2) if case.weighted else (0, 2)
    (_, aux), grads = jax.jit(jax.value_and_grad(loss, wrt, has_aux=True))(*given, kernel)
    return aux, grads


def assert_same(got: Any, want: Any) -> None:
    """Bit for bit: what is used of rows, all of everything else."""
    ((arrived, out, plan), grads), ((arrived_2, out_2, plan_2), grads_2) = got, want
    for slab, used in enumerate(np.asarray(plan_2.arrays.group_sizes).sum(1)):
        for x, y in zip(arrived, arrived_2, strict=True):
            np.testing.assert_array_equal(x[slab, :used], y[slab, :used])
    rest = [jax.tree.leaves(x) for x in ((out, plan, grads), (out_2, plan_2, grads_2))]
    for x, y in zip(*rest, strict=True):
        assert x.dtype == y.dtype
        # NumPy knows the NaNs of its own dtypes alone.
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


@pytest.mark.parametrize(("transport", "case"), RUNS)
def test_rows_and_gradients_are_those_of_rows_quantized_on_arrival(
    make_group: MakeGroup, transport: str, case: cases.Case
) -> None:
    layer, inputs = prepared(make_group, case, transport)
    want = trained(layer, case, inputs, lambda x, send: send(x))
    got = trained(layer, case, inputs, lambda x, send: send(x, recipe=BLOCK))
    assert_same(got, want)


def test_tokens_may_come_quantized(make_group: MakeGroup) -> None:
    for case in CASES[1], CASES[4]:
        layer, inputs = prepared(make_group, case, "memfd")

        def made(x: Any, send: Callable[..., Any]) -> Any:
            sizes = None if x.ndim == 2 else jnp.full((x.shape[0], 1), x.shape[1], jnp.int32)
            return send(ep.grouped_quantize(x, sizes, BLOCK))

        want = trained(layer, case, inputs, lambda x, send: send(x, recipe=BLOCK))
        assert_same(trained(layer, case, inputs, made), want)


def test_rows_of_dispatch_are_dequantized_without_slack(make_group: MakeGroup) -> None:
    layer, inputs = prepared(make_group, CASES[1], "memfd")
    sent = ep.dispatch(layer, jnp.ones_like(inputs.tokens), inputs.topk_idx, recipe=BLOCK)
    assert sent.tokens.origin is None  # arrays that are there have no gradient
    values = np.asarray(sent.tokens.dequantize())
    for slab, used in enumerate(np.asarray(sent.group_sizes).sum(1)):
        assert set(np.unique(values[slab, :used])) <= {0.0, 1.0}
        np.testing.assert_array_equal(values[slab, used:], 0)


@pytest.mark.parametrize("hidden", [1, 7, 16, 128, 200, 7168])
def test_rows_survive_as_bytes_and_zeros_are_zeros_with_scales_of_1(hidden: int) -> None:
    x = np.random.default_rng(0).standard_normal((5, hidden)).astype(np.float32)
    q = jax.jit(lambda x: ep.grouped_quantize(x, None, BLOCK).detached())(x)
    raw = jax.jit(lambda q: row_bytes.to_bytes(q.data, q.scale, 128))(q)
    assert raw.shape == (5, row_bytes.row_bytes(hidden, 128))
    assert raw.shape[1] % 16 == 0
    back = jax.jit(lambda raw: row_bytes.from_bytes(raw, hidden, 128))
    data, scale = back(raw)
    np.testing.assert_array_equal(data, jax.lax.bitcast_convert_type(q.data, jnp.uint8))
    np.testing.assert_array_equal(scale, q.scale)
    data, scale = back(np.zeros_like(raw))
    np.testing.assert_array_equal(data, 0)
    np.testing.assert_array_equal(scale, 1)


def test_what_cannot_be_quantized_before_is_refused(make_group: MakeGroup) -> None:
    group = make_group(hidden_size=64, max_token_dtype="bfloat16")
    layer = group.register_layer("moe", top_k=2)
    x, idx = jnp.ones((8, 64), jnp.bfloat16), jnp.zeros((8, 2), jnp.int32)
    for recipe, why in (
        (ep.recipes.MXFP8(), "along the rows as received"),
        (ep.recipes.TensorScaling(), "one scale per expert.*not there yet"),
        (ep.recipes.BF16(), "cast the tokens"),
        ("fp8", "one of ep.recipes"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            ep.dispatch(layer, x, idx, recipe=recipe)
    tiny = make_group(hidden_size=2, max_token_dtype="bfloat16").register_layer("moe", top_k=2)
    with pytest.raises(InvalidArgumentError, match="takes 16 bytes.* has 4"):
        ep.dispatch(tiny, x[:, :2], idx, recipe=BLOCK)
    q = ep.grouped_quantize(x, None, BLOCK)
    with pytest.raises(InvalidArgumentError, match=r"scales \[8, 1\].*got .* scales \[8, 2\]"):
        ep.dispatch(layer, dataclasses.replace(q, scale=jnp.ones((8, 2))), idx)
    with pytest.raises(InvalidArgumentError, match="tokens quantized by"):
        ep.dispatch(layer, q, idx, recipe=ep.recipes.BlockScaling(power_of_two_scales=True))
    with pytest.raises(InvalidArgumentError, match="float dtype of 2 bytes"):
        ep.dispatch(layer, x.astype(jnp.int8), idx, recipe=BLOCK)
    with pytest.raises(InvalidArgumentError, match="tokens .* are for BlockScaling"):
        ep.grouped_quantize(x, None, ep.recipes.MXFP8())
    weights = jnp.ones((8, 2))
    with pytest.raises(NotImplementedError, match="their origin"):
        jax.grad(lambda w: ep.dispatch(layer, q.detached(), idx, w).weights.sum())(weights)
