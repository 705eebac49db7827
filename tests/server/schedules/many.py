"""Many schedules, on all cores where they are many."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import os
from collections.abc import Iterator

from schedules.schedule import make_schedule, run, shrunk

# Of a process at a time: half a minute.
_CHUNK = 500


def run_all(count: int) -> tuple[int, str]:
    """Runs the schedules of seeds 0 to `count` - 1.

    Returns:
        Calls between daemons, and the first schedule with a fault as small as it gets; "" where
        there was none. Others with one may go unlooked at.
    """
    chunks = [range(low, min(low + _CHUNK, count)) for low in range(0, count, _CHUNK)]
    calls = 0
    for some, fault in map(_run_some, chunks) if len(chunks) < 2 else _on_all_cores(chunks):
        calls += some
        if fault:
            return calls, fault
    return calls, ""


def _on_all_cores(chunks: list[range]) -> Iterator[tuple[int, str]]:
    fresh = multiprocessing.get_context("spawn")  # this process may have threads
    pool = concurrent.futures.ProcessPoolExecutor(os.cpu_count(), fresh, quick_collections)
    try:
        for done in concurrent.futures.as_completed(pool.submit(_run_some, x) for x in chunks):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def quick_collections() -> None:
    """Each run ends with one, which is to look at what the run made alone."""
    gc.collect()
    gc.freeze()


def _run_some(seeds: range) -> tuple[int, str]:
    calls = 0
    for seed in seeds:
        result = run(make_schedule(seed))
        calls += result.num_calls
        if result.faults:
            small = shrunk(make_schedule(seed))
            lines = [str(small), *run(small).said, "all faults of the one before:", *result.faults]
            return calls, "\n".join(lines)
    return calls, ""
