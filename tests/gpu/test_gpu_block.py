"""The block call on GPUs: its errors are no larger than the composed body's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.block_programs import (
    AGAIN,
    DTYPES,
    HIDDEN,
    LOCAL,
    SENT,
    TENSOR,
    TILES,
    TOKENS,
    TOP_K,
    Blocks,
    assert_as_near,
    compare,
    graded,
    ran,
)
from gpu.jobs.layouts import TRANSPORT, TRIAL

import ep_runtime as ep
from ep_runtime import device_layout
from ep_runtime.workspace import ROW_ALIGNMENT
from ep_runtime_client.moe import bodies, copies
from ep_runtime_client.ops.movement.prepare import make_call
from ep_runtime_client.ops.tracing.ambient import open_layer

pytestmark = pytest.mark.skipif(TRANSPORT == "xla", reason="has no block calls")
# Relative to an array's largest value: the effect of another order of sums.
_ROUNDING = {"bfloat16": 0.02, "float32": 1e-4}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gated": ("bfloat16", {}, {}),
    "weights before wo": ("bfloat16", {}, {"weights_at": None}),
    "f16": ("float16", {}, {"weights_at": None, "keep": "nothing"}),
    "not gated": ("bfloat16", {"gated": False}, {"gated": False, "activation": "gelu"}),
    "a pair": ("bfloat16", {"separate": True}, {"keep": "nothing"}),
    "biases": ("bfloat16", {"use_bias": True}, {}),
    "biases of a pair": ("float16", {"use_bias": True, "separate": True}, {}),
    "drops": ("bfloat16", {}, {"capacity": 512}),
    "f32": ("float32", {}, {"keep_factor": 0.5}),
    "f32, weights in combine": ("float32", {}, {"weights_at": "output"}),
    "f32, not gated": ("float32", {"gated": False}, {"gated": False, "activation": "gelu"}),
    "f32, biases": ("float32", {"use_bias": True}, {}),
    "f32, biases of a pair": ("float32", {"use_bias": True, "separate": True}, {}),
    "f32, 16-bit weights and biases": (
        "float32",
        {"use_bias": True, "param_dtype": jnp.bfloat16},
        {"keep": "nothing"},
    ),
    "fp8, biases": ("bfloat16", {"use_bias": True, "separate": True}, {"recipe": TENSOR}),
    "fp8, late weights": (
        "bfloat16",
        {"gated": False},
        {"gated": False, "recipe": TENSOR, "weights_at": "output", "keep": "nothing"},
    ),
    "fp8 by blocks, biases": ("bfloat16", {"use_bias": True}, {"recipe": TILES}),
    "fp8 by blocks sent, biases": ("bfloat16", {"use_bias": True}, {"recipe": TILES}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_as_near_as_those_of_slabs(blocks: Blocks, name: str) -> None:
    dtype, of_params, options = CASES[name]
    hidden = SENT if "sent" in name else HIDDEN
    layer = blocks.layer(hidden=hidden)
    given = blocks.drawn(lambda idx, experts: idx, hidden)
    compare(blocks, layer, blocks.params(layer, **of_params), given, dtype, **options)


@pytest.mark.parametrize("name", ["gated", "a pair", "f32", *(n for n in CASES if "fp8" in n)])
def test_gradients_of_rows_are_those_of_trained_experts_where_they_are_frozen(
    blocks: Blocks, name: str
) -> None:
    dtype, of_params, options = CASES[name]
    hidden = SENT if "sent" in name else HIDDEN
    layer = blocks.layer(hidden=hidden)
    x, weights, idx = blocks.drawn(lambda idx, experts: idx, hidden)
    params = blocks.params(layer, **of_params)
    blocks.call()
    trained = functools.partial(graded, layer, jnp.dtype(dtype), **options)
    y, (d_x, d_weights, _) = ran(trained, x, weights, idx, params)

    def frozen(*given: Any) -> Any:
        y, (d_x, d_weights, _) = trained(*given)
        return y, d_x, d_weights

    found = ran(frozen, x, weights, idx, params)
    jax.tree.map(np.testing.assert_array_equal, found, (y, d_x, d_weights))


ROUTINGS: dict[str, Callable[[Any, int], Any]] = {
    "everything to one rank": lambda idx, experts: experts - 1 - np.arange(TOP_K) + 0 * idx,
    "everything to one expert": lambda idx, experts: (
        np.where(np.arange(TOP_K) == 0, 1, -1) + 0 * idx
    ),
    "nothing to the last rank": lambda idx, experts: np.where(idx >= experts - LOCAL, -1, idx),
    "unused slots": lambda idx, experts: np.where(idx % 3 == 0, -1, idx),
    "nothing": lambda idx, experts: np.full_like(idx, -1),
}
COPIED = ("gated", "a pair", "biases", "f32", "fp8, biases", "fp8 by blocks, biases", "drops")


@pytest.mark.skipif(TRANSPORT == "nccl", reason="copies go through windows")
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "nothing"])
@pytest.mark.parametrize("name", COPIED)
def test_copies_of_experts(blocks: Blocks, name: str, routing: str) -> None:
    dtype, of_params, options = CASES[name]
    layer = blocks.layer(spare_experts=LOCAL)
    given = blocks.drawn(ROUTINGS[routing])
    compare(blocks, layer, blocks.params(layer, **of_params), given, dtype, **options)


@pytest.mark.skipif(TRANSPORT == "nccl", reason="copies go through windows")
@pytest.mark.parametrize("routing", ["everything to one rank", "unused slots"])
def test_a_call_of_few_rows_is_that_of_a_group_without_slots(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, routing: str
) -> None:
    # So it is on GPUs, but not in a trial.
    monkeypatch.setattr(device_layout, "block_copies", lambda spec: spec.spare_experts > 0)
    monkeypatch.setattr(device_layout, "LEAST_ROWS_COPIED", TOKENS * TOP_K // LOCAL)
    x, weights, idx = (
        jax.device_put(given[: len(given) // 2], given.sharding)
        for given in blocks.drawn(ROUTINGS[routing])
    )
    blocks.call()
    found = []
    for spare in (0, LOCAL):
        layer = blocks.layer(f"slots-{spare}", spare_experts=spare)
        run = functools.partial(graded, layer, jnp.dtype("bfloat16"))
        found.append(ran(run, x, weights, idx, blocks.params(layer)))
    jax.tree.map(np.testing.assert_array_equal, *found)


PLANNED = ROUTINGS | {
    "even": lambda idx, experts: idx,
    "zipf": lambda idx, experts: (
        (experts ** np.random.default_rng(1).random(idx.shape)).astype(np.int32) - 1
    ),
    "half to two ranks": lambda idx, experts: np.where(idx % 2 == 0, idx % (2 * LOCAL), idx),
    "half of the ranks equally full": lambda idx, experts: (
        np.arange(idx.size, dtype=np.int32).reshape(idx.shape) % (experts // 2)
    ),
}


@pytest.mark.skipif(TRANSPORT == "nccl", reason="copies go through windows")
@pytest.mark.parametrize(("spare", "capacity"), [(LOCAL, None), (1, None), (LOCAL, 256)])
def test_plans_with_copies_are_those_of_the_reference(
    blocks: Blocks, several_gpus: int, spare: int, capacity: int | None
) -> None:
    found = []
    for transport in (TRANSPORT, "xla"):
        settings = {"spare_experts": spare, "alignment": 16, "transport": transport}
        opened = open_layer(blocks.layer(transport, **settings))

        def planned(idx: Any, opened: Any = opened) -> Any:
            layer, index, mesh = opened
            call = make_call(layer, mesh, idx.shape[:1], (), handle=0, capacity=capacity)
            call = dataclasses.replace(call, own_alignment=ROW_ALIGNMENT)
            _, plan, most, experts = copies.spread(call, index, idx)
            # The columns after these are for packed rows only.
            return plan._replace(recv_count=plan.recv_count[..., :4]), experts, most

        run = jax.jit(planned)
        found.append([ran(run, blocks.drawn(change)[2]) for change in PLANNED.values()])
    for name, (got, experts, most), (want, *others) in zip(PLANNED, *found, strict=True):
        for field, values in want._asdict().items():
            np.testing.assert_array_equal(getattr(got, field), values, err_msg=f"{name}: {field}")
        np.testing.assert_array_equal(experts, others[0], err_msg=name)
        if capacity is None:  # dropped rows make counts even
            assert (experts >= 0).any() or name not in ("everything to one rank", "zipf"), name
        if not TRIAL:
            np.testing.assert_array_equal(most, got.group_sizes.sum(-1).max(), err_msg=name)


KEPT = {"fits nowhere": 0.01, "fits on some ranks": 1.0, "fits": 8.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", ["exact", "fp8"])
def test_sums_travel_as_the_group_says(blocks: Blocks, precision: str, dtype: str) -> None:
    layer = blocks.layer(combine_precision=precision, workspace=0.6)
    compare(blocks, layer, blocks.params(layer), blocks.drawn(lambda idx, experts: idx), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workspace", [1e-6, 0.6, "auto"], ids=str)
def test_any_routing_in_any_workspace(blocks: Blocks, workspace: Any, dtype: str) -> None:
    layer = blocks.layer(workspace=workspace)
    params = blocks.params(layer)
    x, weights, _ = blocks.drawn(lambda idx, experts: idx)
    rows = x.sharding
    blocks.ways.body("composed")
    exact_run = jax.jit(functools.partial(graded, layer, jnp.float32))
    composed_run = jax.jit(functools.partial(graded, layer, jnp.dtype(dtype)))
    each = {
        name: jax.device_put(blocks.drawn(change)[2], rows) for name, change in ROUTINGS.items()
    }
    with jax.default_matmul_precision("highest"):
        exact = {
            name: jax.device_get(exact_run(x, weights, idx, params)) for name, idx in each.items()
        }
    composed = {
        name: jax.device_get(composed_run(x, weights, idx, params)) for name, idx in each.items()
    }
    blocks.call()
    run = jax.jit(lambda *given: graded(layer, jnp.dtype(dtype), *given))
    for _ in range(2):  # the programs alternate, so each finds the other's rows in memory
        for name, idx in each.items():
            got = jax.device_get(run(x, weights, idx, params))
            assert_as_near(got, composed[name], exact[name], dtype)
            jax.tree.map(
                np.testing.assert_array_equal, jax.device_get(run(x, weights, idx, params)), got
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_much_is_kept_and_held_changes_no_output(blocks: Blocks, dtype: str) -> None:
    given = blocks.drawn(lambda idx, experts: np.where(idx % 2 == 0, idx, idx % LOCAL))
    found = []
    blocks.call()
    for number, workspace in enumerate((1e-6, "auto", 1024.0)):
        layer = blocks.layer(f"group{number}", workspace=workspace)
        params = blocks.params(layer)
        for factor in KEPT.values():
            x, weights, idx = given
            run = functools.partial(graded, layer, jnp.dtype(dtype), keep_factor=factor)
            found.append(ran(run, x, weights, idx, params))
    first, *others = found
    for other in others:
        np.testing.assert_array_equal(other[0], first[0])
        for mine, theirs in zip(*map(jax.tree.leaves, (other[1], first[1])), strict=True):
            scale = np.abs(np.asarray(theirs, np.float64)).max()
            np.testing.assert_allclose(
                np.asarray(mine, np.float64) / scale,
                np.asarray(theirs, np.float64) / scale,
                atol=_ROUNDING[dtype],
            )


@pytest.mark.skipif(TRANSPORT != "nccl", reason="windows count nothing")
@pytest.mark.parametrize("workspace", [1e-6, "auto"], ids=str)
@pytest.mark.parametrize("recipe", [None, TILES], ids=["bfloat16", "8 bits"])
def test_rows_that_are_counted_before_they_cross(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, workspace: Any, recipe: Any
) -> None:
    """Tokens equal, bit by bit, those of a group that sends all rows."""
    given, found = blocks.drawn(ROUTINGS["unused slots"], SENT), []
    for name, share in (("all", 0.0), ("counted", 1.0)):
        monkeypatch.setattr(device_layout, "COUNTED_SHARE_OF_RANKS", share)
        layer = blocks.layer(name, SENT, workspace=workspace)
        assert device_layout.counts_rows(layer.group_spec, TOP_K) == (name == "counted")
        params = blocks.params(layer)
        found.append(compare(blocks, layer, params, given, "bfloat16", recipe=recipe)[0])
    np.testing.assert_array_equal(*found)


def scanned(
    stack: Any,
    policy: tuple[str, ...] | None,
    dtype: Any,
    keep: Any,
    x: Any,
    weights: Any,
    idx: Any,
    params: Any,
) -> Any:
    """Returns gradients of x, weights and params for the stack's layers, one after another."""

    def step(x: Any, own: Any) -> Any:
        number, params = own
        routing = ep.Routing((idx + number) % stack.group_spec.num_experts, weights, None)
        y = ep.moe(stack[number], x, params, routing=routing, compute_dtype=dtype, keep=keep)[0]
        return x + y, None

    body = step if policy is None else jax.checkpoint(step, policy=ep.remat_policy(policy))

    def loss(x: Any, weights: Any, params: Any) -> Any:
        return jnp.sin(jax.lax.scan(body, x, (jnp.arange(3), params))[0]).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(x, weights, params)


def of_all_layers(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, 0.9 * x, 1.1 * x]), params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", [None, ("ep_plan",), ("ep_plan", "ep_kept")], ids=str)
def test_scans_and_checkpoints(blocks: Blocks, policy: tuple[str, ...] | None, dtype: str) -> None:
    params = of_all_layers(blocks.params(blocks.layer()))
    run = functools.partial(scanned, ep.layer("block/moe"), policy)
    operands = (*blocks.drawn(lambda idx, experts: idx), params)
    blocks.ways.body("composed")
    with jax.default_matmul_precision("highest"):
        exact = jax.device_get(jax.jit(functools.partial(run, jnp.float32, "first"))(*operands))
    composed = jax.device_get(jax.jit(functools.partial(run, jnp.dtype(dtype), "first"))(*operands))
    blocks.call()
    for keep in ("first", "nothing"):
        got = ran(functools.partial(run, jnp.dtype(dtype), keep), *operands)
        assert_as_near(got, composed, exact, dtype)


def test_overflow_in_error_mode_fails_the_step_and_nothing_else(
    blocks: Blocks, several_gpus: int
) -> None:
    layer = blocks.layer(on_overflow="error")
    x, weights, spread = blocks.drawn(lambda idx, experts: idx)
    crowded = blocks.drawn(ROUTINGS["everything to one rank"])[2]
    params, group = blocks.params(layer), blocks.session.group("block")
    capacity = TOKENS * TOP_K * 3 // 2  # of even shares
    blocks.call()
    run = jax.jit(functools.partial(graded, layer, jnp.bfloat16, capacity=capacity))
    for _ in range(AGAIN):
        group.check(run(x, weights, spread, params))
        with pytest.raises(ep.CapacityOverflowError) as caught:
            group.check(run(x, weights, crowded, params))
        assert caught.value.fields["layer"] == "moe[1]"
        assert caught.value.fields["capacity"] == capacity


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workspace", ["auto", 0.6], ids=["one pass", "parts"])
@pytest.mark.parametrize("policy", [None, ("ep_plan",)], ids=str)
def test_overlap_changes_no_bit(
    blocks: Blocks, workspace: Any, policy: tuple[str, ...] | None, dtype: str
) -> None:
    given = blocks.drawn(lambda idx, experts: idx)
    found = []
    blocks.call()
    for overlap in (False, True):
        layer = blocks.layer(f"overlap-{overlap}", workspace=workspace, overlap=overlap)
        params = blocks.params(layer)
        once = ran(functools.partial(graded, layer, jnp.dtype(dtype)), *given, params)
        stack = ep.layer(f"overlap-{overlap}/moe")
        run = functools.partial(scanned, stack, policy, jnp.dtype(dtype), "first")
        found.append((once, ran(run, *given, of_all_layers(params))))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_programs_take_the_call(blocks: Blocks) -> None:
    layer = blocks.layer()
    params = blocks.params(layer)
    x, weights, idx = blocks.drawn(lambda idx, experts: idx)
    blocks.call()

    def told(dtype: Any, **options: Any) -> str:
        run = jax.jit(lambda *given: graded(layer, dtype, *given, **options)[0])
        (path,) = ep.explain(run, x, weights, idx, params).paths
        return path.why or path.path

    taken = "cuda_nodes" if TRANSPORT == "nccl" else "cuda"
    assert told(jnp.bfloat16) == told(jnp.float32) == taken
    if not TRIAL:
        assert told(jnp.float32, recipe=TENSOR) == bodies.REASONS["quantized"]
        with jax.default_matmul_precision("highest"):
            assert told(jnp.bfloat16) == taken
            assert told(jnp.float32) == bodies.REASONS["precision"]
