"""JAX's persistent cache in a job of several processes: some load what others compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multiprocess.launch import Job

_SCRIPT = """
from multiprocess import programs_job
say(**programs_job.warm(os.environ["TEST_CACHE"], runs=3))
hear()
"""


def _start(address: str, cache: Path) -> list[dict[str, Any]]:
    """What each process found in the cache, having checked every value of its programs."""
    with Job(
        _SCRIPT,
        processes=2,
        devices=2,
        EP_RUNTIME_ADDRESS=address,
        TEST_CACHE=str(cache),
    ) as job:
        found = job.heard()
        job.end()
    return found


def test_three_starts_in_a_row_with_the_cache_end_with_the_right_values(
    address: str, tmp_path: Path
) -> None:
    starts = [_start(address, tmp_path) for _ in range(3)]
    first = [start[0] for start in starts]
    assert first[0]["misses"] > 0
    for start in first[1:]:  # process 0 loads every program; what the others do is JAX's affair
        assert start["misses"] == 0
        assert start["hits"] == first[0]["hits"] + first[0]["misses"]
