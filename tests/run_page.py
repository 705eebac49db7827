"""`run_page.py PAGE`: runs a page's python blocks in order, in one namespace.

Each `prints` block is compared with what the code before it printed. A traceback names the page
and its lines.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import doc_pages

# Of a process that runs a page: what it shows are values, not speed.
CHEAP = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def main(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    for block in doc_pages.blocks(page):
        if "prints" in block.markers:
            assert printed.getvalue() == block.code, f"{block.place}: got\n{printed.getvalue()}"
            printed.truncate(printed.seek(0))
        elif block.language == "python" and block.runs:
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
    rest = printed.getvalue()
    assert not rest, f"{page.name} prints what no block shows:\n{rest}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
