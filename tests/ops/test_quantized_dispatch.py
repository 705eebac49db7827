"""Tokens quantized before they are sent have the bits of rows quantized on arrival."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import cases
import fakes
import jax
import jax.numpy as jnp
import movement
import numpy as np
import pytest
from fakes import MakeGroup
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.moe import resolve as moe_call
from ep_runtime_client.ops.kernels import serve
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
    """Returns a case's layer and inputs; memory that was never written holds NaN."""
    group = make_group(transport=transport, debug=True, **case.group_settings)
    layer = group.register_layer("moe", top_k=case.top_k)
    inputs = movement.inputs_of(case, group.spec, movement.capacity_of(case, layer))
    tokens = inputs.tokens.copy()
    if tokens.size:
        tokens.flat[[0, tokens.size // 2]] = np.nan, np.inf
    inputs = dataclasses.replace(inputs, tokens=tokens)
    return layer, movement.placed(inputs, case, group)


def trained(layer: Any, case: cases.Case, inputs: Any, send: Callable[..., Any]) -> Any:
    """Dispatches with `send`; returns its results, loss and gradients of a product of the rows."""
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
    """Compares used rows and everything else bit for bit."""
    ((arrived, out, plan), grads), ((arrived_2, out_2, plan_2), grads_2) = got, want
    for slab, used in enumerate(np.asarray(plan_2.arrays.group_sizes).sum(1)):
        for x, y in zip(arrived, arrived_2, strict=True):
            np.testing.assert_array_equal(x[slab, :used], y[slab, :used])
    rest = [jax.tree.leaves(x) for x in ((out, plan, grads), (out_2, plan_2, grads_2))]
    for x, y in zip(*rest, strict=True):
        assert x.dtype == y.dtype
        # NumPy recognizes NaNs only in its own dtypes.
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
    assert sent.tokens.origin is None  # existing arrays have no gradient
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


HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 136, 40, 8, 3, 8
SPEC = PartitionSpec(("dp", "ep"))


def make(make_group: MakeGroup, **settings: Any) -> fakes.LocalGroup:
    wanted: dict[str, Any] = {
        "outer_axes": "dp",
        "transport": "memfd",
        "debug": True,
        "num_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "max_top_k": TOP_K,
        "max_tokens_per_rank": TOKENS,
    }
    if "mesh" not in settings:
        wanted["axes"] = {"dp": 2, "ep": 4}
    return make_group(**(wanted | settings))


def draw() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (8 * TOKENS, HIDDEN))


def normed(x: jax.Array, dtype: Any) -> jax.Array:
    """A norm that XLA would fuse with the ops around it. Programs compile as users' do, because
    without optimizations XLA rounds the norm's gradient depending on the rest of the program.
    """
    return (x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * 0.7).astype(dtype)


def loss_of(y: jax.Array, x: jax.Array) -> jax.Array:
    return (jnp.sin(y.astype(jnp.float32)) * x).sum()


def plain(group: fakes.LocalGroup, dtype: Any = None, **options: Any) -> Any:
    """One block: (loss, its arguments); a norm comes first if a dtype is given."""
    layer = group.register_layer("moe", top_k=TOP_K)
    separate = options.pop("separate", False)
    params = ep.init_moe_params(jax.random.key(0), layer, INNER, separate=separate)

    def loss(x: Any, params: Any) -> Any:
        tokens = x if dtype is None else normed(x, dtype)
        y, _, stats = ep.moe(layer, tokens, params, recipe=BLOCK, return_stats=True, **options)
        return loss_of(y, x), (y, stats)

    return loss, (draw(), params)


def scanned(group: fakes.LocalGroup) -> Any:
    """Three layers of a stack under remat that saves plans and rows."""
    stack = group.register_layer_stack("stack", 3, top_k=TOP_K)
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.vmap(lambda key: ep.init_moe_params(key, stack[0], INNER))(keys)

    @functools.partial(jax.checkpoint, policy=ep.remat_policy(("ep_plan", "ep_recv", "ep_wi")))
    def block(x: Any, layer: Any) -> Any:
        index, own = layer
        return x + ep.moe(stack[index], x, own, recipe=BLOCK)[0], None

    def loss(x: Any, params: Any) -> Any:
        y, _ = lax.scan(block, x, (jnp.arange(3), params))
        return loss_of(y, x), y

    return loss, (draw(), params)


def graded(loss: Any, arguments: Any) -> tuple[Any, str]:
    """Returns loss, results and gradients, and the text of the compiled program."""
    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    made = jax.jit(both).lower(*arguments).compile()
    return made(*arguments), made.as_text()


def rows_sent(text: str) -> list[str]:
    """Returns the types of rows in each dispatch of a compiled program."""
    return re.findall(r"= \((\w+)\[.* custom-call\(.*\"ep_dispatch_v1\"", text)


def assert_equal(got: Any, want: Any) -> None:
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A context that sends tokens unquantized and quantizes them on arrival."""

    @contextlib.contextmanager
    def patched() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(moe_call, "_sent_by", lambda *_: None)
            jax.clear_caches()  # forgets programs traced the other way
            yield
        jax.clear_caches()

    return patched


@pytest.mark.usefixtures("optimized")
def test_results_and_gradients_are_those_of_tokens_sent_as_they_are(
    make_group: MakeGroup, behind: Callable[[], Any]
) -> None:
    """Covers weights before wo, a pair, and drops."""
    options: Any = {"weights_at": "hidden", "separate": True, "capacity": 32}
    check_both(*plain(make(make_group), jnp.float32, **options), behind)


def test_so_they_are_in_a_scan_with_remat(make_group: MakeGroup, behind: Callable[[], Any]) -> None:
    check_both(*scanned(make(make_group)), behind)


def check_both(loss: Any, arguments: Any, behind: Any) -> None:
    """Checks that both ways give the same numbers with the same number of calls."""
    got, text = graded(loss, arguments)
    with behind():
        want, text_behind = graded(loss, arguments)
    assert_equal(got, want)
    assert {*rows_sent(text)} == {"u8"}
    assert "u8" not in rows_sent(text_behind)
    # Both ways send gradients unquantized, and nothing twice.
    assert len(rows_sent(text)) == len(rows_sent(text_behind))


def test_explicit_axes(make_group: MakeGroup, behind: Callable[[], Any]) -> None:
    group = make(make_group, mesh=fakes.mesh_of({"dp": 2, "ep": 4}, explicit=True))
    loss, (x, params) = plain(group)
    arguments = (jax.device_put(x, NamedSharding(group.mesh, SPEC)), params)
    with jax.set_mesh(group.mesh):
        got, text = graded(loss, arguments)
        with behind():
            assert_equal(got, graded(loss, arguments)[0])
    assert rows_sent(text)[0] == "u8"


def test_inside_a_shard_map_of_the_user(make_group: MakeGroup, behind: Callable[[], Any]) -> None:
    group = make(make_group)
    layer = group.register_layer("moe", top_k=TOP_K)
    params = ep.init_moe_params(jax.random.key(0), layer, INNER)
    experts = PartitionSpec("ep")
    specs = ep.MoEParams(PartitionSpec(), experts, experts)

    def block(x: Any, params: Any) -> Any:
        return ep.moe(layer, x, params, recipe=BLOCK)[0]

    mapped = jax.shard_map(block, mesh=group.mesh, in_specs=(SPEC, specs), out_specs=SPEC)

    def loss(x: Any, params: Any) -> Any:
        y = mapped(x, params)
        return loss_of(y, x), y

    got, text = graded(loss, (draw(), params))
    with behind():
        assert_equal(got, graded(loss, (draw(), params))[0])
    assert rows_sent(text)[0] == "u8"


@pytest.mark.usefixtures("forgotten")
def test_tokens_are_sent_as_they_are_where_bits_or_speed_say_so(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers other recipes, weights that multiply rows on arrival, and GPUs."""

    def sent(group: fakes.LocalGroup, **options: Any) -> str:
        layer = group.register_layer("moe", top_k=TOP_K)
        params = jax.eval_shape(lambda: ep.init_moe_params(jax.random.key(0), layer, 64))
        program = jax.jit(lambda x, p: ep.moe(layer, x, p, **options)[0])
        return str(program.trace(jax.ShapeDtypeStruct((64, 128), jnp.float32), params).jaxpr)

    group = make(make_group, hidden_size=128, partitioning="shard_map")
    bytes_ = "u8[8,144]"  # rows of a device's tokens: 128 values, a scale, and padding
    assert bytes_ in sent(group, recipe=BLOCK)
    assert bytes_ in sent(group, recipe=(BLOCK, None))
    assert bytes_ not in sent(group, recipe=(None, BLOCK))
    assert bytes_ not in sent(group, recipe=ep.recipes.MXFP8())
    assert bytes_ not in sent(group, recipe=ep.recipes.TensorScaling())
    assert bytes_ not in sent(group, recipe=BLOCK, weights_at="input")
    over_xla = make(
        make_group, hidden_size=128, transport="xla", debug=False, partitioning="shard_map"
    )
    assert bytes_ in sent(over_xla, recipe=BLOCK)
    monkeypatch.setattr(serve, "available", lambda: True)
    assert bytes_ not in sent(over_xla, recipe=BLOCK)
