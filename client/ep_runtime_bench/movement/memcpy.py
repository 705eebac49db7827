"""The bound that the token movers are held against: a plain copy of as many bytes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

MEMCPY = "memcpy"  # of a subject


class Memcpy:
    """Copies `size` bytes between two warm buffers, one thread per usable CPU.

    Args:
        size: bytes that all processes copy together.
        processes: how many do so at the same time, each its part.
    """

    def __init__(self, size: int, processes: int = 1) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        size = -(-size // processes)
        # Written, not only allocated: an untouched page would cost a fault in the first copy.
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
