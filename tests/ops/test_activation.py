"""What stands between the experts' matmuls: values, gradients, missing rows, sharding."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import fakes
import hlo_scan
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.ops.activation import plain as activation_plain
from ep_runtime_client.ops.activation.function import Activation, activation_of
from ep_runtime_client.ops.activation.op import activate
from ep_runtime_client.ops.kernels import platform
from ep_runtime_client.programs.explain import explain

MakeGroup = Callable[..., fakes.LocalGroup]

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
    """The result and the gradients of the arguments, with NaN where the result is no row."""
    out, pull = jax.vjp(function, *args)
    return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_there_and_no_others(form: str) -> None:
    """Blocks of 256 rows: none, more than one, a cut last one, all rows; slack holds NaN."""
    shape, function, meant = FORMS[form]
    static = activation_of(function, len(shape) == 2 or shape[0] != INNER, F32, INNER)

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
    monkeypatch.setattr(platform, "choose", lambda gpu, here, *operands: gpu(*operands))
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
    # Half a unit of the last of 8 bits, and what f32 loses.
    np.testing.assert_allclose(np.asarray(got, np.float64), meant, rtol=2**-8 * 1.01)
    d_hidden, _ = activation_plain.pullback(static, hidden, None, sizes, got)
    assert d_hidden.dtype == jnp.bfloat16


def test_cost_follows_the_rows_and_not_the_capacity() -> None:
    """Work is in loops whose trip counts come from the sizes; nothing else maps slabs."""
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


def slabs(group: fakes.LocalGroup) -> tuple[EpLayer, jax.Array, jax.Array, jax.Array]:
    """(layer, hidden with M over tp and NaN in its slack, weights, sizes)."""
    layer = group.register_layer("moe", top_k=2)
    idx = np.tile(np.int32([[0, 3], [5, 6], [5, 5], [1, 2]]), (16, 1))
    sent = ep.dispatch(layer, np.ones((64, 16), np.float32), idx)
    rows, capacity = sent.weights.shape
    there = jnp.arange(capacity) < sent.group_sizes.sum(1, keepdims=True)
    hidden = jnp.where(there[..., None, None], draw(rows, capacity, 2, INNER), jnp.nan)
    spread = NamedSharding(group.mesh, PartitionSpec("ep", None, None, "tp"))
    weights = jnp.where(there, draw(rows, capacity, seed=1), jnp.nan)
    return layer, jax.device_put(hidden, spread), weights, sent.group_sizes


def meant(hidden: Any, weights: Any, sizes: Any) -> Any:
    there = jnp.arange(hidden.shape[1]) < sizes.sum(1, keepdims=True)
    hidden = jnp.where(there[..., None, None], hidden, 0.0)
    weights = jnp.where(there, weights, 0.0)
    return jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1] * weights[..., None]


@pytest.mark.parametrize("partitioning", ["rule", "shard_map"])
def test_axes_on_the_inner_dim_stay_and_rows_do_not_move(
    make_group: MakeGroup, partitioning: str
) -> None:
    group = make_group(
        transport="memfd", axes={"ep": 4, "tp": 2}, num_experts=8, partitioning=partitioning
    )
    layer, hidden, weights, sizes = slabs(group)
    static = Activation("silu", True, F32)
    inner = ("tp",) if partitioning == "shard_map" else None

    def run(hidden: Any, weights: Any) -> Any:
        return activate(layer, static, hidden, weights, sizes, inner_axes=inner)

    def plain(hidden: Any) -> Any:
        return graded(lambda h: activate(layer, static, h, None, sizes, inner_axes=inner), hidden)

    weighted = jax.jit(lambda *args: graded(run, *args))
    got = weighted(hidden, weights)
    want = graded(lambda *args: meant(*args, sizes), hidden, weights)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # In the slack the gradient of hidden may be what hidden holds there, which is NaN.
        left, right = np.nan_to_num(left), np.nan_to_num(right)
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    out, (d_hidden, _) = got
    assert tuple(out.sharding.spec) == ("ep", None, "tp")
    assert tuple(d_hidden.sharding.spec) == ("ep", None, None, "tp")
    found = explain(plain, hidden)
    assert (found.collectives, found.num_others) == ((), 0)
    # The gradient of a row's weight is a sum over M: one, of all rows.
    (one,) = explain(weighted, hidden, weights).collectives
    assert (one.kind, one.op, one.bytes) == ("all-reduce", "activation", 4 * weights.shape[1])


def test_gate_and_up_in_one_dim_refuse_axes_there(make_group: MakeGroup) -> None:
    group = make_group(
        transport="memfd", axes={"ep": 4, "tp": 2}, num_experts=8, partitioning="rule"
    )
    layer, hidden, _, sizes = slabs(group)
    fused = hidden.reshape(*hidden.shape[:2], -1)
    fused = jax.device_put(fused, NamedSharding(group.mesh, PartitionSpec("ep", None, "tp")))
    static = Activation("silu", True, F32)
    with pytest.raises(Exception, match="InvalidArgumentError: .*tp=2"):
        jax.jit(lambda h: activate(layer, static, h, None, sizes))(fused)


def test_explicit_axes_and_concrete_arrays(make_group: MakeGroup) -> None:
    group = make_group(
        transport="memfd", mesh=fakes.mesh_of({"ep": 4, "tp": 2}, explicit=True), num_experts=8
    )
    layer, hidden, weights, sizes = slabs(group)
    static = Activation("silu", True, F32)
    want = np.asarray(meant(*(np.asarray(x) for x in (hidden, weights, sizes))))
    out = activate(layer, static, hidden, weights, sizes)
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
    assert tuple(out.sharding.spec) == ("ep", None, "tp")
    typed = jax.jit(lambda *args: activate(layer, static, *args))(hidden, weights, sizes)
    np.testing.assert_allclose(typed, want, rtol=1e-6, atol=1e-6)
    assert tuple(jax.typeof(typed).sharding.spec) == ("ep", None, "tp")


def test_inside_a_shard_map_of_the_user(make_group: MakeGroup) -> None:
    group = make_group(transport="memfd", axes={"ep": 4, "tp": 2}, num_experts=8)
    layer, hidden, weights, sizes = slabs(group)
    static = Activation("silu", True, F32)

    def local(*args: Any) -> Any:
        return activate(layer, static, *args)

    rows = PartitionSpec("ep")
    mapped = jax.shard_map(
        local,
        mesh=group.mesh,
        in_specs=(PartitionSpec("ep", None, None, "tp"), rows, rows),
        out_specs=PartitionSpec("ep", None, "tp"),
    )
    got = jax.jit(lambda *args: graded(lambda h, w: mapped(h, w, sizes), *args))(hidden, weights)
    want = graded(lambda *args: meant(*args, sizes), hidden, weights)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # In the slack the gradient of hidden may be what hidden holds there, which is NaN.
        left, right = np.nan_to_num(left), np.nan_to_num(right)
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_a_rematerialised_gradient_needs_no_copy_of_its_slab(make_group: MakeGroup) -> None:
    """Under a scan: in straight code XLA merges a recomputed call with the first one."""
    group = make_group(transport="xla", axes={"ep": 2}, num_experts=4, hidden_size=16)
    layer = group.register_layer("moe", top_k=2)
    capacity, inner = 40, 24
    sizes = jnp.int32([[8, 16], [24, 8]])
    static = Activation("silu", True, F32)

    def copies(ordered: bool) -> int:
        def block(x: Any, kernels: Any) -> Any:
            first, second = kernels
            hidden = jnp.einsum("rch,hgm->rcgm", x, first)
            return activate(layer, static, hidden, None, sizes, ordered=ordered) @ second

        def loss(x: Any, kernels: Any) -> Any:
            step = jax.checkpoint(block)
            return jax.lax.scan(lambda x, k: (step(x, k), None), x, kernels)[0].sum()

        kernels = draw(3, 16, 2, inner), draw(3, inner, 16)
        program = jax.jit(jax.grad(loss, argnums=1)).lower(draw(2, capacity, 16), kernels)
        text = program.compile().as_text()
        return len(re.findall(rf"= f32\[(?:1,)?{capacity},2,{inner}\]\S* copy\(", text))

    # One is that of the matmul before, whose layout is another.
    assert (copies(ordered=True), copies(ordered=False)) == (1, 2)


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
            repr(activation_of(made(value), True, F32, INNER)) for value in (1.0, 1.0, other)
        )
        assert first == again != different
