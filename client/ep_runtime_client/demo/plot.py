"""The loss curves of a demo as a picture. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.render import Report

# Steps that a curve is averaged over, a share of all of them.
_SMOOTH_SHARE = 0.04


def write_plot(path: str, config: DemoConfig, reports: Sequence[Report]) -> None:
    """Writes each recipe's losses, smoothed, over faint single steps.

    Args:
        path: of the picture; its ending names the format.
        config: of the demo, for the title.
        reports: with at least one step each.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    mesh = ",".join(f"{axis}={size}" for axis, size in config.axes.items())
    axes.set_title(f"{config.rules}, {config.optimizer}, {mesh}", fontsize="medium")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    for color, report in enumerate(reports):
        losses = np.asarray(report.losses, np.float64)
        width = min(len(losses), max(1, round(_SMOOTH_SHARE * config.steps)))
        means = np.convolve(losses, np.full(width, 1 / width), mode="valid")
        steps = np.arange(1, len(losses) + 1)
        axes.plot(steps, losses, color=f"C{color}", alpha=0.15, linewidth=0.8)
        held_out = "" if report.held_out is None else f", held out {report.held_out:.3f}"
        middle = np.arange(len(means)) + (width + 1) / 2
        axes.plot(middle, means, color=f"C{color}", label=f"{report.recipe}{held_out}")
    axes.legend()
    figure.savefig(path, dpi=120)
