"""The loss curves of a demo as a picture. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.render import Run

# Steps that a curve is averaged over, a share of all of them.
_SMOOTH_SHARE = 0.04
_DPI = 120


def write_plot(path: str, config: DemoConfig, runs: Sequence[Run]) -> None:
    """Writes the losses of every recipe, and below, of several, their distance from the first.

    Args:
        path: of the picture; its ending names the format.
        config: of the demo, for the title.
        runs: with at least one step each; curves are moving averages over faint single steps.
    """
    several = len(runs) > 1
    figure = Figure(figsize=(8, 6.5 if several else 4.5), layout="constrained")
    rows = figure.subplots(2 if several else 1, sharex=True, squeeze=False)[:, 0]
    mesh = ",".join(f"{axis}={size}" for axis, size in config.axes.items())
    rows[0].set_title(f"{config.rules}, {config.optimizer}, {mesh}", fontsize="medium")
    rows[0].set_ylabel("loss, nats per byte")
    for color, run in enumerate(runs):
        losses = np.asarray(run.report.losses, np.float64)
        rows[0].plot(*_single(losses), color=f"C{color}", alpha=0.15, linewidth=0.8)
        rows[0].plot(*smooth(losses, config.steps), color=f"C{color}", label=_label(run))
    rows[0].legend()
    if several:
        _distances(rows[1], config, runs)
    rows[-1].set_xlabel("step")
    figure.savefig(path, dpi=_DPI)


def smooth(losses: npt.NDArray[Any], steps: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(steps, moving average): each value is the mean of the losses around its step."""
    width = min(len(losses), max(1, round(_SMOOTH_SHARE * steps)))
    mean = np.convolve(losses, np.full(width, 1 / width), mode="valid")
    return np.arange(len(mean)) + (width + 1) / 2, mean


def _single(losses: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return np.arange(1, len(losses) + 1), losses


def _label(run: Run) -> str:
    return run.recipe if run.held_out is None else f"{run.recipe}, held out {run.held_out:.3f}"


def _distances(axes: Any, config: DemoConfig, runs: Sequence[Run]) -> None:
    first = np.asarray(runs[0].report.losses, np.float64)
    axes.axhline(0, color="C0", linewidth=0.8)
    for color, run in enumerate(runs[1:], start=1):
        losses = np.asarray(run.report.losses, np.float64)
        shared = min(len(first), len(losses))
        distance = losses[:shared] - first[:shared]
        axes.plot(*smooth(distance, config.steps), color=f"C{color}", label=run.recipe)
    axes.set_ylabel(f"loss minus that of {runs[0].recipe}")
    axes.legend()
