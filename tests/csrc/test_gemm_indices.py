"""Index arithmetic of the grouped products' kernels, compiled for the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_COMPILE_S, _RUN_S = 120, 120


@pytest.mark.slow
def test_rows_of_groups_and_bytes_of_tiles_are_where_they_belong(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    program = tmp_path / "gemm_indices"
    # The warp's own cuda_runtime.h comes first.
    include = [f"-I{_HERE / 'warp'}", f"-I{_HERE.parents[1] / 'csrc'}"]
    source = str(_HERE / "gemm_indices.cc")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    build = [compiler, *flags, *include, source, "-o", str(program)]
    subprocess.run(build, check=True, timeout=_COMPILE_S)
    run = subprocess.run([program], capture_output=True, text=True, timeout=_RUN_S)
    assert run.returncode == 0, run.stdout
    assert run.stdout.endswith("0 of 21 wrong\n")
