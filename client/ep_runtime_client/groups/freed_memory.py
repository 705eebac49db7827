"""Freed memory of this process is kept for its next buffers, where groups move rows on the CPU.

XLA:CPU takes every large result from glibc and gives it back after use; glibc returns what is
above 32 MiB to the system at once, which clears every page of it for the next call. With rows of
4 KiB that costs as much as moving them.
"""

from __future__ import annotations

import ctypes
import functools
import logging

from ep_runtime import env

_log = logging.getLogger("ep_runtime")

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = -1
_TOP_PAD_BYTES = 64 << 20


@functools.cache
def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed; said once in the log. Later calls change nothing.

    The process's memory stays at its peak from then on. Nothing is changed with
    EP_RUNTIME_KEEP_MEMORY=0, where the user has set glibc's own variables, or without glibc.

    Returns:
        Whether glibc took it.
    """
    if not env.keep_memory() or env.malloc_is_set():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    wanted = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES))
    if not all(mallopt(parameter, value) for parameter, value in wanted):
        return False
    _log.info(
        "memory that this process frees is kept for its next buffers (glibc's mallopt); "
        "EP_RUNTIME_KEEP_MEMORY=0 returns it to the system"
    )
    return True
