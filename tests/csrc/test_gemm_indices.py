"""Index arithmetic of the grouped products' kernels, compiled for the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from child_programs import run_to_end
from host_programs import HERE, compiled


@pytest.mark.slow
def test_rows_of_groups_and_bytes_of_tiles_are_where_they_belong(tmp_path: Path) -> None:
    # The warp's own cuda_runtime.h comes first.
    flags = ("-O1", "-Wno-unknown-pragmas", f"-I{HERE / 'warp'}")
    program = compiled(tmp_path, "gemm_indices", flags=flags)
    assert run_to_end(program).stdout.endswith("0 of 21 wrong\n")
