"""Reads from /proc the memory of the host and of this process."""

from __future__ import annotations

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
