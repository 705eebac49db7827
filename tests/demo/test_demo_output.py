"""What the demo writes, without training: lines, the bar, the hint, the picture."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from ep_runtime_client import cli
from ep_runtime_client.demo.cli import make_config
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.render import Difference, Report, Reporter

# Three steps of 500, with compiling before.
STEPS = """
import numpy as np
from types import SimpleNamespace
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.render import Report, Reporter

reporter, report = Reporter(DemoConfig(steps=500)), Report()
result = SimpleNamespace(loss=np.float32(3.25), loads=np.ones((2, 8)), seconds=0.125)
with reporter.training("f32"):
    reporter._progress.refresh()
    for _ in range(3):
        report.losses.append(result.loss)
        reporter.step(report, result)
"""


def in_terminal(program: str, columns: int) -> str:
    """What a program writes to a terminal, without its control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    given = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**given, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 4096):
            text += part
    except OSError:  # the program has ended
        pass
    os.close(ours)
    assert process.wait(60) == 0, text
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text.decode())


@pytest.mark.parametrize(("columns", "extras"), [(80, False), (132, True)])
def test_a_narrow_terminal_keeps_step_loss_and_time_left(columns: int, extras: bool) -> None:
    frames = re.split(r"[\r\n]+", in_terminal(STEPS, columns))
    assert any(re.search(r"^compiling .* \d s", frame) for frame in frames), frames
    last = [frame for frame in frames if frame.startswith("step 3/500")][-1]
    assert re.search(r"^step 3/500  loss 3\.250 .* \d:\d\d:\d\d left", last)
    assert ("busiest expert 1.00x" in last) == extras
    assert max(map(len, frames)) <= columns


def test_a_pipe_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    exec(STEPS, {})
    assert capsys.readouterr().out.splitlines() == [
        "compiling",
        "step 1/500  loss 3.250  16,384 tokens/s  dropped 0  busiest expert 1.00x",
    ]


def test_the_first_line_says_what_comes_before_jax_is_imported() -> None:
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "from ep_runtime_client import cli\n"
        "cli.main(['demo', '--platform', 'cpu'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "jax" in done.stderr
    assert done.stdout == (
        "training a 1,772,160-parameter mixture-of-experts language model on 8 CPU devices: "
        "500 steps, about 2 min on two cores\n"
    )


@pytest.mark.parametrize("on_path", [True, False])
def test_the_hint_calls_the_program_as_it_was_called(
    on_path: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "a b" / "ep-runtime"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("PATH", str(script.parent) if on_path else "/nowhere")
    reporter = Reporter(make_config(cli.make_parser("demo").parse_args(["--platform", "cpu"])))
    reporter.hint(None)
    reporter.hint("unix:///x?uid=7")
    program = "ep-runtime" if on_path else f"'{script}'"
    assert capsys.readouterr().out.splitlines() == [
        f"in a second terminal: {program} handles --watch 1",
        f"in a second terminal: {program} handles --address 'unix:///x?uid=7' --watch 1",
    ]


def report_of(recipe: str, losses: list[float], held_out: float | None) -> Report:
    seconds = [[9.0, 9.0], *[[0.5, 1.0]] * (len(losses) - 1)]
    return Report(recipe, list(np.float32(losses)), seconds, held_out=held_out)


def test_the_table_puts_every_recipe_beside_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [report_of("bf16", [5, 4, 4], 3.6), report_of("fp8", [5, 4, 4.1], 3.625)]
    Reporter(DemoConfig(recipe="bf16,fp8")).end(reports)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bf16", "3", "4.000", "3.600", "+0.000", "4,096"] in lines
    assert ["fp8", "3", "4.100", "3.625", "+0.025", "4,096"] in lines


def test_the_end_says_what_a_comparison_found_or_how_to_make_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Reporter(DemoConfig(compare=True)).end([report_of("f32", [5, 4, 3], 3.6)])
    assert capsys.readouterr().out.splitlines() == [
        "loss bit-equal to plain JAX collectives in 3 of 3 steps",
        "tokens per second: 4,096 here, 2,048 on plain JAX collectives "
        "(2 steps each, compiling not counted)",
    ]
    found = report_of("f32", [3, 2], 3.6)
    found.difference = Difference(2, np.float32(2), np.float32(2.5))
    Reporter(DemoConfig(compare=True)).end([found])
    assert "step 2 is the first whose loss differs: 2 (0x40000000)" in capsys.readouterr().out
    Reporter(DemoConfig()).end([report_of("f32", [5], 3.6)])
    assert capsys.readouterr().out.startswith("ep-runtime demo --compare checks every loss")


def test_a_picture_is_written_of_runs_of_any_length(tmp_path: Path) -> None:
    from ep_runtime_client.demo.plot import write_plot

    reports = [report_of("bf16", [5, 4, 3.5], 3.6), report_of("fp8", [5.1], None)]
    write_plot(str(tmp_path / "curves.png"), DemoConfig(steps=100), reports)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    assert cli.main(["demo", "--plot", str(tmp_path / "a.png")]) == 1
    assert "--plot needs matplotlib: pip install 'ep-runtime[plot]'" in capsys.readouterr().err
