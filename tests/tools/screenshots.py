"""Renders docs/images again: `top`, `load` and `skew` of a demo job on this machine's CPU.

    .venv/bin/python tests/tools/screenshots.py [FOLDER]

Takes some minutes. The pictures name no fonts of the network: a browser takes one of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "server"), str(ROOT / "client")]

from rich.console import Console  # noqa: E402
from rich.terminal_theme import MONOKAI  # noqa: E402
from rich.text import Text  # noqa: E402

from ep_runtime_client import cli  # noqa: E402
from ep_runtime_client.cli.daemon import source  # noqa: E402
from ep_runtime_client.cli.ranks import board_samples, rows, screen  # noqa: E402

WIDTH, HEIGHT = 96, 24
WAIT_S = 600.0
INTERVAL_S = 10.0
JOB = "demo --steps 1000000 --devices 4 --mesh ep=4 --experts 32 --layers 4 --batch 8 --seq 64"
COMMAND = [sys.executable, "-P", "-m", "ep_runtime_client.cli"]
FONT = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def picture(title: str, path: Path, text: Text) -> None:
    """Draws the text in a window, as SVG."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(text, soft_wrap=True)
    drawn = console.export_svg(title=title, theme=MONOKAI, unique_id=path.stem)
    drawn = re.sub(r"@font-face\s*{[^}]*}", "", drawn)
    drawn = re.sub(r"<!--.*?-->", "", drawn).replace("<svg ", '<svg xml:space="preserve" ', 1)
    drawn = re.sub(r"Fira Code(, monospace)?", FONT, drawn)
    path.write_text(re.sub(r"\n\s*\n+", "\n", drawn), encoding="utf-8")


class Terminal(io.StringIO):
    """A stream that commands take for a terminal."""

    def isatty(self) -> bool:
        return True


def said(words: list[str]) -> Text:
    """Returns a command's output on a terminal of that width."""
    os.environ["COLUMNS"] = str(WIDTH)
    with contextlib.redirect_stdout(Terminal()) as terminal:
        cli.main(words)
    return Text.from_ansi(terminal.getvalue().rstrip("\n"))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until_s:
            sys.exit(f"not within {WAIT_S:g} s: {what}")
        time.sleep(0.5)


def pictures(address: str, folder: Path) -> None:
    with source.open_source(address, timeout_s=30.0) as daemon:
        wait_for(lambda: any(rank["calls"] > 500 for rank in daemon.tallies()), "steps of the demo")
        seen = board_samples.BoardSamples(daemon, None, None, INTERVAL_S)
        seen.wait()
        shown = screen.Screen(seen, rows.Links())
        picture(
            "ep-runtime top", folder / "top.svg", screen._text(shown.lines(WIDTH, HEIGHT), WIDTH)
        )
    for name in ("load", "skew"):
        words = [name, "--address", address, "--interval", str(INTERVAL_S)]
        picture(f"ep-runtime {name}", folder / f"{name}.svg", said(words))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(sys.path[:3])
    job = subprocess.Popen(
        [*COMMAND, *JOB.split()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "EP_RUNTIME_ADDRESS": "embedded"},
    )
    assert job.stdout is not None
    try:
        for line in job.stdout:
            if found := re.search(r"unix://\S+?(?=[,\s])", line):
                pictures(found[0], folder)
                return
        sys.exit("the demo named no daemon")
    finally:
        job.terminate()
        job.wait(WAIT_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images")
