"""The live screen of `ep-runtime top` and its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ep_runtime.allowed_names import shown
from ep_runtime.text import printable
from ep_runtime_client.cli import tables
from ep_runtime_client.cli.daemon import nodes
from ep_runtime_client.cli.ranks import board_samples, rows
from ep_runtime_client.readers import tallies

if TYPE_CHECKING:
    from ep_runtime_client.cli.ranks.live import Line

_KEYS = "q quit  s sort  r turn  l layers  up/down enter  esc back  g group"
_NUMBERS = ("count", "rate", "share", "ratio", "bytes", "seconds")


class Screen:
    """Shows a group's ranks, its layers with one chosen, or the ranks in one layer."""

    def __init__(self, seen: board_samples.BoardSamples, links: rows.Links) -> None:
        self._samples, self._links = seen, links
        self._group = 0
        self._layers = False  # shows the list of layers, or one layer
        self._opened = ""  # the layer it shows; empty: the list
        self._chosen = 0
        self._sort, self._reversed = 0, False

    def press(self, key: str) -> None:
        """Handles a key; ignores unknown ones."""
        if key == "s":
            self._sort, self._reversed = self._sort + 1, False
        elif key == "r":
            self._reversed = not self._reversed
        elif key == "g":
            self._group += 1
            self._show(layers=False)
        elif key == "l":
            self._show(layers=True)
        elif key == "back":
            self._show(layers=bool(self._opened))
        elif self._layers and not self._opened:
            self._press_in_list(key)

    def _press_in_list(self, key: str) -> None:
        listed = self._rows()[1]
        if key in ("up", "k", "down", "j") and listed:
            step = -1 if key in ("up", "k") else 1
            self._chosen = min(max(self._chosen + step, 0), len(listed) - 1)
        elif key == "enter" and listed:
            self._opened = str(listed[min(self._chosen, len(listed) - 1)]["layer"])
            self._sort, self._reversed = 0, False

    def _show(self, *, layers: bool) -> None:
        self._layers, self._opened = layers, ""
        self._sort, self._reversed, self._chosen = 0, False, 0

    @property
    def _key(self) -> tallies.GroupName | None:
        groups = list(self._samples.groups)
        return groups[self._group % len(groups)] if groups else None

    def _rows(self) -> tuple[Sequence[tables.Column], rows.Rows]:
        key = self._key
        shown: Sequence[tables.Column] = rows.RANKS
        found: rows.Rows = []
        if key is None:
            return shown, found
        if self._opened:
            found = rows.ranks_of_layer(self._samples.groups[key], self._opened)
            shown = board_samples.columns(found, rows.RANKS_OF_LAYER)
        elif self._layers:
            shown, found = rows.LAYERS, self._samples.layers(key)
        else:
            found = self._samples.ranks(key, self._links)
            shown = board_samples.columns(found, shown)
        shown = [column for column in shown if not column.wide]
        return shown, self._sorted(shown, found)

    def _sorted(self, columns: Sequence[tables.Column], found: rows.Rows) -> rows.Rows:
        """Sorts numbers from the largest, and names and texts from the smallest."""
        column = columns[self._sort % len(columns)]
        counts = column.kind in _NUMBERS and column.priority != tables.IDENTITY
        falling = counts != self._reversed
        without = [row for row in found if row[column.key] is None]
        have = [row for row in found if row[column.key] is not None]
        return sorted(have, key=lambda row: row[column.key], reverse=falling) + without

    def lines(self, width: int, height: int) -> list[Line]:
        """Returns the lines of the screen that fit."""
        key = self._key
        away: list[Line] = [
            (part, "red")
            for node in self._samples.missing
            for part in tables.fold(printable(nodes.reason(node)), width)
        ]
        if key is None:
            text = f"no ranks yet: the first sample takes {self._samples.interval_s:g} s"
            return [("ep-runtime top", "bold"), *away, (text, ""), (_KEYS, "dim")][:height]
        head: list[Line] = [
            (part, "bold red" if line.startswith(("SLOW", "SILENT")) else "bold")
            for line in self._samples.heading(key)
            for part in tables.fold(printable(line), width)
        ]
        head += away
        if self._opened:
            head.append((f"layer {shown(self._opened)}", "bold"))
        columns, found = self._rows()
        column = columns[self._sort % len(columns)]
        tail: list[Line] = [(f"{_KEYS}  |  by {column.title}", "dim")]
        table = self._table(columns, found, width, height - len(head) - 1)
        return [*head, *table, *tail][:height]

    def _table(
        self, columns: Sequence[tables.Column], found: rows.Rows, width: int, height: int
    ) -> list[Line]:
        cells = [tables.cells(columns, row, wide=False) for row in found]
        (block,) = tables.place(columns, cells, width, whole=False)
        lines: list[Line] = [(line, "bold") for line in tables.heading(block)]
        listed = self._layers and not self._opened
        first = max(0, self._chosen - max(1, height - len(lines)) + 1) if listed else 0
        for number in range(first, len(found)):
            style = "red" if found[number].get("mark") else ""
            if listed and number == self._chosen:
                style = "reverse"
            lines += [(line, style) for line in tables.draw(block, cells[number])]
        return lines[: max(height, 1)]
