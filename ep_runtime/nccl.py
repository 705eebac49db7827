"""Finds libnccl, and makes, aborts and closes communicators through the CUDA library.

A process must use the libnccl that JAX loaded, because two copies corrupt each other's
communicators. The structs mirror `csrc/ffi/nccl/nccl_table.h`. This module does not use JAX.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import json
import threading
from collections.abc import Sequence
from pathlib import Path

from ep_runtime import env, native, native_abi
from ep_runtime.errors import EpRuntimeError, VersionSkewError
from ep_runtime.native import TextBuffer, checked, nanoseconds
from ep_runtime.native_abi import LayerStruct, TextStruct

ABI = 2
UNIQUE_ID_BYTES = 128
LIBRARY = "libnccl.so.2"
CLOSE_TIMEOUT_S = 10.0

_I64 = ctypes.c_int64


class _OptionsStruct(ctypes.Structure):
    _fields_ = [
        ("library", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("generation", ctypes.c_uint64),
        ("ep_size", _I64),
        ("op_timeout_ns", _I64),
        ("local_ranks", ctypes.POINTER(_I64)),
        ("local_devices", ctypes.POINTER(ctypes.c_int32)),
        ("num_local_ranks", _I64),
        ("ids", ctypes.c_char_p),
        ("num_domains", _I64),
        ("carries_rows", _I64),
        ("max_channels", _I64),
    ]


class _LayerStruct(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("fingerprint", ctypes.c_uint64),
    ]


class _TableStruct(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("version", ctypes.CFUNCTYPE(_I64, ctypes.c_char_p, TextStruct)),
        ("make_group", ctypes.CFUNCTYPE(_I64, ctypes.POINTER(_OptionsStruct), TextStruct)),
        ("init_group", ctypes.CFUNCTYPE(_I64, _I64, _I64, TextStruct)),
        (
            "add_layers",
            ctypes.CFUNCTYPE(_I64, _I64, ctypes.POINTER(_LayerStruct), _I64, TextStruct),
        ),
        ("abort_group", ctypes.CFUNCTYPE(None, _I64, ctypes.c_char_p)),
        ("check_group", ctypes.CFUNCTYPE(_I64, _I64, TextStruct)),
        ("close_group", ctypes.CFUNCTYPE(None, _I64, _I64)),
        ("await_failure", ctypes.CFUNCTYPE(_I64, _I64, _I64, TextStruct)),
        ("rank_left", ctypes.CFUNCTYPE(None, _I64, _I64, ctypes.c_char_p)),
        ("try_sum", ctypes.CFUNCTYPE(_I64, _I64, _I64, TextStruct)),
        ("structs", ctypes.CFUNCTYPE(ctypes.c_char_p)),
    ]


# The structs by their C names.
_STRUCTS = {
    "EpText": TextStruct,
    "EpNcclOptions": _OptionsStruct,
    "EpNcclLayer": _LayerStruct,
    "EpNcclTable": _TableStruct,
}


def version_text(version: int) -> str:
    """Formats NCCL's version number, such as 22809 as "2.28.9"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def find_library() -> str:
    """Returns the path of libnccl.so.2 for a process that has not loaded it.

    EP_RUNTIME_NCCL_LIBRARY comes first, then the wheel that JAX's CUDA extras install, then the
    bare name for the loader. JAX loads it from the same wheel, so that both share one library.
    """
    given = env.nccl_library()
    if given is not None:
        return given
    # A namespace package of several wheels, so there is nothing to import.
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "lib" / LIBRARY
        if path.exists():
            return str(path)
    return LIBRARY


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's ranks and devices in a group's communicators.

    Attributes:
        name: the group's name.
        generation: the group's generation.
        ep_size: N, ranks of one EP domain, each with a communicator of N ranks.
        world_ranks: world ranks of this process.
        ordinals: CUDA ordinals of these ranks.
        op_timeout_s: how long one call may wait for its peers.
        carries_rows: whether communicators move rows, so that they connect to all peers at once;
            else NCCL connects and allocates buffers on first use.
        max_channels: limit of channels of a communicator, each with buffers for all peers; 0 for
            NCCL's default.
    """

    name: str
    generation: int
    ep_size: int
    world_ranks: tuple[int, ...]
    ordinals: tuple[int, ...]
    op_timeout_s: float
    carries_rows: bool = True
    max_channels: int = 0


class NcclLibrary:
    """The NCCL functions of the loaded CUDA library. Use `library()` to get them."""

    def __init__(self, path: Path) -> None:
        """Loads the library. Raises as `native.NativeLibrary`."""
        if not path.exists():
            native.NativeLibrary(path)  # its error says how to build it
        loaded = ctypes.CDLL(str(path))
        entry = getattr(loaded, "EpRuntimeNcclTable", None)
        if entry is not None:
            entry.restype = ctypes.POINTER(_TableStruct)
            self._table = entry().contents
        if (
            entry is None
            or self._table.abi != ABI
            or self._table.bytes < ctypes.sizeof(_TableStruct)
        ):
            raise VersionSkewError(
                f"{path} was built for another version of this package; build it again", package=ABI
            )
        native_abi.check_structs(path, self._table.structs().decode(), _STRUCTS, {})

    def version(self) -> int:
        """Returns NCCL's version number (22809 for 2.28.9); loads NCCL if necessary.

        Raises:
            RuntimeUnavailableError: NCCL is not installed.
            VersionSkewError: NCCL is older or newer than this package supports.
        """
        return checked(self._table.version, find_library().encode())

    def make_group(self, ranks: Ranks, ids: Sequence[bytes]) -> NcclGroup:
        """Makes a group, whose `init` then makes the communicators.

        `ids` has one unique id per EP domain. It may be empty if domains have one rank, because
        this process can make their ids itself.

        Raises:
            As `version`; InvalidArgumentError for a domain without an id.
        """
        wrong = [len(unique_id) for unique_id in ids if len(unique_id) != UNIQUE_ID_BYTES]
        if wrong:
            raise EpRuntimeError(f"a unique id has {UNIQUE_ID_BYTES} bytes, got {wrong[0]}")
        count = len(ranks.world_ranks)
        options = _OptionsStruct(
            library=find_library().encode(),
            name=ranks.name.encode(),
            generation=ranks.generation,
            ep_size=ranks.ep_size,
            op_timeout_ns=nanoseconds(ranks.op_timeout_s),
            local_ranks=(_I64 * count)(*ranks.world_ranks),
            local_devices=(ctypes.c_int32 * count)(*ranks.ordinals),
            num_local_ranks=count,
            ids=b"".join(ids),
            num_domains=len(ids),
            carries_rows=ranks.carries_rows,
            max_channels=ranks.max_channels,
        )
        return NcclGroup(self._table, checked(self._table.make_group, ctypes.byref(options)))

    def load_kernels(self, ordinals: Sequence[int], budget_s: float) -> None:
        """Makes NCCL load its kernels on devices, with a temporary communicator on each.

        During this call, no work on a device may wait for another device. While the driver loads a
        kernel, it blocks launches on all devices of the process, and waits for running kernels.

        Args:
            ordinals: CUDA ordinals.
            budget_s: time limit for NCCL.

        Raises:
            As `make_group` and `NcclGroup.init`.

        Cost: some tenths of a second, and 190 MiB on each device, once per process.
        """
        ranks = Ranks(
            name="load NCCL's kernels",
            generation=0,
            ep_size=1,
            world_ranks=tuple(range(len(ordinals))),
            ordinals=tuple(ordinals),
            op_timeout_s=budget_s,
            carries_rows=False,
            max_channels=1,
        )
        group = self.make_group(ranks, ())
        try:
            group.init(budget_s)
        finally:
            group.close()


class NcclGroup:
    """A group's communicators in this process. Thread-safe.

    Attributes:
        number: the group's number in the library.
        over: set by `abort` and `close`, which may cause all later failures.
    """

    def __init__(self, table: _TableStruct, number: int) -> None:
        self._table = table
        self.number = number
        self.over = threading.Event()

    def init(self, budget_s: float) -> None:
        """Makes the communicators with the other ranks; if they carry rows, sends first bytes.

        Raises:
            OpTimeoutError: the other ranks did not join within `budget_s`.
            EpRuntimeError: NCCL failed, or `abort` was called with this error.
        """
        checked(self._table.init_group, self.number, nanoseconds(budget_s))

    def try_sum(self, budget_s: float) -> None:
        """Runs an all-reduce of 4 MiB of int32 on each communicator, and checks the sums.

        All processes of the group must call this, after `init`. NCCL may connect and allocate.

        Raises:
            OpTimeoutError: the other ranks did not take part within `budget_s`.
            EpRuntimeError: NCCL failed, or a sum was wrong; the group cannot be used any more.
        """
        checked(self._table.try_sum, self.number, nanoseconds(budget_s))

    def add_layers(self, layers: Sequence[LayerStruct]) -> None:
        """Adds layers for the custom calls, which contain id, name and fingerprint."""
        made = (_LayerStruct * len(layers))(
            *(_LayerStruct(item.id, item.name, item.fingerprint) for item in layers)
        )
        checked(self._table.add_layers, self.number, made, len(layers))

    def abort(self, why: EpRuntimeError) -> None:
        """Ends all running calls of this process with error `why`, which ends peers' calls too."""
        self.over.set()
        self._table.abort_group(self.number, _text_of(why).encode())

    def rank_left(self, world_rank: int, why: EpRuntimeError) -> None:
        """Makes later calls that need this rank fail with error `why`, which ends the group."""
        self._table.rank_left(self.number, world_rank, _text_of(why).encode())

    def await_failure(self, within_s: float) -> str | None:
        """Waits for the group's first error, and returns its text.

        Returns "" if there is none within `within_s`, and None once the group closes.
        """
        text = TextBuffer()
        found = int(self._table.await_failure(self.number, nanoseconds(within_s), text.struct))
        return text.value if found >= 0 else None

    def check(self) -> str | None:
        """Returns the first error since the last `check`, or None."""
        text = TextBuffer()
        return text.value if self._table.check_group(self.number, text.struct) else None

    def close(self) -> None:
        """Ends the communicators within CLOSE_TIMEOUT_S; aborts them if a call has failed."""
        self.over.set()
        self._table.close_group(self.number, nanoseconds(CLOSE_TIMEOUT_S))


@functools.cache
def library() -> NcclLibrary:
    """Returns the NCCL functions of the CUDA library, which the first call loads.

    Raises:
        RuntimeUnavailableError: the CUDA library is not installed.
        VersionSkewError: the CUDA library belongs to another version of this package.
    """
    return NcclLibrary(native.library_path("cuda"))


def _text_of(error: EpRuntimeError) -> str:
    """Formats an error as the native library does, for `errors.parse`."""
    message = str(error).replace("\n", " ")
    return f"EP_RUNTIME/{type(error).__name__}: {message} {json.dumps(error.fields, default=str)}"
