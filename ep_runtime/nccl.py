"""NCCL through the CUDA library: finds libnccl, and makes, aborts and closes communicators. No JAX.

A process has one libnccl, the one that JAX loaded: two copies corrupt each other's communicators.
Structs as in `csrc/ffi/nccl/nccl_table.h`.
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

from ep_runtime import env, native, struct_lines
from ep_runtime.errors import EpRuntimeError, VersionSkewError
from ep_runtime.native import TextBuffer, nanoseconds
from ep_runtime.native_abi import TextStruct

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


# By their names in C.
_STRUCTS = {
    "EpText": TextStruct,
    "EpNcclOptions": _OptionsStruct,
    "EpNcclLayer": _LayerStruct,
    "EpNcclTable": _TableStruct,
}


def version_text(version: int) -> str:
    """ "2.28.9" of 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def find_library() -> str:
    """Finds libnccl.so.2 for a process without it: EP_RUNTIME_NCCL_LIBRARY, else the wheel of JAX's
    CUDA extras, else its bare name for the loader.

    Uses the wheel's path that JAX uses, so that both share one loaded library.
    """
    given = env.nccl_library()
    if given is not None:
        return given
    # A namespace package of several wheels; importing it would run nothing either.
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
    """Ranks and devices of this process in a group's communicators.

    Attributes:
        name: of the group.
        generation: of the group.
        ep_size: N, ranks of one EP domain, each with a communicator of N ranks.
        world_ranks: of this process.
        ordinals: CUDA ordinal of each.
        op_timeout_s: how long one call may wait for its peers.
        carries_rows: rows travel over them, so they connect to every peer when they are made;
            else NCCL connects and allocates buffers when something first calls it.
        max_channels: of a communicator, each with buffers for every peer; 0: NCCL's choice.
    """

    name: str
    generation: int
    ep_size: int
    world_ranks: tuple[int, ...]
    ordinals: tuple[int, ...]
    op_timeout_s: float
    carries_rows: bool = True
    max_channels: int = 0


@dataclasses.dataclass(frozen=True)
class NcclLayer:
    """A layer's id, name and fingerprint in calls."""

    id: int
    name: str
    fingerprint: int


class NcclLibrary:
    """The NCCL side of the loaded CUDA library. Get it from `library()`."""

    def __init__(self, path: Path) -> None:
        """Raises as `native.NativeLibrary`."""
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
                f"{path} has no NCCL of this package's version; build it again", package=ABI
            )
        struct_lines.check(path, self._table.structs().decode(), _STRUCTS, {})

    def version(self) -> int:
        """NCCL's version as a number (22809 for 2.28.9); loads NCCL unless the process has it.

        Raises:
            RuntimeUnavailableError: there is none.
            VersionSkewError: it is too old, or newer than this package knows.
        """
        text = TextBuffer()
        return text.checked(self._table.version(find_library().encode(), text.struct))

    def make_group(self, ranks: Ranks, ids: Sequence[bytes]) -> NcclGroup:
        """Makes a group without communicators yet. `ids` has one unique id per EP domain, or none
        for domains of one rank, whose ids NCCL makes here.

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
        text = TextBuffer()
        number = text.checked(self._table.make_group(ctypes.byref(options), text.struct))
        return NcclGroup(self._table, number)

    def load_kernels(self, ordinals: Sequence[int], budget_s: float) -> None:
        """Has NCCL load its kernels on these devices: by a communicator of one rank on each, which
        ends again.

        Nothing on the devices may wait for another of them meanwhile: the driver makes launches on
        all devices of a process wait while it loads a kernel, and waits itself for what runs.

        Args:
            ordinals: CUDA ordinals.
            budget_s: for NCCL to be done.

        Raises:
            As `make_group` and `NcclGroup.init`.

        Cost: some tenths of a second and 190 MiB of each device for the process, once.
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
        number: as the library knows it.
        over: set by `abort` and `close`: what fails from then on may be their doing.
    """

    def __init__(self, table: _TableStruct, number: int) -> None:
        self._table = table
        self.number = number
        self.over = threading.Event()

    def init(self, budget_s: float) -> None:
        """Joins the other ranks; if rows use these communicators, moves the first bytes.

        Raises:
            OpTimeoutError: they did not join within the budget.
            EpRuntimeError: what NCCL says, or what `abort` was given meanwhile.
        """
        text = TextBuffer()
        text.checked(self._table.init_group(self.number, nanoseconds(budget_s), text.struct))

    def try_sum(self, budget_s: float) -> None:
        """An all-reduce of 4 MiB of int32 over each communicator, whose sums are checked.

        Every process of the group must ask for it. After `init`; NCCL may connect and allocate.

        Raises:
            OpTimeoutError: the others did not within the budget.
            EpRuntimeError: what NCCL says, or which sum was wrong; the group is of no use then.
        """
        text = TextBuffer()
        text.checked(self._table.try_sum(self.number, nanoseconds(budget_s), text.struct))

    def add_layers(self, layers: Sequence[NcclLayer]) -> None:
        """Makes layers known to the custom calls."""
        made = (_LayerStruct * len(layers))(
            *(_LayerStruct(item.id, item.name.encode(), item.fingerprint) for item in layers)
        )
        text = TextBuffer()
        text.checked(self._table.add_layers(self.number, made, len(layers), text.struct))

    def abort(self, why: EpRuntimeError) -> None:
        """Ends all running calls with this error, here and thereby on the peers."""
        self.over.set()
        self._table.abort_group(self.number, _text_of(why).encode())

    def rank_left(self, world_rank: int, why: EpRuntimeError) -> None:
        """Makes later calls that need this rank, and the group, end with this error."""
        self._table.rank_left(self.number, world_rank, _text_of(why).encode())

    def await_failure(self, within_s: float) -> str | None:
        """Text of the group's first error, "" if there is none in that time; None once the
        group closes."""
        text = TextBuffer()
        found = int(self._table.await_failure(self.number, nanoseconds(within_s), text.struct))
        return text.value if found >= 0 else None

    def check(self) -> str | None:
        """Returns the first error since the last call of this, or None."""
        text = TextBuffer()
        return text.value if self._table.check_group(self.number, text.struct) else None

    def close(self) -> None:
        """Ends the communicators within a bound: in good order where nothing failed."""
        self.over.set()
        self._table.close_group(self.number, nanoseconds(CLOSE_TIMEOUT_S))


@functools.cache
def library() -> NcclLibrary:
    """NCCL of the CUDA library.

    Raises:
        RuntimeUnavailableError: the CUDA library is not installed.
        VersionSkewError: it belongs to another version of this package.
    """
    return NcclLibrary(native.library_path("cuda"))


def _text_of(error: EpRuntimeError) -> str:
    """Writes an error in the native library's form, for `errors.parse`."""
    message = str(error).replace("\n", " ")
    return f"EP_RUNTIME/{type(error).__name__}: {message} {json.dumps(error.fields, default=str)}"
