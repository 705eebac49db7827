"""Finds the native libraries, and wraps their tables of C functions. Does not use JAX.

There is one library per platform, "cpu" and "cuda". `EpRuntimeTable()` of each returns its table,
whose structs `native_abi.py` mirrors.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ep_runtime
from ep_runtime import board_abi, native_abi
from ep_runtime.device_layout import lane_rows
from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError, VersionSkewError, parse
from ep_runtime.native_abi import ABI
from ep_runtime.specs import DTYPE_BYTES, GroupSpec


def library_path(platform: str = "cpu") -> Path:
    """Returns the path of a library, even before it is built."""
    name = f"libep_runtime_{platform}.so"
    places = [Path(folder) / "_native" / name for folder in ep_runtime.__path__]
    return next((place for place in places if place.exists()), places[-1])


LIBRARY_PATH = library_path()
# Builds from source, because pip would prefer a wheel without kernels.
BUILD_CUDA = "EP_RUNTIME_CUDA=ON pip install --force-reinstall --no-binary=ep-runtime ep-runtime"
# The native library of each transport.
PLATFORMS = {"memfd": "cpu", "nvlink": "cuda", "nccl": "cuda"}
CLOSE_TIMEOUT_S = 10.0
ROW_OPS = ("baseline", "avx2", "avx512")
_TEXT_BYTES = 4096
_LONGEST_S = 1e9  # limit of timeouts, whose nanoseconds fit 64 bits


@dataclasses.dataclass(frozen=True)
class Target:
    """A custom call target: its name and the addresses of its handlers."""

    name: str
    instantiate_ptr: int
    execute_ptr: int


@dataclasses.dataclass(frozen=True)
class OnGpus:
    """How a process runs its ranks of a group on GPUs.

    Attributes:
        ordinals: CUDA ordinal of each local rank.
        tell_progress: whether kernels write their progress to the board.
    """

    ordinals: tuple[int, ...]
    tell_progress: bool = True


def _settings(spec: GroupSpec, job: str = "") -> str:
    """Writes scalar settings as lines, which `csrc/core/base/settings.h` reads."""
    lines: dict[str, int | float | str] = {"job": job} if job else {}
    for name, value in spec.to_dict().items():
        if isinstance(value, float) and name.endswith("_s"):
            lines[name.removesuffix("_s") + "_ns"] = nanoseconds(value)
        elif isinstance(value, int):
            lines[name] = int(value)  # True is 1
        elif isinstance(value, float | str):
            lines[name] = value
    return "\n".join(f"{name}={value}" for name, value in lines.items())


def _options(
    spec: GroupSpec,
    generation: int,
    debug: bool,
    local_ranks: Sequence[int] = (),
    gpus: OnGpus | None = None,
    job: str = "",
) -> native_abi.GroupOptionsStruct:
    ordinals = () if gpus is None else gpus.ordinals
    return native_abi.GroupOptionsStruct(
        name=spec.name.encode(),
        generation=generation,
        world_size=spec.world_size,
        # For the library, an EP group is the ranks that share windows.
        ep_size=spec.ranks_per_node,
        num_experts=spec.ranks_per_node * spec.experts_per_rank,
        hidden_size=spec.hidden_size,
        max_tokens_per_rank=spec.staged_tokens,
        recv_capacity_per_rank=spec.recv_capacity_per_rank,
        max_top_k=spec.max_top_k,
        max_token_bytes=DTYPE_BYTES[spec.max_token_dtype],
        lanes=spec.lanes,
        lane_rows=lane_rows(spec),
        spare_experts=spec.spare_experts,
        settings=_settings(spec, job).encode(),
        debug=debug,
        tell_progress=gpus is not None and gpus.tell_progress,
        local_ranks=(ctypes.c_int64 * len(local_ranks))(*local_ranks),
        num_local_ranks=len(local_ranks),
        local_devices=(ctypes.c_int32 * len(ordinals))(*ordinals) if ordinals else None,
    )


class TextBuffer:
    """A buffer for a text from a library's function, which gets `struct` as its last argument."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_TEXT_BYTES)
        data = ctypes.cast(self._memory, ctypes.c_char_p)
        self.struct = native_abi.TextStruct(data, _TEXT_BYTES)

    @property
    def value(self) -> str:
        return self._memory.value.decode(errors="replace")


def checked(function: Any, *arguments: Any, text: TextBuffer | None = None) -> int:
    """Calls a library's function, with a text as its last argument, and returns its result.

    Raises:
        EpRuntimeError: the result is negative; the text has the error.
    """
    text = text or TextBuffer()
    result = int(function(*arguments, text.struct))
    if result < 0:
        raise parse(text.value) or EpRuntimeError(text.value)
    return result


def nanoseconds(seconds: float) -> int:
    """Converts seconds to nanoseconds, cut to a number that fits 64 bits."""
    return int(min(seconds, _LONGEST_S) * 1e9)


class NativeLibrary:
    """A loaded library. Use `library()` to get it, because handlers and groups are process-wide."""

    def __init__(self, path: Path = LIBRARY_PATH) -> None:
        if not path.exists():
            with_cuda, built = "", ""
            if path == library_path("cuda"):  # prebuilt wheels have no kernels
                with_cuda, built = "EP_RUNTIME_CUDA=ON ", " --no-binary=ep-runtime"
            raise RuntimeUnavailableError(
                f"the native library is missing at {path}; run `{with_cuda}{sys.executable} -m pip "
                f"install --force-reinstall{built} ep-runtime`, or in a checkout "
                f"`{with_cuda}{sys.executable} -m pip install -e .`",
                path=str(path),
            )
        self._library = ctypes.CDLL(str(path))
        entry = self._library.EpRuntimeTable
        entry.restype = ctypes.POINTER(native_abi.TableStruct)
        self._table = entry().contents
        needed = ctypes.sizeof(native_abi.TableStruct)
        if self._table.abi != ABI or self._table.bytes < needed:
            raise VersionSkewError(
                f"{path} has ABI {self._table.abi} and a table of {self._table.bytes} bytes, this "
                f"package needs {ABI} and {needed}; build it again",
                library=int(self._table.abi),
                package=ABI,
            )
        self._path = path
        self.check_structs({**native_abi.STRUCTS, **board_abi.STRUCTS})

    def check_structs(self, mirrors: native_abi.Mirrors) -> None:
        """Raises VersionSkewError, naming the field, if structs differ from the library's."""
        text = self._table.structs().decode()
        native_abi.check_structs(self._path, text, mirrors, board_abi.CONSTANTS)

    @property
    def version(self) -> str:
        version: bytes = self._table.version
        return version.decode()

    def targets(self) -> list[Target]:
        """Lists all custom call targets, in a fixed order."""
        found = (self._table.targets[i] for i in range(self._table.num_targets))
        return [
            Target(t.name.decode(), _address(t.instantiate), _address(t.execute)) for t in found
        ]

    def state_type(self) -> tuple[int, int]:
        """Returns the addresses of the FFI type id and type info; register these before targets."""
        return self._table.state_type_id, self._table.state_type_info

    def open_group(
        self,
        spec: GroupSpec,
        *,
        generation: int,
        board_fd: int,
        window_fds: Sequence[int],
        debug: bool,
        local_ranks: Sequence[int] | None = None,
        gpus: OnGpus | None = None,
        job: str = "",
    ) -> int:
        """Maps a group's board and windows. The caller may close the fds afterwards.

        Args:
            spec: the group.
            generation: the board's generation.
            board_fd: memfd of a formatted board of `board.board_bytes(spec)` bytes.
            window_fds: one descriptor of `board.window_bytes(spec)` bytes per world rank: a memfd,
                or exported device memory; -1 for ranks of other nodes.
            debug: check indices and fill undefined memory with 0xFF.
            local_ranks: world ranks of this process; None for all. If other processes have ranks,
                calls are matched by names that all processes must use alike.
            gpus: the GPUs of the local ranks; None on CPU.
            job: the job's name, for errors.

        Returns:
            The group's number in this process.

        Raises:
            InvalidArgumentError: a file is missing or too small, a local rank is not in the group,
                or a rank with shared windows has no descriptor.
            SpecMismatchError, StaleHandleError, VersionSkewError: the board is of another group.
        """
        fds = (ctypes.c_int * len(window_fds))(*window_fds)
        ours = range(spec.world_size) if local_ranks is None else local_ranks
        options = _options(spec, generation, debug, ours, gpus, job)
        count = len(window_fds)
        return checked(self._table.open_group, ctypes.byref(options), board_fd, fds, count)

    def add_layers(self, group: int, layers: Sequence[native_abi.LayerStruct]) -> None:
        """Adds layers for the handlers, or updates the settings of known layers."""
        made = (native_abi.LayerStruct * len(layers))(*layers)
        checked(self._table.add_layers, group, made, len(layers))

    def remove_layers(self, group: int, ids: Iterable[int]) -> None:
        """Makes later calls of these layers raise StaleHandleError."""
        wanted = list(ids)
        self._table.remove_layers(group, (ctypes.c_uint64 * len(wanted))(*wanted), len(wanted))

    def close_group(self, group: int, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends a group; later calls raise StaleHandleError with layer and generation.

        Calls that all ranks have joined finish; calls that still wait for a rank fail. Waits at
        most `timeout_s` for these calls. The memory is unmapped when the last call has returned.
        """
        self._table.close_group(group, int(timeout_s * 1e9))

    def check_group(self, group: int) -> str | None:
        """Returns the first error of the group's calls since the last `check_group`, or None."""
        text = TextBuffer()
        return text.value if self._table.check_group(group, text.struct) else None

    def poison_staging(self, group: int, byte: int) -> None:
        """Fills all windows of the group, so that tests can check that stale bytes do not leak."""
        self._table.fill_staging(group, byte)

    def devices(self) -> list[str]:
        """Lists UUIDs of the visible GPUs by CUDA ordinal. Only in the CUDA library."""
        texts = [TextBuffer() for _ in range(checked(self._table.num_devices))]
        for ordinal, text in enumerate(texts):
            checked(self._table.device_uuid, ordinal, text=text)
        return [text.value for text in texts]

    @property
    def architectures(self) -> tuple[str, ...]:
        """Lists the kernels' architectures by nvcc's names, as "90a". Only in the CUDA library."""
        names: bytes = self._table.architectures
        return tuple(names.decode().split())

    def has_kernels_for(self, capability: str) -> bool:
        """Returns whether the compiled kernels run on a compute capability, such as "9.0"."""
        return any(_runs_on(name, capability) for name in self.architectures)

    def reaches(self, device: int, peer: int) -> bool:
        """Returns whether GPU `device` can map memory of GPU `peer`; both are CUDA ordinals."""
        return bool(checked(self._table.reaches, device, peer))

    def use_row_ops(self, level: str) -> bool:
        """Selects the instruction set of row arithmetic, "best" or one of ROW_OPS; for tests.

        Returns:
            False, without a change, if this processor or build does not support it.
        """
        return bool(self._table.use_row_ops(("best", *ROW_OPS).index(level)) == 0)

    def window_bytes(self, spec: GroupSpec) -> int:
        """Returns `board.window_bytes(spec)` as the library computes it."""
        return int(self._table.window_bytes(ctypes.byref(_options(spec, 0, False))))

    def control_bytes(self, ranks: int, lanes: int) -> int:
        """Returns `board.control_bytes(ranks, lanes)` as the library computes it."""
        return int(self._table.control_bytes(ranks, lanes))


def _runs_on(architecture: str, capability: str) -> bool:
    """Returns whether code of "100" (10.0 and later 10.x) or "90a" (only 9.0) runs on a GPU."""
    number = architecture.rstrip("a")
    wanted, least = number[:-1], number[-1]
    major, _, minor = capability.partition(".")  # non-NVIDIA capabilities may have no minor number
    later = number == architecture and minor.isdecimal() and int(minor) > int(least)
    return major == wanted and (minor == least or later)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def library(platform: str = "cpu") -> NativeLibrary:
    """Returns the native library of "cpu" or "cuda", which the first call loads.

    Raises:
        RuntimeUnavailableError: the library is not installed; the message has the expected path.
        VersionSkewError: the library belongs to another version of this package.
    """
    return NativeLibrary(library_path(platform))


@dataclasses.dataclass(frozen=True)
class OpenGroup:
    """An open group of a native library, with its number there."""

    library: NativeLibrary
    number: int

    def add_layers(self, layers: Sequence[native_abi.LayerStruct]) -> None:
        """Calls `NativeLibrary.add_layers` for this group."""
        self.library.add_layers(self.number, layers)

    def check(self) -> str | None:
        """Calls `NativeLibrary.check_group` for this group."""
        return self.library.check_group(self.number)

    def end(self, why: EpRuntimeError) -> None:
        """Ends running calls with error `why`, after the daemon reported that the group broke.

        Does nothing by default, because calls on windows read the poison on the board.
        """

    def restored(self, control: Any) -> None:
        """Reports to a restarted daemon the state of the group that its journal lacks.

        Args:
            control: the RPCs of the daemon.
        """

    def stop_making(self) -> None:
        """Stops background work within a time limit, because the process is about to exit."""

    def close(self) -> None:
        """Calls `NativeLibrary.close_group` for this group, with CLOSE_TIMEOUT_S."""
        self.library.close_group(self.number)
