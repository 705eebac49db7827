"""What /proc says about memory and descriptors of the host and of this process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from ep_runtime_server.memory import cgroups


def _kib(path: str, names: tuple[str, ...]) -> int:
    total = 0
    for line in Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in names:
            total += int(rest.split()[0]) << 10
    return total


def available_bytes() -> int:
    """Bytes that the host can give without swapping, and limits of our cgroups let us have."""
    host = _kib("/proc/meminfo", ("MemAvailable",))
    left = cgroups.left_bytes()
    return host if left is None else min(host, left)


def own_rss_bytes() -> int:
    """Resident bytes of this process without shared memory, that is without the boards."""
    return _kib("/proc/self/status", ("RssAnon", "RssFile"))


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # the listing itself holds one


def max_fds() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_max_fds() -> None:
    """Soft limit of descriptors up to the hard one: a group of W ranks takes W + 1."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
