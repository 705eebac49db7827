"""Checks the journal's records, so that the daemon does not fail on malformed ones later.

A complete record may be malformed if another version or another program wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any], bool]

# Limit of a group's generation, which no daemon reaches.
MAX_GENERATION = 1 << 62


def number(low: int, high: int) -> Shape:
    return lambda value: type(value) is int and low <= value <= high


def text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def seconds(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e12  # False for NaN


def maybe(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def each(shape: Shape) -> Shape:
    return lambda value: isinstance(value, list) and all(map(shape, value))


def row(*shapes: Shape) -> Shape:
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(shapes)
        and all(shape(item) for shape, item in zip(shapes, value, strict=True))
    )


def texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


uid = number(0, (1 << 32) - 1)
int32 = number(-(1 << 31), (1 << 31) - 1)
pid = number(0, (1 << 31) - 1)
rank = number(-1, (1 << 20) - 1)
generation = number(0, MAX_GENERATION)
owner = row(uid, text, text)

SESSION: Mapping[str, Shape] = {
    "token_digest": text,
    "uid": uid,
    "pid": pid,
    "own_pid": number(-(1 << 63), (1 << 63) - 1),
    "start_s": maybe(seconds),
    "client_version": text,
    "created_s": seconds,
    "created_wall_s": seconds,
    "state": text,
    "job": text,
    "labels": texts,
    "process_index": int32,
    "fence_reason": text,
}
WINDOWS: Mapping[str, Shape] = {
    "owner": owner,
    "ranks": each(rank),
    "generation": generation,
    "created_s": seconds,
    "state": text,
    "buffers": each(
        row(text, text, rank, number(0, 1 << 60), maybe(row(*[number(0, (1 << 64) - 1)] * 2)))
    ),
    "holders": each(text),
}
GROUP: Mapping[str, Shape] = {
    "owner": owner,
    "node_size": number(0, 1 << 20),
    "generation": generation,
    "state": text,
    "formed": flag,
    "members": each(row(text, each(rank), flag)),
    "previous": each(row(text, each(rank), flag)),
    "left": each(text),
    "windows": maybe(text),
    "reattached": flag,
    "retained_until_s": maybe(seconds),
    "created_s": seconds,
    "created_wall_s": seconds,
    "spans": flag,
    "epoch": generation,
    "remote": each(row(rank, text, text, number(-(1 << 63), (1 << 63) - 1))),
    "undecided": maybe(row(generation, each(text), each(rank))),
    "answered": maybe(row(generation, each(text), each(row(rank, text)))),
}


def check(value: Any, shapes: Mapping[str, Shape]) -> None:
    """Raises TypeError naming the first field of `value` that has a wrong shape."""
    if not isinstance(value, Mapping):
        raise TypeError("it is not an object")
    for name, shape in shapes.items():
        if name in value and not shape(value[name]):
            raise TypeError(f"{name} cannot be {str(value[name])[:80]}")
