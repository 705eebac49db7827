"""Devices that hold windows: their interface, and the host (GPUs are in `cuda_device.py`)."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Protocol

from ep_runtime.errors import InvalidArgumentError, PoolExhaustedError
from ep_runtime.text import iec
from ep_runtime_server.base import open_files
from ep_runtime_server.memory.host_memory import available_bytes

# Keep clients from resizing a memfd; typeshed defines the names on Linux only.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Allocation(Protocol):
    """The memory of one window or board, which outlives each client."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def identity(self) -> tuple[int, int] | None:
        """Returns device and inode of the allocation's file, which identify it on the host.

        None if descriptors of one allocation are different files.
        """

    def export_fd(self) -> int:
        """Returns a new descriptor for a client; the caller closes it after sending."""

    def map(self) -> mmap.mmap:
        """Maps the allocation for writing. Only boards are mapped; a device may refuse."""

    def free(self) -> None:
        """Frees the memory, as soon as clients have no descriptors and mappings of it.

        May be called again after an error.
        """


class Device(Protocol):
    """Allocates in one device's memory. Calls may block, so a separate thread makes them."""

    limit_bytes: int

    @property
    def name(self) -> str:
        """Returns "host" or a GPU's UUID."""

    @property
    def index(self) -> int | None:
        """Returns a GPU's index in NVML's order; None for the host, or if NVML lacks the GPU."""

    def allocate(self, label: str, size_bytes: int) -> Allocation:
        """Allocates `size_bytes`. Raises PoolExhaustedError if the memory is not available."""

    def adopt(self, fd: int, size_bytes: int) -> Allocation:
        """Makes an allocation from a descriptor that an earlier daemon exported.

        Takes over the descriptor on success. Raises InvalidArgumentError if it is something else.
        """


def is_memfd(fd: int) -> bool:
    """Returns whether `fd` is a memfd. Avoids fstat, which a user's file system could block."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


class HostAllocation:
    """A memfd with all its pages allocated, sealed so that no process can resize it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self.size_bytes = size_bytes
        found = os.fstat(fd)
        self.identity = (found.st_dev, found.st_ino)

    def export_fd(self) -> int:
        return os.dup(self._fd)

    def map(self) -> mmap.mmap:
        return mmap.mmap(self._fd, self.size_bytes)

    def free(self) -> None:
        fd, self._fd = self._fd, -1  # closed even if os.close raises
        if fd >= 0:
            os.close(fd)


class HostDevice:
    """Allocates host memory in memfds."""

    name = "host"
    index = None

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    def allocate(self, label: str, size_bytes: int) -> HostAllocation:
        try:
            available = available_bytes()
            if size_bytes > available:
                # Check first: allocating too large a memfd does not fail but starts the OOM killer.
                raise PoolExhaustedError(
                    f"{label}: asked for {iec(size_bytes)}, the host or our cgroup has "
                    f"{iec(available)} available",
                    asked_bytes=size_bytes,
                    free_bytes=available,
                    limit_bytes=self.limit_bytes,
                    holders=[],
                )
            return _sealed_memfd(label, size_bytes)
        except OSError as error:
            raise _exhausted(label, size_bytes, self.limit_bytes, error) from error

    def adopt(self, fd: int, size_bytes: int) -> HostAllocation:
        if not is_memfd(fd):
            raise _not_ours("it is not a memfd")
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        found = os.fstat(fd)
        if seals & SEALS != SEALS:
            raise _not_ours(f"its seals are {seals:#x}, wanted {SEALS:#x}")
        if found.st_size != size_bytes or found.st_blocks * 512 < size_bytes:
            raise _not_ours(
                f"it has {found.st_size} bytes, {found.st_blocks * 512} of them backed, "
                f"wanted {size_bytes}"
            )
        return HostAllocation(fd, size_bytes)


def _not_ours(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"the descriptor is not the group's memory: {why}", argument="fd")


def _sealed_memfd(label: str, size_bytes: int) -> HostAllocation:
    fd = os.memfd_create(f"ep-runtime:{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Without allocated pages, a step on a full host would get SIGBUS.
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return HostAllocation(fd, size_bytes)


def _exhausted(label: str, size_bytes: int, limit_bytes: int, error: OSError) -> PoolExhaustedError:
    if open_files.is_shortage(error):
        return open_files.exhausted(f"{label}: {iec(size_bytes)}", error)
    return PoolExhaustedError(
        f"{label}: {iec(size_bytes)}: the host is out of memory: {error.strerror}",
        asked_bytes=size_bytes,
        free_bytes=0,
        limit_bytes=limit_bytes,
        holders=[],
    )
