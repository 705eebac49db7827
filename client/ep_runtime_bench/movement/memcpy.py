"""The upper bound for token movement on CPU: a plain copy of as many bytes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

MEMCPY = "memcpy"  # name of the subject


class Memcpy:
    """Copies `size` bytes between two warm buffers, one thread per usable CPU.

    Args:
        size: number of bytes that all processes copy together.
        processes: number of processes that copy at the same time, each its part.
    """

    def __init__(self, size: int, processes: int = 1) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        size = -(-size // processes)
        # Write to the buffers, because the first copy to an untouched page would cause a page
        # fault.
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        cuts = [size * part // threads for part in range(threads + 1)]
        self._parts = [
            (target[a:b], source[a:b]) for a, b in zip(cuts, cuts[1:], strict=False) if b > a
        ]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="memcpy")

    def __call__(self) -> None:
        for done in [self._pool.submit(np.copyto, to, source) for to, source in self._parts]:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()
