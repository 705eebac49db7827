"""Reads the memory that the host and the daemon's cgroups have left.

An allocation over a cgroup's limit does not fail; instead the kernel kills a process of the cgroup.
Containers and batch systems set such limits, so the host's available memory is not enough to check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclasses.dataclass(frozen=True)
class _Files:
    """Names of one cgroup version's files: limit, use, and reclaimable `memory.stat` fields."""

    limit: str
    used: str
    cache: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def _kib(path: str, names: tuple[str, ...]) -> int:
    total = 0
    for line in Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in names:
            total += int(rest.split()[0]) << 10
    return total


def available_bytes() -> int:
    """Returns the bytes available without swapping, within the limits of our cgroups."""
    host = _kib("/proc/meminfo", ("MemAvailable",))
    left = left_bytes()
    return host if left is None else min(host, left)


def own_rss_bytes() -> int:
    """Returns this process's resident bytes without shared memory, so without boards."""
    return _kib("/proc/self/status", ("RssAnon", "RssFile"))


def left_bytes(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Returns the bytes that the tightest limit of our cgroups leaves; None without a limit."""
    found = [
        left for folder, files in _folders(mount, own) if (left := _left(folder, files)) is not None
    ]
    return min(found, default=None)


def _folders(mount: Path, own: Path) -> Iterator[tuple[Path, _Files]]:
    """Yields the folders of our cgroup and its parents, as far as the mount shows them."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, files = mount, _V2
        elif "memory" in controllers.split(","):
            root, files = mount / "memory", _V1
        else:
            continue
        folder = root / name.lstrip("/")
        for place in (folder, *folder.parents):
            yield place, files
            if place == root:
                break


def _left(folder: Path, files: _Files) -> int | None:
    try:
        limit = (folder / files.limit).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / files.used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(int(limit) - used + int(stat.get(files.cache, 0)), 0)
    except (OSError, ValueError):
        return None
