"""Cgroups with a limit of memory, and small file systems, for daemons of tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count(1)


class MemoryCgroup:
    """A cgroup that limits memory, of either version; removed once its processes are gone."""

    def __init__(self, limit_bytes: int) -> None:
        old = (_ROOT / "memory").is_dir()
        self._limit = "memory.limit_in_bytes" if old else "memory.max"
        self._used = "memory.usage_in_bytes" if old else "memory.current"
        parent = _ROOT / "memory" if old else _ROOT
        self.path = parent / f"ept-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()
        try:
            (self.path / self._limit).write_text(str(limit_bytes))
        except OSError:
            self.path.rmdir()
            raise

    @property
    def launcher(self) -> list[str]:
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]

    @property
    def used_bytes(self) -> int:
        return int((self.path / self._used).read_text())

    def close(self) -> None:
        pause = threading.Event()
        for _ in range(200):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            pause.wait(0.05)  # processes that ended leave it a moment later
        raise AssertionError(f"{self.path} is in use: {(self.path / 'cgroup.procs').read_text()}")


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """Skips the test where this host lets us make none."""
    try:
        made = MemoryCgroup(limit_bytes)
    except OSError as error:
        pytest.skip(f"no cgroups with memory limits here: {error}")
    try:
        yield made
    finally:
        made.close()


def on_small_disk(directory: Path, size: str) -> list[str]:
    """Launcher of a daemon that alone sees a file system of that size at `directory`.

    Others reach it under `/proc/PID/root`.
    """
    script = f'mount -t tmpfs -o size={size},mode=0700 tmpfs {directory} && exec "$@"'
    return ["unshare", "-m", "sh", "-c", script, "sh"]
