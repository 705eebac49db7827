"""The structs of the native libraries' C interface, which mirror `csrc/ffi/c_table.h`.

Loading a library with different structs raises an error. The library describes its structs in
lines, which `csrc/ffi/struct_lines.h` writes: "EpLayer.top_k=24 8 i64" has a field's offset, bytes
and kind, "EpLayer=56" is a struct's size. The first fields of the table never change, so that a
library of another version raises an error and does not crash.
"""

from __future__ import annotations

import ctypes
from _ctypes import CFuncPtr
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ep_runtime.errors import VersionSkewError

# Version of the table and of every struct that its functions take.
ABI = 6


class TextStruct(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_int64)]


class GroupOptionsStruct(ctypes.Structure):
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
        ("lane_rows", ctypes.c_int64),
        ("spare_experts", ctypes.c_int64),
        ("settings", ctypes.c_char_p),
        ("debug", ctypes.c_int32),
        ("tell_progress", ctypes.c_int32),
        ("local_ranks", ctypes.POINTER(ctypes.c_int64)),
        ("num_local_ranks", ctypes.c_int64),
        ("local_devices", ctypes.POINTER(ctypes.c_int32)),
    ]


class LayerStruct(ctypes.Structure):
    """A layer for the native handlers; `handle_base` is the board index of its first handle."""

    _fields_ = [
        ("id", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("fingerprint", ctypes.c_uint64),
        ("top_k", ctypes.c_int64),
        ("alignment", ctypes.c_int64),
        ("in_flight", ctypes.c_int64),
        ("handle_base", ctypes.c_uint32),
    ]


_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class TargetStruct(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("instantiate", _HANDLER), ("execute", _HANDLER)]


_I64 = ctypes.c_int64
OptionsP = ctypes.POINTER(GroupOptionsStruct)


class TableStruct(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("version", ctypes.c_char_p),
        ("targets", ctypes.POINTER(TargetStruct)),
        ("num_targets", ctypes.c_uint64),
        ("state_type_id", ctypes.c_void_p),
        ("state_type_info", ctypes.c_void_p),
        (
            "open_group",
            ctypes.CFUNCTYPE(
                _I64, OptionsP, ctypes.c_int, ctypes.POINTER(ctypes.c_int), _I64, TextStruct
            ),
        ),
        ("add_layers", ctypes.CFUNCTYPE(_I64, _I64, ctypes.POINTER(LayerStruct), _I64, TextStruct)),
        ("remove_layers", ctypes.CFUNCTYPE(None, _I64, ctypes.POINTER(ctypes.c_uint64), _I64)),
        ("close_group", ctypes.CFUNCTYPE(None, _I64, _I64)),
        ("check_group", ctypes.CFUNCTYPE(_I64, _I64, TextStruct)),
        ("fill_staging", ctypes.CFUNCTYPE(None, _I64, ctypes.c_int)),
        ("window_bytes", ctypes.CFUNCTYPE(_I64, OptionsP)),
        ("control_bytes", ctypes.CFUNCTYPE(_I64, _I64, _I64)),
        ("structs", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("use_row_ops", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)),
        ("num_devices", ctypes.CFUNCTYPE(_I64, TextStruct)),
        ("device_uuid", ctypes.CFUNCTYPE(_I64, ctypes.c_int32, TextStruct)),
        ("reaches", ctypes.CFUNCTYPE(_I64, ctypes.c_int32, ctypes.c_int32, TextStruct)),
        ("architectures", ctypes.c_char_p),
    ]


# The structs by their C names.
STRUCTS = {
    "EpText": TextStruct,
    "EpGroupOptions": GroupOptionsStruct,
    "EpLayer": LayerStruct,
    "Target": TargetStruct,
    "EpTable": TableStruct,
}
Mirrors = Mapping[str, type[ctypes.Structure]]
_POINTERS = (ctypes.c_char_p, ctypes.c_void_p)
# Format characters of signed integers, which ctypes shares with the struct module.
_SIGNED = "bhilq"


def check_structs(path: Path, text: str, mirrors: Mirrors, constants: Mapping[str, int]) -> None:
    """Compares the library's description of its structs with the ctypes `mirrors`.

    Raises:
        VersionSkewError: a struct, field or constant differs or is missing; the message names
            the first one.
    """
    theirs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    ours = {**dict(_lines(mirrors)), **{name: str(value) for name, value in constants.items()}}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise VersionSkewError(
                f"{path} was built from other sources than this package: {name} is "
                f"{theirs.get(name, 'missing')} there and {ours.get(name, 'missing')} here; "
                "build it again",
                field=name,
                library=theirs.get(name),
                package=ours.get(name),
            )


def _lines(mirrors: Mirrors) -> Iterator[tuple[str, str]]:
    for name, struct in mirrors.items():
        yield name, str(ctypes.sizeof(struct))
        for field, kind, *_ in struct._fields_:
            place = getattr(struct, field)
            yield f"{name}.{field}", f"{place.offset} {place.size} {_kind(kind)}"


def _kind(of: Any) -> str:
    if of is None:
        return "v"
    if issubclass(of, CFuncPtr):
        arguments = ",".join(_kind(argument) for argument in of._argtypes_)
        return f"{_kind(of._restype_)}({arguments})"
    if issubclass(of, (*_POINTERS, ctypes._Pointer)):
        return "p"
    if issubclass(of, ctypes.Array):
        return f"{_kind(of._type_)}[{of._length_}]"
    if issubclass(of, ctypes.Structure):
        return f"s{ctypes.sizeof(of)}"
    return f"{'i' if of._type_ in _SIGNED else 'u'}{8 * ctypes.sizeof(of)}"
