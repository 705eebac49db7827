"""Compares our ctypes structs with a native library's structs, field by field.

The library describes its structs in lines, which `csrc/ffi/struct_lines.h` writes. A line
"EpLayer.top_k=24 8 i64" has a field's offset, bytes and kind; "EpLayer=56" is a struct's size.
"""

from __future__ import annotations

import ctypes
from _ctypes import CFuncPtr
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ep_runtime.errors import VersionSkewError

Mirrors = Mapping[str, type[ctypes.Structure]]
_POINTERS = (ctypes.c_char_p, ctypes.c_void_p)
# Format characters of signed integers, which ctypes shares with the struct module.
_SIGNED = "bhilq"


def check(path: Path, text: str, mirrors: Mirrors, constants: Mapping[str, int]) -> None:
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
                f"{path} was built of other sources than this package: {name} is "
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
