"""Tests the table of the GPU bench with invented times."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ep_runtime.errors import InvalidArgumentError, RuntimeUnavailableError
from ep_runtime_bench import cli
from ep_runtime_bench.base import device_bench, energy, routing, speeds
from ep_runtime_bench.base.options import BenchOptions, DeviceSample
from ep_runtime_bench.movement import cpu_movement, gpu_calls, gpu_movement

OPTIONS = BenchOptions(
    transports=("nvlink", "xla"),
    devices=4,
    tokens=(128,),
    hidden=512,
    num_experts=16,
    top_k=4,
    routing=("uniform", "one"),
    precision=("fast", "exact"),
    sms=(0, 24),
)
CLOCK = DeviceSample("clock", "clock", 128, "", "fast", 0, 0, [2.0, 4.0, 3.0], [])


def sample(
    op: str, subject: str, us: float, *, precision: str = "fast", sms: int = 0, **more: Any
) -> DeviceSample:
    times = [us + 2.0, us + 3.0, us + 10.0]  # including a read of the clock, 3 us
    blocks = 0 if subject in ("xla",) or op == "prepare" else sms or 40
    step_s = more.get("step_s", [])
    name = more.get("routing", "uniform")
    return DeviceSample(op, subject, 128, name, precision, sms, blocks, times, step_s)


def row_of(samples: list[DeviceSample]) -> dict[str, Any]:
    """Returns the table's last row."""
    rows = gpu_movement.make_rows(OPTIONS, [CLOCK, *samples])
    last = samples[-1]
    (found,) = (
        row
        for row in rows
        if (row["op"], row["transport"], row["precision"], row["sms_asked"], row["routing"])
        == (last.op, last.subject, last.precision, last.sms, last.routing)
    )
    return found


def test_a_row_has_times_without_the_clock_and_the_blocks_that_the_kernel_had() -> None:
    row = row_of([sample("dispatch", "nvlink", 50.0, step_s=[1e-4, 3e-4, 2e-4])])
    assert (row["kernel_p50_us"], row["kernel_p99_us"]) == (50.0, 57.0)
    assert (row["step_p50_us"], row["step_p99_us"]) == (200.0, 300.0)
    assert row["sms"] == 40
    assert row["kernel_us"] == [52.0, 53.0, 60.0]
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize("name", ["uniform", "one"])
@pytest.mark.parametrize(
    ("op", "precision", "item_bytes", "passes"),
    [
        ("dispatch", "fast", 2, 1),
        ("combine", "fast", 2, 1),
        ("combine", "exact", 4, 1),
        ("pair", "fast", 4, 2),
        ("pair", "exact", 6, 2),
    ],
)
def test_rates_count_every_slot_and_each_token_once_per_remote_rank(
    name: str, op: str, precision: str, item_bytes: int, passes: int
) -> None:
    row = row_of([sample(op, "nvlink", 50.0, precision=precision, routing=name)])
    idx = routing.topk_idx(name, 4 * 128, 16, 4)
    remote = sum(
        len({int(expert) // 4 for expert in experts} - {number // 128})
        for number, experts in enumerate(idx)
    )
    logical = 128 * 4 * 512 * 2 * passes
    assert row["logical_gb_per_s"] == pytest.approx(logical / 50e-6 / 1e9, abs=0.06)
    physical = remote / 4 * 512 * item_bytes
    assert row["physical_gb_per_s"] == pytest.approx(physical / 50e-6 / 1e9, abs=0.06)
    assert row["busiest_gb_per_s"] >= row["physical_gb_per_s"]


def test_ratios_are_to_the_ceiling_of_as_many_blocks_and_to_what_stands_beside() -> None:
    others = [
        sample("dispatch", "ceiling", 40.0),
        sample("dispatch", "ceiling", 45.0, sms=24),
        sample("dispatch", "xla", 500.0),
    ]
    row = row_of([*others, sample("dispatch", "nvlink", 50.0)])
    assert row["ratio_to_ceiling"] == 0.8
    assert row["ratio_to_xla"] == 10.0
    assert row_of([*others, sample("dispatch", "nvlink", 50.0, sms=24)])["ratio_to_ceiling"] == 0.9
    assert row_of([*others, sample("combine", "nvlink", 50.0)])["ratio_to_ceiling"] is None
    assert row_of(others[:1])["ratio_to_ceiling"] is None
    assert row_of(others)["ratio_to_xla"] == 1.0


def test_exact_sums_are_held_against_the_link_in_bytes_per_second() -> None:
    ceiling = sample("combine", "ceiling", 40.0)
    row = row_of([ceiling, sample("combine", "nvlink", 100.0, precision="exact")])
    assert row["ratio_to_ceiling"] == 0.8


def test_prepare_has_times_alone() -> None:
    row = row_of([sample("prepare", "nvlink", 30.0)])
    assert row["kernel_p50_us"] == 30.0
    assert row["sms"] is None
    assert "physical_gb_per_s" not in row


def test_a_call_of_several_processes_took_as_long_as_the_slowest() -> None:
    case = ("dispatch", "nvlink", 128, "uniform", "fast", 0, 40)
    one = DeviceSample(*case, [1.0, 5.0], [0.1, 0.3])
    two = DeviceSample(*case, [3.0, 4.0], [0.2, 0.1])
    (found,) = cpu_movement.slowest([[one], [two]])
    assert found == DeviceSample(*case, [3.0, 5.0], [0.2, 0.3])


def test_readings_of_the_clock_become_intervals_without_the_first() -> None:
    start = (7 << 32) - 1500  # the low word wraps round
    marks = start + np.array([[0, 900, 2000, 4500], [50, 100, 1100, 9100]])
    words = np.stack([marks & 0xFFFFFFFF, marks >> 32], axis=-1).astype(np.uint32)
    np.testing.assert_array_equal(device_bench.intervals_us(words), [[1.1, 2.5], [1.0, 8.0]])


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


def options_of(*words: str) -> BenchOptions:
    return cli.make_options(arguments(*words))


def run(*words: str) -> int:
    return cli.run(arguments(*words))


def test_options_of_the_command_line_reach_the_bench() -> None:
    words = "dispatch combine --transports nvlink,xla --devices 4 --tokens 128,8192"
    more = "--routing uniform,zipf,one --sms 16,24 --precision fast,exact"
    sizes = "--hidden 2048 --top-k 4 --experts 64 --dtype float32"
    found = options_of(*words.split(), *more.split(), *sizes.split())
    assert found.on_gpus
    assert found.transports == ("nvlink", "xla")
    assert found.tokens == (128, 8192)
    assert found.routing == ("uniform", "zipf", "one")
    assert (found.sms, found.precision) == ((16, 24), ("fast", "exact"))
    assert found.row_bytes_on_gpus == 8192
    assert (found.devices, found.top_k, found.num_experts) == (4, 4, 64)


def test_gpus_that_are_there_are_taken_where_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli.gpus, "usable", lambda: 4)
    found = options_of("dispatch", "combine")
    assert (found.transports, found.devices, found.num_experts) == (("nvlink", "xla"), 4, 256)
    assert found.sms == (0,)
    assert options_of("gemm").transports == ("nvlink", "xla")
    assert options_of("dispatch", "--transports", "xla").devices == 8
    monkeypatch.setattr(cli.gpus, "usable", lambda: 0)
    assert options_of("dispatch", "combine").transports == ("memfd", "xla")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--transports", "nvlink,memfd"], "memfd runs on CPU devices, nvlink on GPUs"),
        (["--transports", "xla,stock"], "stock is for moe and train only"),
        (
            ["gemm", "--transports", "xla,torch"],
            "torch is for moe and train only, got it with gemm",
        ),
        (["--transports", "xla", "--tokens", "1,2"], "--tokens takes one number for CPU"),
        (["--transports", "nvlink", "--devices", "3"], "--experts must be a multiple of"),
        (["--transports", "nvlink", "--devices", "1", "--tokens", "0"], "--tokens must be at"),
        (["--routing", "worst"], "--routing must be of"),
        (["--precision", "double"], "--precision must be of"),
        (["--dtype", "int8"], "--dtype must be of"),
    ],
)
def test_options_that_cannot_be_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        options_of(*words)


def test_the_command_writes_a_table_and_keeps_every_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = [CLOCK, sample("dispatch", "ceiling", 40.0), sample("dispatch", "nvlink", 50.0)]
    monkeypatch.setattr(gpu_calls, "measure", lambda options, address, member: made)
    monkeypatch.setattr(cli.gpus, "usable", lambda: 4)
    words = ["dispatch", "--tokens", "128", "--experts", "16", "--top-k", "4", "--hidden", "512"]
    assert run(*words, "--save", str(tmp_path)) == 0
    table = capsys.readouterr().out
    assert "4 GPUs in one process" in table
    assert "X CEILING" in table
    assert run(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    kept = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    rows = [row for each in kept for row in each["rows"]]
    assert sorted(map(repr, rows)) == sorted(map(repr, found["movement"]))
    ours = found["movement"][1]
    assert (ours["transport"], ours["ratio_to_ceiling"]) == ("nvlink", 0.8)
    assert ours["kernel_us"] == [52.0, 53.0, 60.0]
    assert found["options"]["tokens"] == [128]


def test_gpus_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.gpus, "usable", lambda: 1)
    with pytest.raises(RuntimeUnavailableError, match="wants 2 GPUs .* found 1"):
        run("dispatch", "--transports", "nvlink", "--devices", "2")


def test_a_peer_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install 'ep-runtime\[torch\]'"):
        options_of("moe", "--transports", "memfd,torch", "--devices", "2")


class FakeNvml:
    """Fakes two GPUs that draw 500 W each, and a clock that each step advances by 10 ms."""

    NVMLError = OSError

    def __init__(self, counts: bool) -> None:
        self.now_s, self._counts = 3.0, counts

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return name

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> float:
        if not self._counts:
            raise OSError
        return 1e3 * 500 * self.now_s


@pytest.mark.parametrize(("counts", "joules"), [(True, 10.0), (False, None)])
def test_joules_of_a_step_are_those_of_all_its_gpus(
    counts: bool, joules: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(counts)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(energy.env, "visible_devices", lambda: "GPU-a,1,2")

    def run(steps: int) -> None:
        nvml.now_s += steps * 0.01

    assert energy.joules_per_step(2, run, 0.01) == joules
    assert energy.joules_per_step(0, run, 0.01) is None


def test_speeds_are_of_all_tokens_and_of_one_gpu() -> None:
    found = speeds.speeds(0.5, 1000, 98.9e12, 12.345, "NVIDIA H100 80GB HBM3")
    assert found == {"tokens_per_s": 2000, "tflops": 197.8, "mfu": 0.2, "joules": 12.35}
    assert speeds.speeds(0.5, 1000, 98.9e12, None, "another")["mfu"] is None
    assert [column.key for column in speeds.COLUMNS] == [*found]
