"""A CUDA driver for tests of daemons; files stand for its memory."""

from __future__ import annotations

import os
import threading

from ep_runtime_server.memory.cuda_device import DriverError, DriverGpu

GRANULARITY = 2 << 20
GPU_BYTES = 64 << 20
UUIDS = ("GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b")
INDICES = (5, None)  # in NVML's order


class FileDriver:
    """Two GPUs with files as memory. Counts open allocations.

    Like the driver, it is called by several threads at once: windows are freed on one, allocated
    on another, and a test looks on a third.
    """

    def __init__(self, gpu_bytes: int = GPU_BYTES) -> None:
        self._gpu_bytes = gpu_bytes
        self.held: dict[int, tuple[int, int]] = {}  # handle -> (fd, ordinal)
        self.made = 0
        self._imported: set[int] = set()  # handles; like the driver's, they have no descriptors
        self._last = 0
        self._ordinals: dict[int, int] = {}  # by inode
        self._lock = threading.Lock()

    def gpus(self) -> list[DriverGpu]:
        return [
            DriverGpu(i, uuid, "H200", self._gpu_bytes, index)
            for i, (uuid, index) in enumerate(zip(UUIDS, INDICES, strict=True))
        ]

    def granularity(self, ordinal: int) -> int:
        return GRANULARITY

    def _hold(self, fd: int, ordinal: int) -> int:
        self._last += 1
        self.held[self._last] = (fd, ordinal)
        return self._last

    def create(self, ordinal: int, size_bytes: int) -> int:
        assert size_bytes % GRANULARITY == 0
        with self._lock:
            used = sum(os.fstat(fd).st_size for fd, where in self.held.values() if where == ordinal)
            if used + size_bytes > self._gpu_bytes:
                raise DriverError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY", out_of_memory=True)
            fd = os.memfd_create("gpu")
            os.ftruncate(fd, size_bytes)
            self._ordinals[os.fstat(fd).st_ino] = ordinal
            self.made += 1
            return self._hold(fd, ordinal)

    def export_fd(self, handle: int) -> int:
        with self._lock:
            if handle in self._imported:
                raise DriverError("cuMemExportToShareableHandle: CUDA_ERROR_INVALID_VALUE")
            return os.dup(self.held[handle][0])

    def adopt(self, fd: int) -> tuple[int, int]:
        with self._lock:
            ordinal = self._ordinals.get(os.fstat(fd).st_ino)
            if ordinal is None:
                raise DriverError("cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE")
            handle = self._hold(os.dup(fd), ordinal)
            self._imported.add(handle)
            return handle, ordinal

    def release(self, handle: int) -> None:
        with self._lock:
            os.close(self.held.pop(handle)[0])
