"""`run_page.py PAGE`: runs a page's python blocks in order, in one namespace.

Each `prints` block is compared with what the code before it printed. A `beside` block runs in a
shell, with the daemon of the page's `session` in EP_RUNTIME_ADDRESS, and `shows` has lines of its
output. A traceback names the page and its lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import doc_pages

# For a process that runs a page, which shows values, not speed.
CHEAP = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
BESIDE_TIMEOUT_S = 60.0


def main(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, shown = io.StringIO(), ""
    for block in doc_pages.blocks(page):
        if "prints" in block.markers:
            assert printed.getvalue() == block.code, f"{block.place}: got\n{printed.getvalue()}"
            printed.truncate(printed.seek(0))
        elif "shows" in block.markers:
            doc_pages.check_shown(block, shown)
        elif "beside" in block.markers:
            shown = beside(block, names["session"].address, os.environ)
        elif block.language == "python" and block.runs:
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
    rest = printed.getvalue()
    assert not rest, f"{page.name} prints what no block shows:\n{rest}"


def beside(block: doc_pages.Block, address: str, environment: Mapping[str, str]) -> str:
    """Returns the output of commands in a second terminal."""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            cwd=empty,
            env={**environment, "EP_RUNTIME_ADDRESS": address, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=BESIDE_TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, f"{block.place}: {done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
