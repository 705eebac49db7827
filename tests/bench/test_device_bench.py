"""Tests the GPU benches without a GPU: programs run on CPU devices, timed by the host's clock."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_clock import host_clock
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime_bench import gemm
from ep_runtime_bench.base import device_bench
from ep_runtime_bench.base.options import BenchOptions
from ep_runtime_bench.movement import device_ops, gpu_calls, gpu_movement
from ep_runtime_client.ops.calls.call import world_rank
from ep_runtime_client.ops.movement.prepare import make_call

OPTIONS = BenchOptions(
    transports=("memfd", "xla"),
    devices=4,
    tokens=(4,),
    hidden=16,
    num_experts=8,
    top_k=2,
    repeats=1,
)


@pytest.fixture
def session() -> Iterator[ep.Session]:
    with ep.connect("embedded") as made:
        yield made


def bench_of(options: BenchOptions, session: ep.Session) -> device_bench.Bench:
    mesh = Mesh(np.array(jax.devices("cpu")[: options.devices]), ("ep",))
    made = device_bench.Bench(options, session, mesh, host_clock, device_bench.alone)
    made.with_ceiling = False
    return made


def test_every_op_is_timed_and_compared(session: ep.Session) -> None:
    cases: dict[str, Any] = {"sms": (0, 24), "precision": ("fast", "exact")}
    memfd = dataclasses.replace(OPTIONS, transports=("memfd",), **cases)
    samples = gpu_calls.measure_all(bench_of(memfd, session))
    assert [(s.op, s.sms) for s in samples] == [
        *((op, 0) for op in ("clock", "prepare", "dispatch", "combine", "pair")),
        *((op, 24) for op in ("dispatch", "combine")),
        *((op, 0) for op in ("combine", "pair")),
        ("combine", 24),
    ]
    assert [s.precision for s in samples] == ["fast"] * 7 + ["exact"] * 3
    assert all(len(s.kernel_us) == gpu_calls.CALLS for s in samples)
    assert all(us > 0 for s in samples for us in s.kernel_us)
    rows = gpu_movement.make_rows(memfd, samples)
    assert len(rows) == len(samples) - 1
    assert {row["op"] for row in rows if "step_p50_us" in row} == {
        "prepare",
        "dispatch",
        "combine",
        "pair",
    }


@pytest.mark.slow
def test_the_transport_of_collectives_is_compared_with(session: ep.Session) -> None:
    both = dataclasses.replace(OPTIONS, benches=("dispatch",), precision=("exact",))
    samples = gpu_calls.measure_all(bench_of(both, session))
    rows = gpu_movement.make_rows(both, samples)
    dispatches = [row for row in rows if row["op"] == "dispatch"]
    assert [row["transport"] for row in dispatches] == ["memfd", "xla"]
    assert all(row["ratio_to_xla"] > 0 for row in dispatches)


def reached(jaxpr: Any, first: int) -> list[bool]:
    """Finds which results depend on operand `first`; an equation counts as a whole."""
    known = {jaxpr.invars[first]}
    for equation in jaxpr.eqns:
        if any(isinstance(v, Hashable) and v in known for v in equation.invars):
            known.update(equation.outvars)
    return [v in known for v in jaxpr.outvars]


def call_of(bench: device_bench.Bench, session: ep.Session, transport: str) -> Any:
    settings: dict[str, Any] = {"max_top_k": 2, "hidden_size": 16, "transport": transport}
    group = session.create_group(
        "g", bench.mesh, ep_axis="ep", num_experts=8, max_tokens_per_rank=4, **settings
    )
    layer = group.register_layer("layer", top_k=2)
    return make_call(layer, bench.mesh, (16,), (device_bench.ROWS,), handle=0, capacity=None)


def operands_of(call: Any) -> dict[str, Any]:
    """Abstract operands of 4 ranks, 4 tokens each."""
    array = jax.ShapeDtypeStruct
    idx = array((16, 2), jnp.int32)
    plan = jax.eval_shape(lambda idx: ep.prepare(call.layer, idx).arrays, idx)
    return {
        "idx": idx,
        "x": array((16, 16), jnp.bfloat16),
        "weights": array((16, 2), jnp.float32),
        "plan": tuple(plan),
        "rows": array((4, call.capacity, 16), jnp.bfloat16),
    }


@pytest.mark.parametrize("transport", ["memfd", "xla"])
def test_every_call_waits_for_the_one_before(session: ep.Session, transport: str) -> None:
    """XLA may merge or reorder anything that does not depend on the token."""
    bench = bench_of(OPTIONS, session)
    call = call_of(bench, session, transport)
    ops, operands = device_ops.our_ops(call), operands_of(call)
    for name, op in ops.items():
        body = lambda given, op=op: op(given[0], given[1])  # noqa: E731
        token = jax.ShapeDtypeStruct((4,), jnp.int32)
        traced = jax.make_jaxpr(bench.mapped(body))((token, operands))
        (mapped,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "shard_map")
        assert all(reached(mapped.params["jaxpr"], 0)), name


def test_calls_of_a_chain_are_neither_merged_nor_dropped(session: ep.Session) -> None:
    bench = bench_of(OPTIONS, session)
    call = call_of(bench, session, "memfd")
    ops, operands = device_ops.our_ops(call), operands_of(call)
    token = lambda: world_rank(call.group)  # noqa: E731
    body = device_bench.chain(host_clock, token, ops["prepare"], ops["dispatch"], 2)
    text = jax.jit(bench.mapped(body)).lower(operands).compile().as_text()
    assert text.count('custom_call_target="ep_prepare_v1"') == 1
    assert text.count('custom_call_target="ep_dispatch_v1"') == 3


def test_the_ceiling_and_the_clock_lower_to_custom_calls_of_the_cuda_library(
    session: ep.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_bench, "ensure_registered", lambda platform: None)
    monkeypatch.setattr(device_ops, "ensure_registered", lambda platform: None)
    bench = bench_of(OPTIONS, session)
    call = call_of(bench, session, "memfd")
    copy = device_ops.ceiling(call, "combine")
    token = lambda: world_rank(call.group)  # noqa: E731
    body = device_bench.chain(device_bench.gpu_clock, token, device_bench.nothing, copy, 2)
    operands = {
        "x": jax.ShapeDtypeStruct((16, 16), jnp.bfloat16),
        "dst_rank": jax.ShapeDtypeStruct((16, 4), jnp.int32),
        "dst_row": jax.ShapeDtypeStruct((16, 4), jnp.int32),
    }
    lowered = jax.jit(bench.mapped(body)).trace(operands).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@ep_combine_ceiling_v1") == 3
    assert text.count("@ep_clock_v1") == 5


def test_a_slow_program_is_run_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(device_bench.time, "perf_counter", lambda: next(now))
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("ep",))
    options = dataclasses.replace(OPTIONS, devices=1)
    bench = device_bench.Bench(options, None, mesh, host_clock, device_bench.alone)  # type: ignore[arg-type]
    slow = bench.host_s(lambda operands: 0, {}, 40)
    assert len(slow) == device_bench.LEAST - device_bench.HOST_WARMUP
    several = dataclasses.replace(options, devices=2, processes=2)
    bench.options = several
    assert len(bench.host_s(lambda operands: 0, {}, 40)) == 40


GEMM_OPTIONS = BenchOptions(benches=("gemm",), tokens_per_rank=32, top_k=4, hidden=16, repeats=2)


def test_every_product_and_load_has_a_row_beside_dense_and_ragged_dot() -> None:
    found = [*gemm.measure(GEMM_OPTIONS, gemm.HostTimer(), groups=(4,), inner=8)]
    assert [(r["in_features"], r["groups"], r["load"], r["product"]) for r in found] == [
        (k, 4, load, product) for k in (16, 8) for load in gemm.LOADS for product in gemm.PRODUCTS
    ]
    for row in found:
        assert row["rows"] == (64 if row["load"] == "half-empty" else 128)
        assert row["out_features"] == 16
        assert row["ms"] > 0
        assert min(row["dense_tflops"], row["ragged_dot_tflops"]) >= 0
        assert row["tokamax_tflops"] is None or importlib.util.find_spec("tokamax")


@pytest.mark.parametrize("refuses", [False, True])
def test_tokamax_has_a_column_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refuses: bool
) -> None:
    def ragged_dot(*operands: Any) -> Any:
        if refuses:
            raise NotImplementedError("not on this device")
        return jax.lax.ragged_dot(*operands)

    module = types.ModuleType("tokamax")
    module.__spec__ = importlib.machinery.ModuleSpec("tokamax", None)
    monkeypatch.setattr(module, "ragged_dot", ragged_dot, raising=False)
    monkeypatch.setitem(sys.modules, "tokamax", module)
    monkeypatch.setattr(gemm, "LOADS", ("zipf",))
    monkeypatch.setattr(gemm, "PRODUCTS", ("data grad",))
    found = [*gemm.measure(GEMM_OPTIONS, gemm.HostTimer(), groups=(4,), inner=8)]
    assert len(found) == 2
    for row in found:
        assert (row["tokamax_tflops"] is None) == refuses
    assert (
        "Tokamax: NotImplementedError: not on this device" in capsys.readouterr().err
    ) == refuses


@pytest.mark.slow
def test_recipes_have_rows_of_their_own_beside_what_they_quantize(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemm, "LOADS", ("zipf",))
    options = dataclasses.replace(GEMM_OPTIONS, hidden=32)
    measured = gemm.measure(options, gemm.HostTimer(), groups=(4,), inner=32, narrow=gemm.NARROW)
    found = [row for row in measured if row["out_features"] == 64]
    names = (None, *gemm.NARROW)
    assert [(row["recipe"], row["product"]) for row in found] == [
        (name, product) for name in names for product in gemm.PRODUCTS
    ]
    for row in found:
        assert (row["ratio_to_wide"] is None) == (row["recipe"] is None)
        assert {*row} == {column.key for column in gemm.COLUMNS}


@pytest.mark.parametrize("groups", [8, 32, 128])
@pytest.mark.parametrize(("name", "total"), [("uniform", 1), ("zipf", 1), ("half-empty", 0.5)])
def test_loads_fill_the_slab_as_they_say(groups: int, name: str, total: float) -> None:
    sizes = gemm.loads(name, groups, gemm.ROWS)
    assert (sizes.dtype, sizes.shape) == (np.dtype(np.int32), (groups,))
    assert sizes.sum() == total * gemm.ROWS
    assert (sizes % 128 == 0).all()
    spread = sizes.max() / gemm.ROWS * groups
    assert spread > 2 if name == "zipf" else spread == total
