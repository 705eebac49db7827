"""Loss curves and the table of several recipes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from ep_runtime_client import cli
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.render import Reporter, Run
from ep_runtime_client.demo.training import TrainingReport


def run_of(recipe: str, losses: list[float], held_out: float | None) -> Run:
    report = TrainingReport(steps=len(losses), seconds=2.0, tokens=600)
    report.losses = [np.float32(loss) for loss in losses]
    return Run(recipe, report, held_out)


@pytest.mark.parametrize("several", [False, True])
def test_a_picture_is_written_of_runs_of_any_length(tmp_path: Path, several: bool) -> None:
    from ep_runtime_client.demo.plot import write_plot

    runs = [run_of("bf16", [5.0, 4.0, 3.5], 3.6)]
    if several:
        runs.append(run_of("fp8", [5.1], None))
    path = tmp_path / "curves.png"
    write_plot(str(path), DemoConfig(steps=100), runs)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_are_means_around_their_steps() -> None:
    from ep_runtime_client.demo.plot import smooth

    steps, mean = smooth(np.array([1.0, 2.0, 3.0, 10.0]), steps=75)
    np.testing.assert_allclose(steps, [2.0, 3.0])
    np.testing.assert_allclose(mean, [2.0, 5.0])


def test_the_table_puts_every_recipe_beside_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of("bf16", [5.0, 4.0], 3.6), run_of("fp8", [5.0, 4.1], 3.625)]
    Reporter(DemoConfig(recipe="bf16,fp8")).runs(runs)
    lines = capsys.readouterr().out.splitlines()
    assert [
        line.split() for line in lines if line.startswith((" bf16", " fp8", "  bf16", "  fp8"))
    ] == [
        ["bf16", "2", "4.000", "3.600", "+0.000", "300"],
        ["fp8", "2", "4.100", "3.625", "+0.025", "300"],
    ]


def test_a_missing_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    assert cli.main(["demo", "--plot", str(tmp_path / "a.png")]) == 1
    assert "--plot needs matplotlib: pip install 'ep-runtime[plot]'" in capsys.readouterr().err
