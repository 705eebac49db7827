"""How evenly experts are loaded, as one line of blocks for a layer, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A cell by its rows over the layer's mean: the fourth is the mean, the last twice that or more.
CELLS = " ▁▂▃▄▅▆▇█"
_PER_MEAN = 4
_DPI = 120
_MOST_OVER_MEAN = 3.0


def line(rows: Sequence[int], width: int) -> str:
    """The experts in order; several share a cell where they are more than `width`, and the fullest
    of them decides it."""
    total = sum(rows)
    if not total:
        return CELLS[0] * min(len(rows), width)
    mean, cells = total / len(rows), min(len(rows), width)
    bounds = [number * len(rows) // cells for number in range(cells + 1)]
    parts = [max(rows[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    return "".join(_cell(part / mean) for part in parts)


def _cell(over_mean: float) -> str:
    return CELLS[min(round(over_mean * _PER_MEAN) or (over_mean > 0), len(CELLS) - 1)]


def write_picture(path: str, title: str, layers: Sequence[dict[str, Any]]) -> None:
    """Writes layers x experts, each by its rows over the mean of its layer. Needs the extra `plot`.

    Args:
        path: its ending names the format.
        title: above it.
        layers: with `layer` and `experts`, rows by expert.
    """
    import numpy as np
    from matplotlib.figure import Figure

    most = max(len(layer["experts"]) for layer in layers)
    over_mean = np.full((len(layers), most), np.nan)
    for number, layer in enumerate(layers):
        rows = np.asarray(layer["experts"], np.float64)
        if rows.sum():
            over_mean[number, : len(rows)] = rows / rows.mean()
    figure = Figure(figsize=(10, min(2 + 0.3 * len(layers), 20)), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(over_mean, aspect="auto", cmap="coolwarm", vmin=0, vmax=_MOST_OVER_MEAN)
    axes.set_title(title, fontsize="medium", parse_math=False)
    axes.set_xlabel("expert")
    names = [layer["layer"] for layer in layers]
    axes.set_yticks(range(len(layers)), names, fontsize="small", parse_math=False)
    figure.colorbar(shown, label="rows over the layer's mean", extend="max")
    figure.savefig(path, dpi=_DPI)
