"""Memory of the host, of this process, and what the limits of its cgroups leave.

Memory over a limit of a cgroup does not fail: the kernel kills a process of the cgroup. Containers
and batch systems set limits, so what the host has available says nothing there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclasses.dataclass(frozen=True)
class _Files:
    """Names of one version: limit, use, and what of `memory.stat` the kernel takes back first."""

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
    """Bytes available without swapping, within the limits of the daemon's cgroups."""
    host = _kib("/proc/meminfo", ("MemAvailable",))
    left = left_bytes()
    return host if left is None else min(host, left)


def own_rss_bytes() -> int:
    """Resident bytes of this process without shared memory, that is without the boards."""
    return _kib("/proc/self/status", ("RssAnon", "RssFile"))


def left_bytes(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Bytes that the tightest limit of our cgroups leaves; None if none is set or seen."""
    found = [
        left for folder, files in _folders(mount, own) if (left := _left(folder, files)) is not None
    ]
    return min(found, default=None)


def _folders(mount: Path, own: Path) -> Iterator[tuple[Path, _Files]]:
    """Yields our cgroup and its parents; a container's mount may begin at ours."""
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
