"""Counts the collectives of compiled programs by kind and element type."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ep_runtime_client.ops.partitioning.on_mesh import TARGET

_LINE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) (?P<kind>all-gather|all-reduce|all-to-all|reduce-scatter"
    r"|collective-permute|ragged-all-to-all|collective-broadcast)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")


def _moved(compiled: Any) -> Iterator[tuple[str, str, str]]:
    """(kind, dtype, dims) of every array that a collective returns; one may return several."""
    for match in _LINE.finditer(compiled.as_text()):
        arrays = _ARRAY.findall(match["shape"])
        if match["start"] and match["kind"] != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # operands come first
        for dtype, dims in arrays:
            yield match["kind"], dtype, dims


def count(compiled: Any) -> Counter[tuple[str, str]]:
    """(kind, dtype) -> arrays that such collectives move."""
    return Counter((kind, dtype) for kind, dtype, _ in _moved(compiled))


_NAME = re.compile(rf'(@{TARGET}.*?backend_config) = "[0-9a-f]+"')


def unnamed(lowered: str) -> str:
    """Returns a program's text before partitioning, without names of its rules and settings.

    Programs that are the same then, and whose rules are told the same, are the same compiled.
    """
    return _NAME.sub(r"\1", lowered)


def moved_bytes(compiled: Any, kind: str) -> int:
    """Bytes of the results of all collectives of a kind, on one device."""
    total = 0
    for found, dtype, dims in _moved(compiled):
        if found == kind:
            digits = re.search(r"\d+", dtype)
            size = math.prod(int(length) for length in dims.split(",") if length)
            total += size * (int(digits.group()) // 8 if digits else 1)
    return total
