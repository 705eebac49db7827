"""Compiles C++ tests of this folder, with some sources of csrc, into programs for the host."""

from __future__ import annotations

import shutil
from pathlib import Path

from child_programs import run_to_end

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


def compiled(folder: Path, name: str, *sources: str, flags: tuple[str, ...] = ()) -> Path:
    """Compiles `name`.cc with `sources` of csrc; `flags` may name folders whose
    headers come first.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    program = folder / name
    files = [str(HERE / f"{name}.cc"), *(str(CSRC / source) for source in sources)]
    strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror", *flags, f"-I{CSRC}"]
    run_to_end(compiler, *strict, *files, "-o", program)
    return program
