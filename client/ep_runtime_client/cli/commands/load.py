"""`ep-runtime load`: shows how many rows the experts of every layer get, and how evenly."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ep_runtime.allowed_names import shown
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.cli import render, tables
from ep_runtime_client.cli.daemon import nodes, reading
from ep_runtime_client.cli.ranks import board_samples
from ep_runtime_client.cli.tables import IDENTITY, Column
from ep_runtime_client.readers import tallies
from ep_runtime_client.readers.figures import copies_of
from ep_runtime_client.readers.figures import load_of as _layer

COLUMNS = (
    Column("layer", "LAYER", "name", priority=IDENTITY, about="layer; NAME[i] in a stack"),
    Column("rows", "ROWS", "rate", about="rows that its experts received"),
    Column("max_mean", "MAX/MEAN", "ratio", about="rows of the fullest expert over the mean"),
    Column("jain", "JAIN", "ratio", about="Jain's index: 1 if even, 1/experts if one gets all"),
    Column("fullest", "FULLEST", "count", about="expert with the most rows"),
    Column("ranks_max_mean", "BY RANK", "ratio", about="MAX/MEAN of ranks instead of experts"),
    Column("dropped", "DROPPED", "count", about="rows dropped, over capacity"),
    Column("rounds", "ROUNDS", "count", priority=3, about="extra chunks of its calls"),
    Column("unused", "UNUSED", "count", wide=True, about="experts that received no row"),
    Column("num_experts", "EXPERTS", "count", wide=True, about="number of experts"),
)
_MOST_CELLS = 64  # width of a line without a terminal
_LABEL = 24
# A cell shows its rows over the layer's mean: the fourth is the mean, the last twice that or more.
CELLS = " ▁▂▃▄▅▆▇█"
_PER_MEAN = 4
_DPI = 120
_MOST_OVER_MEAN = 3.0
_OVER_TIME = ("rows", "max_mean", "jain", "dropped")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layer", help="show this layer only")
    add("--png", metavar="FILE", help="draw the rows of the last interval; needs the extra plot")
    interval = "rows of the next S seconds instead of all since the group formed"
    board_samples.add_arguments(parser, interval, "count only the rows")
    reading.explain(parser, {"columns": COLUMNS}, board_samples.ABOUT_SINCE)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    _check(args)
    with source.open_source(args.address, timeout_s=args.timeout) as daemon:
        seen = board_samples.begin(args, daemon)
        known = nodes.everywhere(daemon, lambda one: one.groups(), args.node).rows
        copying = {_name(row) for row in known if row["spare_experts"]}
        history: History = {}
        for _ in range(args.samples):
            if seen.interval_s:
                seen.wait()
            groups = _groups(args, seen)
            for key, layers in groups.items():
                for layer in layers:
                    history.setdefault((key, layer["layer"]), []).append(layer)
            if args.output == "json" or not isinstance(seen, board_samples.PastSamples):
                _write(args, seen, groups, copying)
        if isinstance(seen, board_samples.PastSamples):
            seen.whole()
            groups = _groups(args, seen)
            if args.output != "json":
                _write(args, seen, groups, copying)
        if args.samples > 1 and args.output != "json":
            _write_history(history)
        if args.png:
            _write_pictures(args, groups)
        return seen.exit_code


def _check(args: argparse.Namespace) -> None:
    if args.samples > 1 and not (args.interval or args.since):
        raise InvalidArgumentError(
            "--samples needs --interval S (seconds of each sample) or --since SPAN"
        )
    if args.png and importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("--png needs matplotlib: pip install 'ep-runtime[plot]'")


Groups = Mapping[tallies.GroupName, list[dict[str, Any]]]
History = dict[tuple[tallies.GroupName, str], list[dict[str, Any]]]


def _name(row: Mapping[str, Any]) -> tallies.GroupName:
    return tallies.GroupName(row["uid"], row["job"], row["name"])


def _ranks(seen: board_samples.BoardSamples) -> Mapping[tallies.GroupName, Sequence[Any]]:
    """Returns each group's ranks with their rows in the interval, or since the group formed."""
    return seen.groups if seen.interval_s else seen.sums()


def _groups(args: argparse.Namespace, seen: board_samples.BoardSamples) -> Groups:
    """Returns each group's layers with their rows in the interval, or since the group formed."""
    found = {}
    for key, of_group in _ranks(seen).items():
        dropped = seen.grown(key, "dropped_rows", from_start=not seen.interval_s)
        extra_chunks = seen.grown(key, "rounds", from_start=not seen.interval_s)
        rows = seen.grown(key, "rows", from_start=not seen.interval_s)
        names = dict.fromkeys(name for one in of_group for name in tallies.layer_names(one))
        layers = [
            {
                **_layer(of_group, name, rows.get(name, 0)),
                "dropped": dropped.get(name, 0),
                "rounds": extra_chunks.get(name, 0),
            }
            for name in names
            if args.layer in (None, name)
        ]
        if args.layer is not None and not layers:
            raise InvalidArgumentError(
                f"group {shown(key.group)} has called no layer {args.layer!r}",
                argument="--layer",
            )
        found[key] = layers
    return found


def _write(
    args: argparse.Namespace,
    seen: board_samples.BoardSamples,
    groups: Groups,
    copying: Set[tallies.GroupName],
) -> None:
    """`copying`: groups whose ranks have slots for copies of experts."""
    ranks = _ranks(seen)
    copies = {key: copies_of(ranks[key]) if key in copying else None for key in groups}
    if args.output == "json":
        items = [
            {**seen.about(key), "copies": copies[key], "layers": layers}
            for key, layers in groups.items()
        ]
        seen.write_json("load", items, compact=args.samples > 1)
        return
    if not groups:
        render.out("no groups")
    for key, layers in seen.apart(groups):
        render.write_text(f"{board_samples.title(key)}: rows {seen.when(key)}")
        render.write_table(COLUMNS, layers, wide=args.output == "wide", empty="no calls yet")
        if (found := copies[key]) is not None:
            own, computed = found["own_max_mean"], found["computed_max_mean"]
            render.write_text(
                f"copies of experts: over all layers the fullest rank computed {computed:.2f} "
                f"times the mean, with {own:.2f} of its own experts; at least "
                f"{found['moved_share']:.1%} of all rows went to copies"
            )
        _write_heat(layers)


def _write_heat(layers: Sequence[dict[str, Any]]) -> None:
    """Writes a line of cells for each layer, as wide as the terminal."""
    if any(layer["rows"] and not layer["experts"] for layer in layers):
        render.write_text("rows by expert are not counted in a group that spans nodes")
    layers = [layer for layer in layers if layer["experts"]]
    if not layers:
        return
    # Layer names differ at their ends.
    names = [shown(layer["layer"][-_LABEL:]) for layer in layers]
    label = max(map(len, names))
    cells = max((render.width() or _MOST_CELLS + label + 2) - label - 2, 8)
    most = max(layer["num_experts"] for layer in layers)
    each = f", up to {-(-most // cells)} in a cell" if most > cells else ""
    render.out("")
    render.write_text(f"by expert{each}: {CELLS[4]} is a layer's mean, {CELLS[8]} twice it")
    for name, layer in zip(names, layers, strict=True):
        render.out(f"{name:<{label}}  {heat_line(layer['experts'], cells)}")


def _write_history(history: History) -> None:
    """Writes rows and balance of each interval, and drops if there are any."""
    for column in COLUMNS:
        if column.key not in _OVER_TIME:
            continue
        told = {
            (group, layer): [sample[column.key] for sample in samples]
            for (group, layer), samples in history.items()
            if column.key != "dropped" or any(sample["dropped"] for sample in samples)
        }
        if told:
            render.out("")
            render.out(f"{column.title} by interval")
        for (group, layer), values in told.items():
            text = " ".join(tables.cell(value, column.kind) for value in values)
            render.write_text(text, start=f"{shown(group.group)} {shown(layer)}  ", then="  ")


def _write_pictures(args: argparse.Namespace, groups: Groups) -> None:
    called = {
        key: counted
        for key, layers in groups.items()
        if (counted := [layer for layer in layers if layer["experts"]])
    }
    if len(called) != 1:
        raise InvalidArgumentError(
            f"--png takes one group that was called, got {len(called)}: name one",
            argument="--png",
        )
    for key, layers in called.items():
        write_picture(args.png, board_samples.title(key), layers)
        if args.output != "json":
            render.write_text(f"wrote {args.png}")


def heat_line(rows: Sequence[int], width: int) -> str:
    """Draws the experts in order. If there are more than `width`, several share a cell, which shows
    the fullest of them."""
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
    """Draws layers x experts, each by its rows over its layer's mean. Needs the extra `plot`.

    Args:
        path: file name; its ending chooses the format.
        title: title above the picture.
        layers: dicts with `layer` and `experts`, rows by expert.
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
