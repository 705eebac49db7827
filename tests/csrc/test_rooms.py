"""Tests which folders of csrc/ include which others, and which attributes calls read."""

from __future__ import annotations

import re
from pathlib import Path

_SOURCES = Path(__file__).parents[2] / "csrc"
# From the lowest up. A folder that is not listed belongs to its parent.
_FLOORS = (
    "core/base",
    "core/memory",
    "core/runs",
    "core/meeting",
    "core/groups",
    "cpu",
    "cuda",
    "cuda/device",
    "cuda/movement/call",
    "cuda/movement/prepare",
    "cuda/movement/dispatch",
    "cuda/movement/combine",
    "cuda/movement/copies",
    "cuda/movement/bench",
    "cuda/rows/values",
    "cuda/gemm/product",
    "cuda/gemm/tile",
    "cuda/gemm/kernels",
    "cuda/gemm/copies",
    "cuda/gemm",
    "cuda/rows",
    "cuda/block",
    "cuda/nccl",
    "ffi",
)


def _floor(path: Path) -> int:
    for folder in path.parents:
        if folder.as_posix() in _FLOORS:
            return _FLOORS.index(folder.as_posix())
    raise AssertionError(f"{path} lies in no room: name its floor in {Path(__file__).name}")


def _sources() -> list[Path]:
    return [path for path in _SOURCES.rglob("*.*") if path.suffix in {".h", ".cc", ".cu", ".cuh"}]


def _includes(path: Path) -> list[Path]:
    """Returns the files of csrc/ that the file includes, relative to csrc/."""
    named = re.findall(r'^#include "([^"]+)"', path.read_text(), re.M)
    return [Path(name) for name in named if (_SOURCES / name).exists()]


def test_rooms_include_only_what_lies_below() -> None:
    files = _sources()
    assert len(files) > 150
    upward = [
        f"{path.relative_to(_SOURCES)} includes {included}"
        for path in files
        for included in _includes(path)
        if _floor(included) > _floor(path.relative_to(_SOURCES))
    ]
    assert not upward


def test_attributes_that_are_read_are_not_refused() -> None:
    known = re.search(
        r"kAttributes\[\] = \{(.*?)\}", (_SOURCES / "ffi/read_call.cc").read_text(), re.S
    )
    assert known is not None
    text = "\n".join(path.read_text() for path in (_SOURCES / "ffi").rglob("*.cc"))
    read = re.findall(r'(?:attrs\.get<\w+>\(|ReadIfThere\(attrs, )"(\w+)"', text)
    assert "node_size" in read
    assert "rows" in read
    assert sorted(set(read)) == sorted(re.findall(r'"(\w+)"', known.group(1)))
