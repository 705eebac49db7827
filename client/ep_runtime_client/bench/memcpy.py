"""The bound that the token movers are held against: a plain copy of as many bytes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class Memcpy:
    """Copies `size` bytes between two warm buffers, one thread per usable CPU."""

    def __init__(self, size: int) -> None:
        threads = len(os.sched_getaffinity(0))
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
