"""What the memory limits of this process's cgroups leave, of either version of cgroups.

Memory over such a limit does not fail: the kernel kills a process of the cgroup. Containers and
batch systems set them, so what the host has available says nothing there.
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


def left_bytes(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Bytes that the tightest of them leaves; None where none limits memory, or none is seen."""
    found = [
        left for folder, files in _folders(mount, own) if (left := _left(folder, files)) is not None
    ]
    return min(found, default=None)


def _folders(mount: Path, own: Path) -> Iterator[tuple[Path, _Files]]:
    """Ours and those above it. In a container the mount may begin at ours, whatever its name."""
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
