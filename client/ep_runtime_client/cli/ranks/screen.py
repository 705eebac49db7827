"""The live screen of `ep-runtime top` and its keys."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ep_runtime import env
from ep_runtime.allowed_names import shown
from ep_runtime.text import printable
from ep_runtime_client.cli import tables
from ep_runtime_client.cli.daemon import nodes
from ep_runtime_client.cli.ranks import board_samples, rows
from ep_runtime_client.readers import tallies

_KEYS = "q quit  s sort  r turn  l layers  up/down enter  esc back  g group"
_NUMBERS = ("count", "rate", "share", "ratio", "bytes", "seconds")
# A line and its style, as rich names styles.
Line = tuple[str, str]
Draw = Callable[[int, int], Sequence[Line]]
QUIT = "q"
_NAMED = {"\x1b[A": "up", "\x1b[B": "down", "\x1b": "back", "\x7f": "back", "\r": "enter"}
_NAMED |= {"\x1bOA": "up", "\x1bOB": "down", "\n": "enter", "\x03": QUIT}
_ESCAPE_S = 0.05  # longest gap between the bytes of one key


def possible() -> bool:
    """Whether input and output are a terminal."""
    return sys.stdout.isatty() and sys.stdin.isatty()


def run(
    draw: Draw, press: Callable[[str], None], update: Callable[[], None], every_s: float
) -> None:
    """Draws until `q`. It calls `update` every `every_s`, and `press` with each other key: a
    character, or "up", "down", "enter", "back"."""
    console = Console(no_color=env.no_color(), highlight=False)
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        until_s = time.monotonic() + every_s
        while True:
            size = shutil.get_terminal_size()
            live.update(_text(draw(size.columns, size.lines - 1), size.columns), refresh=True)
            pressed = key(max(0.0, until_s - time.monotonic()))
            if pressed == QUIT:
                return
            if pressed:
                press(pressed)
            else:
                update()
                until_s = time.monotonic() + every_s


def _text(lines: Sequence[Line], width: int) -> Text:
    """Cuts lines to the width, because a wrapped line would push others off the screen."""
    drawn = Text(no_wrap=True, overflow="crop")
    for number, (line, style) in enumerate(lines):
        drawn.append("\n" * bool(number))
        drawn.append(printable(line)[:width], style=style)
    return drawn


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits the given seconds for a key and returns it, or ""."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield _Keys(stdin).next
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


class _Keys:
    """Reads keys of a terminal; some come as several bytes."""

    def __init__(self, stdin: int) -> None:
        self._stdin = stdin
        self._bytes = ""

    def next(self, wait_s: float) -> str:
        if not self._fill(1, wait_s):
            return ""
        length = 1
        if self._bytes[0] == "\x1b" and self._fill(2, _ESCAPE_S) and self._bytes[1] in "[O":
            length = 3 if self._fill(3, _ESCAPE_S) else 2
        key, self._bytes = self._bytes[:length], self._bytes[length:]
        return _NAMED.get(key, key)

    def _fill(self, count: int, wait_s: float) -> bool:
        """Reads until there are `count` bytes; returns False if they do not arrive in time."""
        while len(self._bytes) < count:
            if not select.select([self._stdin], [], [], wait_s)[0]:
                return False
            read = os.read(self._stdin, 64).decode(errors="replace")
            self._bytes += read or QUIT  # an empty read means that the terminal is gone
        return True


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
