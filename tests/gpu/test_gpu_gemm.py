"""Grouped GEMM by the GPU kernels: against f64, against CPU, and inside programs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import gemm_programs
from gpu.gemm_programs import SIZES, graded, loss, multiply, same_every_time, scanned, spread
from gpu.jobs.layouts import TRIAL
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ops import grouped_cases as cases
from references import grouped as reference

import ep_runtime as ep
from ep_runtime_client.ops.activation import plain as activation_plain
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.gemm import kernels_16, kernels_32
from ep_runtime_client.ops.gemm import plain as gemm_plain

# Relative to the largest value: the result's rounding, and f32 sums in another order.
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
_SUMS = 1e-5
_TYPES = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("float16", "float32"),
]
_SHAPES = [(72, (200,)), (264, (2, 40)), (8, (8,))]


def _on(device: Any, *arrays: Any) -> list[Any]:
    return [jax.device_put(x, device) for x in arrays]


def _assert_close(got: Any, want: Any, name: str) -> None:
    got, want = np.asarray(got), np.asarray(want, np.float64)
    limit = (_ROUNDING[got.dtype.name] + _SUMS) * max(np.abs(want).max(initial=0), 1e-9)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=limit, err_msg=name)


@functools.cache
def _products(out_dtype: str) -> Any:
    """Forward, data gradient, weight gradient of one slab."""
    gemm = gemm_plain.Gemm(jnp.dtype(out_dtype))

    def run(lhs: Any, rhs: Any, bias: Any, grad: Any, sizes: Any) -> Any:
        return (
            gemm_plain.forward(gemm, lhs, rhs, bias, sizes),
            gemm_plain.data_grad(gemm, grad, rhs, sizes),
            gemm_plain.weight_grad(gemm, lhs, grad, sizes, out_dtype=gemm.out_dtype),
        )

    return jax.jit(run)


@pytest.mark.parametrize("types", _TYPES, ids="-".join)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_products_are_those_of_f64_for_any_sizes(gpus: list[Any], shape: Any, types: Any) -> None:
    for name, sizes in cases.SIZES.items():
        given = cases.operands(sizes, *shape)
        narrow = cases.Operands(*(x.astype(jnp.dtype(types[0])) for x in given))
        operands = _on(gpus[0], *narrow, np.int32(sizes))
        got = _products(types[1])(*operands)
        used = sum(sizes)
        want = (
            reference.grouped_gemm(narrow.lhs, narrow.rhs, narrow.bias, sizes),
            reference.data_grad(narrow.grad, narrow.rhs, sizes),
            reference.weight_grad(narrow.lhs, narrow.grad, sizes),
        )
        _assert_close(got[0][:used], want[0][:used], f"{name}: forward")
        for mine, meant in zip(got[1:], want[1:], strict=True):
            _assert_close(mine, meant, name)
            np.testing.assert_array_equal(np.asarray(mine)[meant == 0], 0)
        again = _products(types[1])(*operands)
        np.testing.assert_array_equal(again[0][:used], got[0][:used])
        for mine, before in zip(again[1:], got[1:], strict=True):
            np.testing.assert_array_equal(mine, before)


@pytest.fixture
def tf32() -> Iterator[None]:
    """Programs may use the kernels of f32 operands; the fixture forgets them after the test."""
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("rows", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [*_SHAPES, (36, (3, 20))], ids=str)
def test_f32_products_are_as_near_to_f64_as_tf32_allows(
    gpus: list[Any], shape: Any, rows: str
) -> None:
    gemm = gemm_plain.Gemm(jnp.dtype(jnp.float32), tf32=True)

    @jax.jit
    def products(lhs: Any, rhs: Any, bias: Any, grad: Any, sizes: Any) -> Any:
        return (
            gemm_plain.forward(gemm, lhs, rhs, bias, sizes),
            gemm_plain.data_grad(gemm, grad, rhs, sizes),
            gemm_plain.weight_grad(gemm, lhs, grad, sizes),
        )

    for name, sizes in cases.SIZES.items():
        given = cases.operands(sizes, *shape)
        given = given._replace(lhs=given.lhs.astype(jnp.dtype(rows)))
        operands = _on(gpus[0], *given, np.int32(sizes))
        got = products(*operands)
        wanted = _f64(given, sizes)
        # Each operand is off by up to 2^-11 of itself.
        limits = _f64(cases.Operands(*map(np.abs, given)), sizes)
        for mine, want, limit in zip(got, wanted, limits, strict=True):
            used = sum(sizes) if mine is got[0] else len(want)
            error = np.abs(np.asarray(mine, np.float64) - want)
            assert (error[:used] <= (2.0**-10 + _SUMS) * limit[:used]).all(), name
        again = products(*operands)
        np.testing.assert_array_equal(again[0][: sum(sizes)], got[0][: sum(sizes)])
        jax.tree.map(np.testing.assert_array_equal, again[1:], got[1:])


def _f64(given: cases.Operands, sizes: Any) -> Any:
    return (
        reference.grouped_gemm(given.lhs, given.rhs, given.bias, sizes),
        reference.data_grad(given.grad, given.rhs, sizes),
        reference.weight_grad(given.lhs, given.grad, sizes),
    )


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_f32_programsmultiply_in_tf32_where_they_may(gpus: list[Any], precision: str) -> None:
    x, kernel, bias = (a.astype(np.float32) for a in _drawn()[:3])
    run = graded(scanned)
    with jax.default_matmul_precision(precision):
        operands = _on(gpus[0], x, kernel, bias, SIZES)
        got = same_every_time(run, operands)
        _compare(got, run(*_on(jax.devices("cpu")[0], x, kernel, bias, SIZES)))
        text = run.lower(*operands).compile().as_text()
    wanted = (kernels_16.TARGETS[0], *kernels_32.TARGETS)
    found = [f'custom_call_target="{name}"' in text for name in wanted]
    assert found == [precision == "default" and not TRIAL] * 2


def test_random_shapes_slabs_and_alignments(gpus: list[Any]) -> None:
    gemm = gemm_plain.Gemm(jnp.bfloat16)
    rng = np.random.default_rng(0)
    for _ in range(12):
        slabs, groups = rng.integers(1, 4), rng.integers(1, 9)
        experts = int(slabs * groups if rng.integers(2) else groups)
        features = 8 * rng.integers(1, 70, 2)
        sizes = rng.integers(0, 3, (slabs, groups)) * rng.integers(0, 90, (slabs, groups))
        rows = int(sizes.sum(-1).max()) + int(rng.integers(0, 60))
        operands = (
            rng.standard_normal((slabs, rows, features[0])).astype(jnp.bfloat16),
            rng.standard_normal((experts, *features)).astype(jnp.bfloat16),
            rng.standard_normal((slabs, rows, features[1])).astype(jnp.bfloat16),
        )
        for slab, used in enumerate(sizes.sum(-1)):
            operands[0][slab, used:] = operands[2][slab, used:] = np.nan

        def run(lhs: Any, rhs: Any, grad: Any, sizes: Any, experts: int = experts) -> Any:
            mine = jnp.arange(lhs.shape[1]) < sizes.sum(-1)[:, None]
            out = gemm_plain.forward(gemm, lhs, rhs, None, sizes)
            return (
                jnp.where(mine[..., None], out, 0),
                gemm_plain.data_grad(gemm, grad, rhs, sizes),
                gemm_plain.weight_grad(gemm, lhs, grad, sizes, experts),
            )

        everything = (*operands, sizes.astype(np.int32))
        got = jax.jit(run)(*_on(gpus[0], *everything))
        want = jax.jit(run)(*_on(jax.devices("cpu")[0], *everything))
        for mine, theirs in zip(got, want, strict=True):
            note = f"{sizes.tolist()}, {rows} rows of {features}, {experts} experts"
            tolerance = 2.0**-7 * max(np.abs(np.asarray(theirs, np.float64)).max(initial=0), 1e-9)
            _assert_near(mine, theirs, tolerance, note)


def _assert_near(got: Any, want: Any, tolerance: float, note: str = "") -> None:
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=note)


# The tests below run whole programs.
_drawn = functools.partial(gemm_programs.drawn, 64)
_PROGRAMS = {
    "plain": multiply,
    "remat": jax.checkpoint(multiply),
    "scan with remat": scanned,
    "f32 out": functools.partial(multiply, out_dtype=jnp.float32),
}


@pytest.mark.parametrize("product", _PROGRAMS.values(), ids=_PROGRAMS)
def test_programs_give_what_they_give_on_cpu_every_time(gpus: list[Any], product: Any) -> None:
    run = graded(product)
    got = same_every_time(run, _on(gpus[0], *_drawn()))
    _compare(got, run(*_on(jax.devices("cpu")[0], *_drawn())))


def _compare(got: Any, want: Any) -> None:
    """Loss and gradients of x, kernel and bias; rows past the last group have zeros."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-2, atol=0.5)
    for name, mine, theirs in zip(("x", "kernel", "bias"), got[1], want[1], strict=True):
        largest = float(np.abs(np.asarray(theirs, np.float64)).max())
        _assert_near(mine, theirs, 2.0**-5 * largest, name)
    for slab, used in enumerate(SIZES.sum(-1)):
        np.testing.assert_array_equal(np.asarray(got[1][0])[slab, used:], 0)


def test_compiled_programs_hold_the_calls_and_choose_nothing_at_run_time(gpus: list[Any]) -> None:
    if TRIAL:
        pytest.skip("the calls are those of GPUs")
    run = jax.jit(jax.grad(functools.partial(loss, multiply), argnums=(0, 1)))
    text = run.lower(*_on(gpus[0], *_drawn())).compile().as_text()
    assert [text.count(f'custom_call_target="{name}"') for name in kernels_16.TARGETS] == [2, 1]
    assert " conditional(" not in text


def test_other_buffers_than_those_that_were_captured(gpus: list[Any]) -> None:
    """A command buffer records addresses: new addresses must reach the kernels."""
    run = jax.jit(jax.grad(functools.partial(loss, multiply), argnums=(0, 1)))
    x, kernel, bias, sizes = _drawn()
    x[np.isnan(x)] = 0  # the rows that belong to groups differ each time
    kept = []
    for turn in range(8):
        scaled = kernel * np.asarray(turn + 1, jnp.bfloat16)
        everything = (x, scaled, bias, np.roll(sizes, turn, 0))
        want = run(*_on(jax.devices("cpu")[0], *everything))
        kept.append(_on(gpus[0], *everything))
        got = run(*kept[-1])
        for mine, theirs in zip(got, want, strict=True):
            largest = float(np.abs(np.asarray(theirs, np.float64)).max())
            _assert_near(mine, theirs, 2.0**-5 * largest, f"turn {turn}")


@pytest.mark.parametrize("mode", ["shard_map", "rule"])
def test_spread_over_gpus(gpus: list[Any], mode: str) -> None:
    want = graded(multiply)(*_on(jax.devices("cpu")[0], *_drawn()))
    _compare(spread(gpus, mode, multiply, _drawn()), want)


def test_known_layouts_and_a_weight_that_is_gathered(gpus: list[Any]) -> None:
    """Without jit: every device has its rows, and all have shards of all kernels."""
    mesh = Mesh(np.array(gpus), ("fsdp",))
    x, kernel, bias, sizes = _drawn()
    kernel, bias = kernel[:2], bias[:2]
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    columns = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    put = [jax.device_put(a, rows) for a in (x, sizes)]

    def grads(x: Any, kernel: Any, sizes: Any) -> Any:
        run = functools.partial(loss, lambda x, k, s, _: ep.grouped_gemm(x, k, s))
        return jax.grad(run, argnums=(0, 1))(x, kernel, None, sizes)

    got = grads(put[0], jax.device_put(kernel, columns), put[1])
    with jax.default_device(jax.devices("cpu")[0]):
        want = grads(*_on(jax.devices("cpu")[0], x, kernel, sizes))
    for mine, theirs in zip(got, want, strict=True):
        largest = float(np.abs(np.asarray(theirs, np.float64)).max())
        _assert_near(mine, theirs, 2.0**-5 * largest)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_between_the_products(gpus: list[Any], dtype: str) -> None:
    static = Activation("silu", True, jnp.dtype(dtype))
    sizes = np.int32([[16, 9000, 280], [8, 24, 0]])
    there = np.arange(9600) < sizes.sum(1, keepdims=True)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((2, 9600, 2, 16)).astype(jnp.dtype(dtype))
    grad = rng.standard_normal((2, 9600, 16)).astype(jnp.dtype(dtype))
    hidden[~there] = grad[~there] = np.nan
    weights = rng.standard_normal((2, 9600)).astype(np.float32)

    def both(hidden: Any, weights: Any, sizes: Any, grad: Any) -> Any:
        out = activation_plain.forward(static, hidden, weights, sizes)
        return out, *activation_plain.pullback(static, hidden, weights, sizes, grad)

    got = jax.jit(both)(*_on(gpus[0], hidden, weights, sizes, grad))
    want = jax.jit(both)(*_on(jax.devices("cpu")[0], hidden, weights, sizes, grad))
    for mine, meant in zip(got, want, strict=True):
        tolerance = (_ROUNDING[mine.dtype.name] + _SUMS) * 16
        _assert_near(np.asarray(mine)[there], np.asarray(meant)[there], tolerance)
    np.testing.assert_array_equal(np.asarray(got[2])[~there], 0)


def test_what_the_kernels_do_not_take_runs_as_before(
    gpus: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    sizes = cases.SIZES["uneven, one empty"]
    for dtype, shape in (("float32", (72, (40,))), ("bfloat16", (33, (9,)))):
        given = cases.operands(sizes, *shape)
        narrow = cases.Operands(*(x.astype(jnp.dtype(dtype)) for x in given))
        with jax.default_matmul_precision("highest"):
            got = _products(dtype)(*_on(gpus[0], *narrow, np.int32(sizes)))
        _assert_close(
            got[0], reference.grouped_gemm(narrow.lhs, narrow.rhs, narrow.bias, sizes), dtype
        )
    if not TRIAL:
        assert sum("plain JAX" in line.message for line in caplog.records) == 1
