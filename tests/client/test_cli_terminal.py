"""Runs every command on terminals of 80 and 200 columns: no name is cut."""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from typing import Any

import fixed_daemon as fixed
import pytest

from ep_runtime_bench import cli as bench
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.movement import gpu_movement
from ep_runtime_client import cli
from ep_runtime_client.cli import tables
from ep_runtime_client.cli.commands import describe, doctor, events, load, skew, status
from ep_runtime_client.cli.daemon import nodes, reading, source
from ep_runtime_client.cli.machine import nvml
from ep_runtime_client.cli.ranks import rows

WIDTHS = (80, 200)  # the narrowest supported width, and one that fits every table

# Names and states that each command must show uncut.
NODE = fixed.NODES[1]
SHOWN = {
    "status": (
        *("SERVING", NODE, "JOINED", "host", "LATE: ranks 0", "SILENT: process 4002"),
        "CERTIFICATE: /etc/ep-runtime/node03.pem ends in 29d",
    ),
    "status -o wide": (fixed.GPU, NODE, "10.17.3.103:7700", "141.0 GiB"),
    f"status --node {NODE}": ("SERVING",),
    "sessions": (NODE, fixed.SESSION, "SUSPECT"),
    "sessions --all": (NODE, "s-ba9876543210", "DEAD"),
    "sessions -o wide": (fixed.SESSION, "SUSPECT", "team=nlp", "123456"),
    "groups": (NODE, fixed.GROUP, "READY", "rank 3"),
    "groups -o wide": (
        fixed.GROUP,
        "768.0 GiB",
        "ready, 64 ranks",
        "2.28.9",
        f"5:{fixed.GPU[:12]}",
    ),
    "layers": (NODE, fixed.LAYER, fixed.GROUP),
    "layers -o wide": (fixed.LAYER, fixed.GROUP),
    "handles": (NODE, fixed.LAYER, "BUSY"),
    "handles -o wide": (fixed.LAYER, "BUSY", fixed.GROUP, "COMBINE_BACKWARD", "123456"),
    "buffers": (NODE, "b-1234", "QUARANTINED"),
    "buffers -o wide": (fixed.GPU, "QUARANTINED"),
    "events": ("1000", "session.hello", "group.ready", "rank.late"),
    "events -o wide": ("1002", "rank.late", fixed.SESSION, fixed.GROUP),
    f"describe session {fixed.SESSION}": (fixed.SESSION, "SUSPECT", fixed.GROUP, "rank.late"),
    f"describe group {fixed.GROUP}": (
        "READY",
        "members:",
        "ranks 0, 1, 2 wait for rank 3",
        "SILENT",
    ),
    f"describe layer {fixed.LAYER}": (fixed.LAYER, "handles:", "BUSY"),
    f"describe handle {fixed.LAYER}": (fixed.LAYER, "BUSY"),
    "describe buffer b-1234": ("b-1234", fixed.GPU, "QUARANTINED", "12.0 GiB"),
    f"describe node {NODE}": (NODE, "JOINED", "SERVING"),
    f"groups --node {NODE} {fixed.GROUP}": (fixed.GROUP, "READY", "members:", "768.0 GiB"),
    "top --samples 1 --interval 0.01": (fixed.GROUP, "<<<", "silent", "SLOW: rank 3"),
    "top --samples 2 --interval 0.01 -o wide": (NODE, "<<<", "WAITING", fixed.LAYER, "4003"),
    f"load --node {NODE}": (fixed.GROUP, fixed.LAYER, "MAX/MEAN", "▄"),
    "load -o wide --interval 0.01 --samples 2": (fixed.LAYER, "256", "MAX/MEAN by interval"),
    "load --since 1h": (fixed.GROUP, fixed.LAYER, "in the last 1h0m", "▄"),
    "load --since 1h --samples 12": ("in the last 1h0m", "JAIN by interval"),
    "skew --since 90s --samples 2": ("in 45.0s that ended 45.0s ago", "SLOW: rank 3"),
    "top --since 10m -o wide": (NODE, "<<<", "in the last 10m0s"),
    "skew --interval 0.01": (fixed.GROUP, "SLOW: rank 3", "COMBINE_BWD", "all ops: share"),
    "skew --interval 0.01 --op dispatch": ("DISPATCH", "ms a call"),
    "skew --interval 0.01 -o wide": ("DISPATCH", "COMBINE_BWD", "ms a call"),
    "doctor": ("native library", "FAIL", "gpu memory", "open files", "WARN"),
    "version": ("client", "daemon", "0.2.0"),
    "--help": ("usage: ep-runtime COMMAND", "groups", "sessions"),
    "drain --yes": ("draining",),
    "undrain": ("admitted again",),
    f"fence {fixed.SESSION} --yes": (fixed.GROUP,),
    f"reclaim {fixed.GROUP} --yes": ("reclaimed",),
}
# Columns of every table of a command.
TABLES = {
    "status": (status._POOLS, status._USERS, nodes.COLUMNS, nvml.COLUMNS),
    "events": (events.COLUMNS,),
    "doctor": (doctor._COLUMNS,),
    "describe": (reading.RANKS,),
    "top": (rows.RANKS, rows.LAYERS),
    "load": (load.COLUMNS,),
    "skew": (skew.COLUMNS,),
    **{view.kind: (view.columns,) for view in describe.VIEWS.values()},
}
CODES = {"status": cli.LATE, "skew": cli.LATE, "doctor": cli.PARTIAL}
FINDINGS = [
    doctor.Finding("native library", "FAIL", "libep_runtime_cpu.so: " * 9, "install it again"),
    doctor.Finding("open files", "WARN", "256 of 4096", "ulimit -n 1024 or more, " * 9),
    doctor.Finding("gpu memory", "OK", "; ".join(f"{i}: 17.0 GiB of 141.0 GiB" for i in range(8))),
]


def _machine() -> nvml.Machine:
    links = {index: "NV18" for index in range(1, 8)}
    gpu = nvml.Gpu(0, fixed.GPU, "NVIDIA H200", 141 * fixed.GIB, 17 * fixed.GIB, 53125, links)
    return nvml.Machine("580.65.06", (gpu,))


@pytest.fixture(params=WIDTHS)
def terminal(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """A terminal of that many columns, and a running daemon."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(source, "open_source", fixed.open_source)
    monkeypatch.setattr(nvml, "probe", _machine)
    monkeypatch.setattr(doctor, "findings", lambda args: FINDINGS)
    return int(request.param)


def _run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the command on the terminal; capsys makes new streams for every phase."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    return cli.main(words)


@pytest.mark.parametrize("words", SHOWN)
def test_a_command_fits_the_terminal(
    words: str, terminal: int, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _run(words.split(), monkeypatch)
    said = capsys.readouterr()
    assert code == CODES.get(words.split()[0], 0) or "--node" in words, said.err
    lines = (said.out + said.err).splitlines()
    assert [line for line in lines if tables.cell_len(line) > terminal] == []
    for text in SHOWN[words]:
        assert text in said.out, f"{text!r} is cut or missing:\n{said.out}"
    assert "…" not in said.out


def test_a_bench_leaves_no_figure_out(
    terminal: int, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = gpu_movement.COLUMNS
    row = {column.key: 1000 + number for number, column in enumerate(columns)}
    report = BenchReport("dispatch", "dispatch on 2 GPUs", columns, [row | {"op": "dispatch"}])
    module = types.SimpleNamespace(run=lambda options: report)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(bench, "make_options", lambda args: BenchOptions())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    arguments = argparse.Namespace(output="table", save=None)
    assert bench.run(arguments) == 0
    text = capsys.readouterr().out
    assert max(map(tables.cell_len, text.splitlines())) <= terminal
    figures = [str(1000 + i) for i, column in enumerate(columns) if column.key != "op"]
    assert [figure for figure in figures if figure not in text] == []


def test_every_command_is_rendered() -> None:
    elsewhere = {
        "serve",
        "demo",
        "bench",
        "certs",
        "completion",
        "dump",
        "coordination",
    }  # no lists
    assert {words.split()[0] for words in SHOWN} - {"--help"} == set(cli.COMMANDS) - elsewhere


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "serve"])
def test_help_fits_and_explains_every_column(
    name: str, terminal: int, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run([name, "--help"], monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > terminal] == []
    for column in [column for columns in TABLES.get(name, ()) for column in columns]:
        assert column.about, f"{name}: {column.title}"
        assert any(line.startswith(f"  {column.title} ") for line in lines), column.title


@pytest.mark.parametrize("words", ["describe gruop x", "groups --outputt json", "load -o x"])
def test_wrong_usage_fits(
    words: str, terminal: int, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(words.split(), monkeypatch) == cli.USAGE
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if len(line) > terminal] == []


def test_titles_are_short() -> None:
    for columns in [columns for several in TABLES.values() for columns in several]:
        for column in columns:
            most = 10 if column.wide else 8
            assert len(column.title) <= most, f"{column.title} widens its column"
