"""Assigns kernels of a recorded step to parts of the layer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ep_runtime_bench.base.moe_cases import KernelTime
from ep_runtime_bench.moe import trace

_HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("op_name", "part"),
    [
        ("jit(f)/jvp(ep_router/layer)/dot_general", "forward router"),
        ("jit(f)/transpose(jvp(ep_router/layer))/dot_general", "backward router"),
        (
            "jit(f)/transpose(jvp(ep_dispatch/layer))/ep_dispatch_bwd/layer/x",
            "backward dispatch/dispatch_bwd",
        ),
        ("jit(f)/mul", "forward mul"),
    ],
)
def test_parts_of_a_step_are_named_by_scope_and_direction(op_name: str, part: str) -> None:
    assert trace.part_of(op_name) == part


def test_kernel_names_are_cut_to_what_tells_them_apart() -> None:
    full = "void ep::(anonymous namespace)::DispatchKernel<256>(ep::DispatchParams, int)"
    assert trace.short(full) == "DispatchKernel"
    full = "void ep_runtime::cuda::rows::(anonymous namespace)::QuantizeRows<true>(int)"
    assert trace.short(full) == "QuantizeRows"
    assert trace.short("loop_add_fusion_3") == "loop_add_fusion_3"


def profile_of(*lines: Any) -> Any:
    """A profile with the events (kernel, instruction, start, seconds) of lines (name, *events)."""

    def line(name: str, *events: tuple[str, str, float, float]) -> Any:
        made = [
            SimpleNamespace(
                name=kernel,
                stats=[("hlo_op", op)] if op else [],
                start_ns=start * 1e9,
                duration_ns=taken * 1e9,
            )
            for kernel, op, start, taken in events
        ]
        return SimpleNamespace(name=name, events=made)

    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("main", ("x", "call.1", 0, 1))]),
        SimpleNamespace(name="/device:GPU:0", lines=[line(*each) for each in lines]),
        SimpleNamespace(name="/device:GPU:1", lines=[line(*each) for each in lines]),
    ]
    return SimpleNamespace(planes=planes)


def test_kernels_of_a_gpu_are_those_on_streams_of_the_first_device() -> None:
    streams = (
        ("Stream #1(Compute)", ("a::DispatchKernel<2>", "call.1", 0, 3), ("nccl", "", 2, 2)),
        ("Stream #2(Compute)", ("a::DispatchKernel<2>", "call.1", 5, 5)),
        ("XLA Ops", ("call.1", "call.1", 0, 8)),
    )
    events = trace._events(profile_of(*streams))
    found = trace._totals(events, {"call.1": "forward dispatch"}, 0, 2)
    assert found.kernels == [
        KernelTime("forward dispatch", "DispatchKernel", 1.0, 4.0),
        KernelTime("", "nccl", 0.5, 1.0),
    ]
    assert (found.step_s, found.idle_s) == (5.0, 0.5)


def test_steps_without_instructions_serve_the_parts_of_one_that_has_them() -> None:
    parts = {"call.1": "forward experts", "call.2": "backward experts"}
    gemm, copy = "a::GemmKernel<1>", "MemcpyD2D"
    stream = (
        "Stream #1",
        *((gemm, "call.1", 0, 1), (gemm, "call.2", 1, 2), (copy, "", 3, 1)),
        *((gemm, "", 4, 1), (gemm, "", 5, 2)),
    )
    events = [*trace._events(profile_of(stream))]
    found = trace._totals(events, parts, 0, 2)
    assert found.kernels == [
        KernelTime("backward experts", "GemmKernel", 1.0, 2.0),
        KernelTime("forward experts", "GemmKernel", 1.0, 1.0),
        KernelTime("", "MemcpyD2D", 0.5, 0.5),
    ]
    # A step lasts from the start of one of its kernels to that kernel's next start.
    found = trace._totals(events, parts, 1, 1)
    assert (found.step_s, found.idle_s) == (4.0, 0.0)


def test_no_part_of_a_recorded_step_takes_longer_than_the_step() -> None:
    """In 9 steps of 92 ms on an H100, some fills ran only in the first steps, 36 times."""
    said = json.loads(gzip.decompress((_HERE / "recorded_step.json.gz").read_bytes()))
    events = [trace._Event(*each) for each in said["events"]]
    found = trace._totals(events, said["parts"], said["warm"], said["steps"])
    assert 0.090 < found.step_s < 0.096
    assert max(each.step_s for each in found.kernels) + found.idle_s < found.step_s
    calls = {each.kernel: each.calls for each in found.kernels}
    assert (calls["DispatchKernel"], calls["loop_add_fusion_6"]) == (72, 1)


def test_times_beside_each_other_count_once() -> None:
    stream = (("Stream #1", ("a", "", 0, 4), ("a", "", 4, 2)), ("Stream #2", ("a", "", 1, 4)))
    (kernel,) = trace._totals(trace._events(profile_of(*stream)), {}, 0, 1).kernels
    assert (kernel.calls, kernel.step_s) == (3, 6.0)


def test_a_profile_without_a_kernel_of_every_step_says_nothing() -> None:
    stream = ("Stream #1", ("a", "", 0, 1), ("b", "", 1, 1))
    assert not trace._totals(trace._events(profile_of(stream)), {}, 1, 2).kernels
