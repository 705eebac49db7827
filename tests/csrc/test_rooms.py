"""The rooms of csrc/: who includes whom, and that no two types have one name."""

from __future__ import annotations

import re
from pathlib import Path

_SOURCES = Path(__file__).parents[2] / "csrc"

# The lowest first. A room that is not named belongs to the folder that it lies in.
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
    "cuda/movement/bench",
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
    """The files of csrc/ that the file includes, relative to it."""
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


def test_every_include_of_ours_exists() -> None:
    roots = "|".join(sorted({floor.split("/")[0] for floor in _FLOORS}))
    missing = [
        f"{path.relative_to(_SOURCES)} includes {name}"
        for path in _sources()
        for name in re.findall(rf'^#include "((?:{roots})/[^"]+)"', path.read_text(), re.M)
        if not (_SOURCES / name).exists()
    ]
    assert not missing


# One kind of call, with host pointers in csrc/cpu and with device pointers in csrc/cuda.
_ON_BOTH = {"PrepareParams", "DispatchParams", "CombineParams", "CombineBwdParams", "RowType"}

_TYPE = re.compile(
    r"^\s*(?:struct|class|enum class|enum)(?: alignas\(\d+\))? (\w+)[^;{}()<>]*\{", re.M
)


def test_no_two_types_have_one_name() -> None:
    homes: dict[str, set[str]] = {}
    for path in _sources():
        for name in _TYPE.findall(path.read_text()):
            homes.setdefault(name, set()).add(path.relative_to(_SOURCES).as_posix())
    assert len(homes) > 200
    twins = {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1}
    assert set(twins) == _ON_BOTH, twins
