"""Reads compiled HLO: what maps whole arrays outside loops and custom calls."""

from __future__ import annotations

import dataclasses
import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<op>[a-z][a-z0-9\-]*)\("
)
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_DIMS = re.compile(r"\[([\d,]+)\]")
# Ops that make or move elements without reading their values; all others read their operands.
_MOVES = frozenset(
    [
        "parameter",
        "constant",
        "broadcast",
        "iota",
        "bitcast",
        "bitcast-convert",
        "reshape",
        "transpose",
        "copy",
        "tuple",
        "slice",
        "get-tuple-element",
        "while",
        "conditional",
        "call",
        "fusion",
        "custom-call",
        "dynamic-slice",
        "concatenate",
        "dynamic-update-slice",
        "dot",
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
    ]
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a compiled program."""

    name: str
    op: str
    dims: tuple[tuple[int, ...], ...]  # bytes of every array it returns
    line: str


def computations(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every computation of a compiled module, by its name."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = found.setdefault(head["name"], [])
        item = _INSTRUCTION.match(line)
        if item:
            dims = tuple(
                tuple(int(d) for d in each.split(",")) for each in _DIMS.findall(item["shape"])
            )
            current.append(Instruction(item["name"], item["op"], dims, line.strip()))
    return found


def entry_name(text: str) -> str:
    """Name of the computation that a compiled module starts with."""
    found = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert found is not None, "no ENTRY in the module's text"
    return found[1]


def outside_loops(text: str) -> list[Instruction]:
    """Yields the instructions of the entry and of computations it calls, except bodies of loops."""
    every = computations(text)
    todo, seen, found = [entry_name(text)], set(), []
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for item in every[name]:
            found.append(item)
            if item.op in ("call", "fusion", "conditional"):
                todo += _CALLED.findall(item.line)
    return found


def maps_of(text: str, size: int) -> list[str]:
    """Lines outside loops that compute elements of an array with a dim of `size`."""
    return [
        item.line
        for item in outside_loops(text)
        if item.op not in _MOVES and any(size in dims for dims in item.dims)
    ]
