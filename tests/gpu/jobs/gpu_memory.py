"""A process without JAX that maps a window in GPU memory, fills it, reads it, spins on it.

For `raw_process.Process.do("call", __name__, NAME, ...)`: `state` is the process's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ep_runtime.layout import align_up

# Writes the GPU's clock to the first word again and again, until that clock (ns) is `until`.
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 address, .param .u64 lasting)
{
  .reg .pred %p<2>;
  .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [address];
  ld.param.u64 %rd2, [lasting];
  cvta.to.global.u64 %rd1, %rd1;
  mov.u64 %rd3, %globaltimer;
  add.s64 %rd4, %rd3, %rd2;
AGAIN:
  mov.u64 %rd5, %globaltimer;
  st.volatile.global.u64 [%rd1], %rd5;
  setp.lt.u64 %p1, %rd5, %rd4;
  @%p1 bra AGAIN;
  ret;
}
\0"""
MARK_AT = 1 << 12  # the window after the word that is written


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the driver; returns its result, or None. Raises AssertionError if it fails."""
    from cuda.bindings import driver

    result, *values = function(*arguments)
    assert result == driver.CUresult.CUDA_SUCCESS, f"{function.__name__}: {result.name}"
    return values[0] if values else None


def open_gpu(state: dict[str, Any], ordinal: int) -> None:
    """A context on the GPU, current in this process, and a kernel."""
    from cuda.bindings import driver

    call(driver.cuInit, 0)
    state["device"] = call(driver.cuDeviceGet, ordinal)
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, state["device"]))
    state["module"] = call(driver.cuModuleLoadData, _PTX)
    state["spin"] = call(driver.cuModuleGetFunction, state["module"], b"spin")
    state["clock_word"] = call(driver.cuMemAlloc, 8)


def map_window(state: dict[str, Any]) -> int:
    """Maps the window that was fetched last; returns its bytes."""
    from cuda.bindings import driver

    (item, fd) = state["fds"][-1]
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = call(driver.cuMemImportFromShareableHandle, fd, kind)
    flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    properties = call(driver.cuMemGetAllocationPropertiesFromHandle, handle)
    size = align_up(int(item.bytes), call(driver.cuMemGetAllocationGranularity, properties, flags))
    address = call(driver.cuMemAddressReserve, size, 0, 0, 0)
    call(driver.cuMemMap, address, size, 0, handle, 0)
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(state["device"])
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(driver.cuMemSetAccess, address, size, [access], 1)
    state["window"] = (handle, address, size)
    return size


def unmap_window(state: dict[str, Any]) -> None:
    """Unmaps the window and frees its memory."""
    from cuda.bindings import driver

    handle, address, size = state.pop("window")
    call(driver.cuMemUnmap, address, size)
    call(driver.cuMemAddressFree, address, size)
    call(driver.cuMemRelease, handle)


def fill(state: dict[str, Any], value: int) -> None:
    """Fills the whole window with that byte."""
    from cuda.bindings import driver

    _, address, size = state["window"]
    call(driver.cuMemsetD8, address, value, size)
    call(driver.cuCtxSynchronize)


def holds(state: dict[str, Any], value: int) -> bool:
    """Whether every byte after the first page has that value."""
    from cuda.bindings import driver

    _, address, size = state["window"]
    host = np.empty(min(size - MARK_AT, 64 << 20), np.uint8)
    for start in range(MARK_AT, size, host.nbytes):
        count = min(host.nbytes, size - start)
        call(driver.cuMemcpyDtoH, host.ctypes.data, int(address) + start, count)
        if not (host[:count] == value).all():
            return False
    return True


def _launch(state: dict[str, Any], address: int, lasting_s: float) -> None:
    from cuda.bindings import driver

    values = np.array([int(address)], np.uint64), np.array([int(lasting_s * 1e9)], np.uint64)
    pointers = np.array([value.ctypes.data for value in values], np.uint64)
    one = (1, 1, 1)
    call(driver.cuLaunchKernel, state["spin"], *one, *one, 0, 0, pointers.ctypes.data, 0)


def spin(state: dict[str, Any], lasting_s: float) -> None:
    """Starts a kernel that writes to the window without end; returns once it has started."""
    _launch(state, int(state["window"][1]), lasting_s)


def word(state: dict[str, Any]) -> int:
    """Reads the window's first word: the GPU's clock at the last write, in ns."""
    return _read_word(int(state["window"][1]))


def _read_word(address: int) -> int:
    from cuda.bindings import driver

    host = np.empty(1, np.uint64)
    call(driver.cuMemcpyDtoH, host.ctypes.data, address, 8)
    return int(host[0])


def clock_offset_ns(state: dict[str, Any]) -> int:
    """Returns the GPU's clock minus the host's monotonic one, up to the time of a launch."""
    from cuda.bindings import driver

    best: tuple[int, int] | None = None
    for _ in range(10):
        before = time.monotonic_ns()
        _launch(state, int(state["clock_word"]), 0.0)
        call(driver.cuCtxSynchronize)
        after = time.monotonic_ns()
        found = _read_word(int(state["clock_word"])) - (before + after) // 2
        if best is None or after - before < best[0]:
            best = (after - before, found)
    assert best is not None
    return best[1]
