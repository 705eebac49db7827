"""JAX's persistent cache in a job of several processes with GPUs: three starts in a row."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.jobs import layouts

_SCRIPT = """
from multiprocess import programs_job
say(**programs_job.warm(os.environ["TEST_CACHE"], runs=3))
hear()
"""


@pytest.mark.parametrize(
    "layout", ["one GPU each, visible alone", "two processes, all GPUs visible"]
)
def test_three_starts_in_a_row_with_the_cache_end_with_the_right_values(
    job_gpus: int, address: str, tmp_path: Path, layout: str
) -> None:
    starts = []
    for _ in range(3):
        with layouts.job(
            _SCRIPT, layout, job_gpus, EP_RUNTIME_ADDRESS=address, TEST_CACHE=str(tmp_path)
        ) as job:
            starts.append(job.heard(240)[0])
            job.end()
    for start in starts[1:]:
        assert start["misses"] == 0
        assert start["hits"] > 0
