"""Windows in GPU memory, allocated through the driver API without a CUDA context.

A daemon without a context uses no GPU memory except the windows, and can end without disturbing a
kernel. The daemon exports memory as a POSIX descriptor, which clients import and map. Without a
context the daemon cannot clear memory, so clients zero the parts that need it.
"""

from __future__ import annotations

import dataclasses
import importlib
import mmap
import os
from collections.abc import Callable
from typing import Any, Protocol

from ep_runtime import env
from ep_runtime.errors import InvalidArgumentError, PoolExhaustedError, RuntimeUnavailableError
from ep_runtime.layout import align_up
from ep_runtime.text import iec

_HINT = (
    "XLA takes 75% of a GPU unless told otherwise: set XLA_PYTHON_CLIENT_MEM_FRACTION lower, or "
    "give the group fewer max_tokens_per_rank or lanes"
)


class DriverError(Exception):
    """Raised if a call of the driver failed.

    Attributes:
        out_of_memory: whether the device had too little free memory.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


@dataclasses.dataclass(frozen=True)
class DriverGpu:
    """One GPU as the driver lists it; each MIG instance is a separate GPU.

    Attributes:
        index: the index in NVML's order, which nvidia-smi and DCGM use; None if unknown.
    """

    ordinal: int
    uuid: str
    name: str
    total_bytes: int
    index: int | None = None


class Driver(Protocol):
    """The CUDA driver calls that the daemon makes. Each may raise DriverError."""

    def gpus(self) -> list[DriverGpu]: ...

    def granularity(self, ordinal: int) -> int:
        """Returns the number of bytes that allocation sizes must be multiples of."""

    def create(self, ordinal: int, size_bytes: int) -> int:
        """Allocates memory and returns its handle."""

    def export_fd(self, handle: int) -> int: ...

    def adopt(self, fd: int) -> tuple[int, int]:
        """Imports memory that an earlier process exported; returns (handle, ordinal)."""

    def release(self, handle: int) -> None: ...


class BindingsDriver:
    """Calls the driver through cuda-bindings, and never makes a context.

    Raises:
        RuntimeUnavailableError: cuda-bindings or the driver is not installed, or has no GPU.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise RuntimeUnavailableError(
                "windows in GPU memory need cuda-bindings where the daemon runs; install "
                "ep-runtime with the extra cuda12 or cuda13"
            ) from error
        self._api: Any = driver
        try:
            self._call(driver.cuInit, 0)
        except Exception as error:  # noqa: BLE001 - a missing libcuda raises a special class
            raise RuntimeUnavailableError(f"no CUDA driver answers: {error}") from error

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result, *values = function(*arguments)
        if result != self._api.CUresult.CUDA_SUCCESS:
            full = result == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            raise DriverError(f"{function.__name__}: {result.name}", out_of_memory=full)
        return values[0] if len(values) == 1 else values

    def gpus(self) -> list[DriverGpu]:
        api, found, indices = self._api, [], nvml_indices()
        for ordinal in range(self._call(api.cuDeviceGetCount)):
            device = self._call(api.cuDeviceGet, ordinal)
            name = bytes(self._call(api.cuDeviceGetName, 96, device)).split(b"\0")[0].decode()
            total = int(self._call(api.cuDeviceTotalMem, device))
            uuid = uuid_text(bytes(self._call(api.cuDeviceGetUuid, device).bytes))
            found.append(DriverGpu(ordinal, uuid, name, total, indices.get(uuid)))
        return found

    def _properties(self, ordinal: int) -> Any:
        api = self._api
        made = api.CUmemAllocationProp()
        made.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        made.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        made.location.id = ordinal
        made.requestedHandleTypes = self._handle_type
        return made

    @property
    def _handle_type(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def granularity(self, ordinal: int) -> int:
        # The client rounds sizes the same way (csrc/cuda/device/device_windows.cc).
        flags = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        properties = self._properties(ordinal)
        return int(self._call(self._api.cuMemGetAllocationGranularity, properties, flags))

    def create(self, ordinal: int, size_bytes: int) -> int:
        return int(self._call(self._api.cuMemCreate, size_bytes, self._properties(ordinal), 0))

    def export_fd(self, handle: int) -> int:
        fd = int(self._call(self._api.cuMemExportToShareableHandle, handle, self._handle_type, 0))
        os.set_inheritable(fd, False)
        return fd

    def adopt(self, fd: int) -> tuple[int, int]:
        handle = int(self._call(self._api.cuMemImportFromShareableHandle, fd, self._handle_type))
        try:
            properties = self._call(self._api.cuMemGetAllocationPropertiesFromHandle, handle)
        except DriverError:
            self.release(handle)
            raise
        return handle, int(properties.location.id)

    def release(self, handle: int) -> None:
        self._call(self._api.cuMemRelease, handle)


def nvml_indices() -> dict[str, int]:
    """Returns each GPU's index in NVML's order, by UUID; empty without NVML."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        nvml.nvmlShutdown()
    except (nvml.NVMLError, OSError):
        return {}
    return {uuid: index for index, uuid in enumerate(uuids)}


def uuid_text(raw: bytes) -> str:
    """Formats the 16 bytes of a UUID as NVML and the client's library do."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class CudaAllocation:
    """A window in GPU memory. `identity` is None, because each descriptor is a separate file."""

    identity = None

    def __init__(self, driver: Driver, handle: int, size_bytes: int, fd: int | None = None) -> None:
        self._driver = driver
        self._handle = handle
        self._held = True
        # The descriptor of an imported handle, because the driver cannot export such a handle.
        self._fd = fd
        self.size_bytes = size_bytes

    def export_fd(self) -> int:
        if self._fd is not None:
            return os.dup(self._fd)
        try:
            return self._driver.export_fd(self._handle)
        except DriverError as error:
            raise RuntimeUnavailableError(
                f"the driver gives no descriptor of {iec(self.size_bytes)} in GPU memory: {error}"
            ) from error

    def map(self) -> mmap.mmap:
        raise NotImplementedError("GPU memory is not mapped in the daemon; boards are on the host")

    def free(self) -> None:
        if self._held:
            self._driver.release(self._handle)
            self._held = False
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class CudaDevice:
    """One GPU. `limit_bytes` limits the windows only, not other memory such as XLA's."""

    def __init__(self, driver: Driver, gpu: DriverGpu, limit_bytes: int | None) -> None:
        self._driver = driver
        self._gpu = gpu
        self.name = gpu.uuid
        self.index = gpu.index
        self.limit(limit_bytes)

    def limit(self, limit_bytes: int | None) -> None:
        """Sets the limit of windows; None for the GPU's whole memory."""
        self.limit_bytes = min(limit_bytes or self._gpu.total_bytes, self._gpu.total_bytes)

    def allocate(self, label: str, size_bytes: int) -> CudaAllocation:
        whole_bytes = align_up(size_bytes, self._driver.granularity(self._gpu.ordinal))
        try:
            handle = self._driver.create(self._gpu.ordinal, whole_bytes)
        except DriverError as error:
            if not error.out_of_memory:
                raise RuntimeUnavailableError(
                    f"{label}: {iec(size_bytes)} on {self.name} ({self._gpu.name}): {error}"
                ) from error
            raise PoolExhaustedError(
                f"{label}: asked for {iec(size_bytes)} on {self.name} ({self._gpu.name}, "
                f"{iec(self._gpu.total_bytes)}), which has no room for them; {_HINT}",
                asked_bytes=size_bytes,
                free_bytes=0,
                limit_bytes=self.limit_bytes,
                holders=[],
            ) from error
        return CudaAllocation(self._driver, handle, size_bytes)

    def adopt(self, fd: int, size_bytes: int) -> CudaAllocation:
        try:
            handle, ordinal = self._driver.adopt(fd)
        except DriverError as error:
            raise InvalidArgumentError(
                f"the descriptor is not the group's memory: {error}", argument="fd"
            ) from error
        if ordinal != self._gpu.ordinal:
            self._driver.release(handle)
            raise InvalidArgumentError(
                f"the descriptor must be memory of GPU {self._gpu.ordinal} ({self.name}), got "
                f"memory of GPU {ordinal}",
                argument="fd",
            )
        return CudaAllocation(self._driver, handle, size_bytes, fd)


class Gpus:
    """The GPUs of the host by UUID. Loads the driver when the first window needs it."""

    def __init__(
        self, limit_bytes: int | None = None, load: Callable[[], Driver] = BindingsDriver
    ) -> None:
        self._limit_bytes = limit_bytes
        self._load = load
        self._devices: dict[str, CudaDevice] | None = None

    def limit(self, limit_bytes: int | None) -> None:
        """Sets the limit of each GPU, including those that are first used later."""
        self._limit_bytes = limit_bytes
        for device in self.known():
            device.limit(limit_bytes)

    def known(self) -> list[CudaDevice]:
        """Returns the GPUs, or an empty list before `load`."""
        return list((self._devices or {}).values())

    def load(self) -> dict[str, CudaDevice]:
        """Returns all GPUs by UUID. The first call blocks for about 0.1 s.

        Raises:
            RuntimeUnavailableError: there is no driver.
        """
        if self._devices is None:
            driver = self._load()
            try:
                found = driver.gpus()
            except DriverError as error:
                raise RuntimeUnavailableError(f"the CUDA driver lists no GPUs: {error}") from error
            self._devices = {gpu.uuid: CudaDevice(driver, gpu, self._limit_bytes) for gpu in found}
        return self._devices

    def get(self, uuid: str) -> CudaDevice:
        """Finds a GPU by its UUID. The first call blocks, as `load`.

        Raises:
            RuntimeUnavailableError: there is no driver.
            InvalidArgumentError: the host has no such GPU; the message names its GPUs.
        """
        devices = self.load()
        if uuid not in devices:
            shown = env.visible_devices()
            hides = f"; its CUDA_VISIBLE_DEVICES={shown} hides others, start it without"
            raise InvalidArgumentError(
                f"the daemon's host has no GPU {uuid}; it has {sorted(devices)}"
                + ("" if shown is None else hides),
                argument="device_uuids",
            )
        return devices[uuid]
