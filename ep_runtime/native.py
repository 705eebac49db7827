"""The native library: finds it, reads its table of C functions, and wraps them. No JAX.

One table serves everything: `EpRuntimeTable()` in `csrc/ffi/c_table.cc`. The structs below repeat
that file; its first fields never change, so a library of another version is refused with a clear
error and not with a crash.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import ep_runtime
from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError, VersionSkewError, parse
from ep_runtime.specs import DTYPE_BYTES, GroupSpec


def _find_library() -> Path:
    """Where the library is, or would be. An editable install keeps it apart from the sources."""
    places = [Path(folder) / "_native" / "libep_runtime_cpu.so" for folder in ep_runtime.__path__]
    return next((place for place in places if place.exists()), places[-1])


LIBRARY_PATH = _find_library()
ABI = 2
CLOSE_TIMEOUT_S = 10.0
ROW_OPS = ("baseline", "avx2", "avx512")
_TEXT_BYTES = 4096
_LONGEST_S = 1e9  # in nanoseconds it still fits 64 bits; an endless timeout is cut to it


@dataclasses.dataclass(frozen=True)
class Target:
    """One custom call target: its name and the addresses of its handlers."""

    name: str
    instantiate_ptr: int
    execute_ptr: int


@dataclasses.dataclass(frozen=True)
class NativeLayer:
    """One layer as the handlers need it; `handle_base` is the board index of its handle 0."""

    id: int
    name: str
    fingerprint: int
    top_k: int
    alignment: int
    in_flight: int
    handle_base: int


class _Text(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_int64)]


class _GroupOptions(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("generation", ctypes.c_uint64),
        ("world_size", ctypes.c_int64),
        ("ep_size", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("max_tokens_per_rank", ctypes.c_int64),
        ("recv_capacity_per_rank", ctypes.c_int64),
        ("max_top_k", ctypes.c_int64),
        ("max_token_bytes", ctypes.c_int64),
        ("lanes", ctypes.c_int64),
        ("op_timeout_ns", ctypes.c_int64),
        ("error_on_overflow", ctypes.c_int32),
        ("exact_combine", ctypes.c_int32),
        ("debug", ctypes.c_int32),
        ("local_ranks", ctypes.POINTER(ctypes.c_int64)),
        ("num_local_ranks", ctypes.c_int64),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("fingerprint", ctypes.c_uint64),
        ("top_k", ctypes.c_int64),
        ("alignment", ctypes.c_int64),
        ("in_flight", ctypes.c_int64),
        ("handle_base", ctypes.c_uint32),
    ]


class _Target(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("instantiate", ctypes.c_void_p),
        ("execute", ctypes.c_void_p),
    ]


_I64 = ctypes.c_int64
_OptionsP = ctypes.POINTER(_GroupOptions)


class _Table(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("version", ctypes.c_char_p),
        ("targets", ctypes.POINTER(_Target)),
        ("num_targets", ctypes.c_uint64),
        ("state_type_id", ctypes.c_void_p),
        ("state_type_info", ctypes.c_void_p),
        (
            "open_group",
            ctypes.CFUNCTYPE(
                _I64, _OptionsP, ctypes.c_int, ctypes.POINTER(ctypes.c_int), _I64, _Text
            ),
        ),
        ("add_layers", ctypes.CFUNCTYPE(_I64, _I64, ctypes.POINTER(_Layer), _I64, _Text)),
        (
            "remove_layers",
            ctypes.CFUNCTYPE(None, _I64, ctypes.POINTER(ctypes.c_uint64), _I64),
        ),
        ("close_group", ctypes.CFUNCTYPE(None, _I64, _I64)),
        ("check_group", ctypes.CFUNCTYPE(_I64, _I64, _Text)),
        ("fill_staging", ctypes.CFUNCTYPE(None, _I64, ctypes.c_int)),
        ("window_bytes", ctypes.CFUNCTYPE(_I64, _OptionsP)),
        ("control_bytes", ctypes.CFUNCTYPE(_I64, _I64, _I64)),
        ("board_layout", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("use_row_ops", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)),
    ]


def _options(
    spec: GroupSpec, generation: int, debug: bool, local_ranks: Sequence[int] = ()
) -> _GroupOptions:
    return _GroupOptions(
        name=spec.name.encode(),
        generation=generation,
        world_size=spec.world_size,
        ep_size=spec.ep_size,
        num_experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        max_tokens_per_rank=spec.max_tokens_per_rank,
        recv_capacity_per_rank=spec.recv_capacity_per_rank,
        max_top_k=spec.max_top_k,
        max_token_bytes=DTYPE_BYTES[spec.max_token_dtype],
        lanes=spec.lanes,
        op_timeout_ns=int(min(spec.op_timeout_s, _LONGEST_S) * 1e9),
        error_on_overflow=spec.on_overflow == "error",
        exact_combine=spec.combine_precision == "exact",
        debug=debug,
        local_ranks=(ctypes.c_int64 * len(local_ranks))(*local_ranks),
        num_local_ranks=len(local_ranks),
    )


def _raise(text: str) -> None:
    raise parse(text) or EpRuntimeError(text)


class NativeLibrary:
    """The loaded library. Get it from `library()`: handlers and groups are process-wide."""

    def __init__(self, path: Path = LIBRARY_PATH) -> None:
        if not path.exists():
            raise RuntimeUnavailableError(
                f"the native library is missing at {path}; install ep-runtime with pip, or for "
                "a checkout run `pip install -e . --no-build-isolation`",
                path=str(path),
            )
        self._library = ctypes.CDLL(str(path))
        entry = self._library.EpRuntimeTable
        entry.restype = ctypes.POINTER(_Table)
        self._table = entry().contents
        if self._table.abi != ABI or self._table.bytes < ctypes.sizeof(_Table):
            raise VersionSkewError(
                f"{path} has ABI {self._table.abi}, this package needs {ABI}; build it again",
                library=int(self._table.abi),
                package=ABI,
            )

    @property
    def version(self) -> str:
        version: bytes = self._table.version
        return version.decode()

    @property
    def max_abi(self) -> int:
        """The newest table ABI that the library speaks."""
        return int(self._table.abi)

    def targets(self) -> list[Target]:
        """Every custom call target, in a fixed order."""
        found = (self._table.targets[i] for i in range(self._table.num_targets))
        return [Target(t.name.decode(), t.instantiate or 0, t.execute or 0) for t in found]

    def state_type(self) -> tuple[int, int]:
        """Addresses of the FFI type id and type info; register them before the targets."""
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
    ) -> int:
        """Maps a group's board and windows. The caller may close the fds afterwards.

        Args:
            spec: the group.
            generation: as the board says.
            board_fd: memfd of `board.board_bytes(spec)` bytes, formatted.
            window_fds: one memfd of `board.window_bytes(spec)` bytes per world rank.
            debug: check indices and fill undefined memory with 0xFF.
            local_ranks: world ranks that this process drives; None for all. Where there are
                others, calls meet by names that all processes give alike.

        Returns:
            The group's number in this process.

        Raises:
            InvalidArgumentError: a file is missing or too small, or a local rank is not one of
                the group.
            SpecMismatchError, StaleHandleError, VersionSkewError: the board is another group's.
        """
        fds = (ctypes.c_int * len(window_fds))(*window_fds)
        ours = range(spec.world_size) if local_ranks is None else local_ranks
        options = _options(spec, generation, debug, ours)
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        group = self._table.open_group(
            ctypes.byref(options), board_fd, fds, len(window_fds), _text_of(text)
        )
        if group < 0:
            _raise(text.value.decode(errors="replace"))
        return int(group)

    def add_layers(self, group: int, layers: Sequence[NativeLayer]) -> None:
        """Makes layers known to the handlers; a layer known before gets its new settings."""
        made = (_Layer * len(layers))(
            *(
                _Layer(
                    layer.id,
                    layer.name.encode(),
                    layer.fingerprint,
                    layer.top_k,
                    layer.alignment,
                    layer.in_flight,
                    layer.handle_base,
                )
                for layer in layers
            )
        )
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if self._table.add_layers(group, made, len(layers), _text_of(text)) < 0:
            _raise(text.value.decode(errors="replace"))

    def remove_layers(self, group: int, ids: Iterable[int]) -> None:
        """Later calls of these layers raise StaleHandleError."""
        wanted = list(ids)
        self._table.remove_layers(group, (ctypes.c_uint64 * len(wanted))(*wanted), len(wanted))

    def close_group(self, group: int, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends a group: later calls raise StaleHandleError naming layer and generation.

        Calls that all ranks have joined finish; calls that still wait for a rank fail. Waits for
        them at most `timeout_s`; memory is unmapped when the last one has returned.
        """
        self._table.close_group(group, int(timeout_s * 1e9))

    def check_group(self, group: int) -> str | None:
        """Text of the first error of the group's calls since this was last asked, or None."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if self._table.check_group(group, _text_of(text)) == 0:
            return None
        return text.value.decode(errors="replace")

    def poison_staging(self, group: int, byte: int) -> None:
        """Fills every window of the group; tests prove with it that stale bytes do not leak."""
        self._table.fill_staging(group, byte)

    def use_row_ops(self, level: str) -> bool:
        """Picks the instruction set of row arithmetic, "best" or one of ROW_OPS; for tests.

        Returns:
            False where this processor or build does not have it, and nothing changes.
        """
        return bool(self._table.use_row_ops(("best", *ROW_OPS).index(level)) == 0)

    def window_bytes(self, spec: GroupSpec) -> int:
        """`board.window_bytes` as the library computes it."""
        return int(self._table.window_bytes(ctypes.byref(_options(spec, 0, False))))

    def control_bytes(self, ranks: int, lanes: int) -> int:
        """`board.control_bytes` as the library computes it."""
        return int(self._table.control_bytes(ranks, lanes))

    def board_layout(self) -> dict[str, int]:
        """ "Struct" -> bytes and "Struct.field" -> offset of the board's C++ structs."""
        lines = self._table.board_layout().decode().split()
        return {name: int(value) for name, value in (line.split("=") for line in lines)}


def _text_of(buffer: ctypes.Array[ctypes.c_char]) -> _Text:
    return _Text(ctypes.cast(buffer, ctypes.c_char_p), len(buffer))


@functools.cache
def library() -> NativeLibrary:
    """The native library, loaded on first use.

    Raises:
        RuntimeUnavailableError: it is not installed; the message says where it is expected.
        VersionSkewError: it belongs to another version of this package.
    """
    return NativeLibrary()
