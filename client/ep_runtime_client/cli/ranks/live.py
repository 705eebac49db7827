"""A screen of lines that is redrawn in place, and its keys."""

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
from ep_runtime.text import printable

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
        while True:
            size = shutil.get_terminal_size()
            live.update(_text(draw(size.columns, size.lines - 1), size.columns), refresh=True)
            until_s = time.monotonic() + every_s
            pressed = key(every_s)
            if pressed == QUIT:
                return
            while pressed:
                press(pressed)
                size = shutil.get_terminal_size()
                live.update(_text(draw(size.columns, size.lines - 1), size.columns), refresh=True)
                pressed = key(max(0.0, until_s - time.monotonic()))
                if pressed == QUIT:
                    return
            update()


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
