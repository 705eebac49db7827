"""The byte layout of a copy of a job's state: which process writes which piece, and where.

A window has a mark, a table of pieces as JSON, and the pieces. Every process computes the same
layout from shapes and shardings, so all windows have one size without communication.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ep_runtime.errors import EpRuntimeError
from ep_runtime.layout import align_up

PAGE_BYTES = 4096
_ALIGNMENT = 64
_MAGIC = b"EPSTATE1"
_MARK = struct.Struct("<8sQqQ")
NO_STEP = -1

# [low, high) on every dim.
Bounds = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Mark:
    """The first bytes of a window.

    Attributes:
        generation: generation of the group when the process began to write.
        step: the step whose pieces are complete; NO_STEP during a write.
        table_bytes: bytes of the table that follows.
    """

    generation: int
    step: int
    table_bytes: int

    def packed(self) -> bytes:
        return _MARK.pack(_MAGIC, self.generation, self.step, self.table_bytes)


def read_mark(data: bytes) -> Mark | None:
    """Reads the mark at the start of a window; None if no process has written one."""
    magic, generation, step, table_bytes = _MARK.unpack(data[: _MARK.size])
    return Mark(generation, step, table_bytes) if magic == _MAGIC else None


MARK_BYTES = _MARK.size


def pieces_start(table_bytes: int) -> int:
    """Returns the offset of the pieces in a window."""
    return int(align_up(MARK_BYTES + table_bytes, PAGE_BYTES))


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """Returns the bounds of a block that JAX describes by slices."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


@dataclasses.dataclass(frozen=True)
class OwnPiece:
    """A piece that this process writes: the shard of leaf number `leaf` on `device`."""

    leaf: int
    device: Any
    offset: int  # in the window


@dataclasses.dataclass(frozen=True)
class Layout:
    """The position of every piece of a state in the windows of its processes.

    Attributes:
        processes: for each rank, JAX's index of the process that writes the rank's window.
        window_bytes: bytes of every window.
        table: table of this process's window.
        own: pieces of this process.
    """

    processes: tuple[int, ...]
    window_bytes: int
    table: bytes
    own: tuple[OwnPiece, ...]


def make_layout(leaves: Mapping[str, Any], here: int) -> Layout:
    """Computes the layout of arrays by name, for process `here`.

    One replica of each piece is written, by the process with the fewest bytes so far.
    """
    placed = {name: leaf.sharding.devices_indices_map(leaf.shape) for name, leaf in leaves.items()}
    found = sorted({device.process_index for where in placed.values() for device in where})
    ranks = {process: rank for rank, process in enumerate(found)}
    used = [0] * len(found)
    rows: list[list[Any]] = [[] for _ in found]
    own: list[OwnPiece] = []
    for number, (name, leaf) in enumerate(leaves.items()):
        replicas: dict[Bounds, list[Any]] = {}
        for device, index in placed[name].items():
            replicas.setdefault(bounds_of(index, leaf.shape), []).append(device)
        for bounds, devices in replicas.items():
            device = min(devices, key=lambda each: used[ranks[each.process_index]])
            rank = ranks[device.process_index]
            rows[rank].append([number, bounds, used[rank]])
            if device.process_index == here:
                own.append(OwnPiece(number, device, used[rank]))
            size = math.prod(high - low for low, high in bounds) * leaf.dtype.itemsize
            used[rank] = int(align_up(used[rank] + size, _ALIGNMENT))
    about = [[name, str(leaf.dtype), leaf.shape] for name, leaf in leaves.items()]
    tables = [json.dumps({"leaves": about, "pieces": each}).encode() for each in rows]
    starts = [pieces_start(len(table)) for table in tables]
    window_bytes = max(
        (start + size for start, size in zip(starts, used, strict=True)), default=PAGE_BYTES
    )
    if here not in ranks:
        return Layout(tuple(found), window_bytes, b"", ())
    start = starts[ranks[here]]
    return Layout(
        tuple(found),
        int(align_up(window_bytes, PAGE_BYTES)),
        tables[ranks[here]],
        tuple(dataclasses.replace(piece, offset=start + piece.offset) for piece in own),
    )


def _bits(dtype: Any) -> Any:
    """Returns a NumPy dtype of the same size, which copies faster than a dtype of ml_dtypes."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.itemsize in (1, 2, 4, 8) else dtype


@dataclasses.dataclass
class StoredArray:
    """An array of a copy, as pieces that are views of the windows."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Bounds, Any]] = dataclasses.field(default_factory=list)

    def block(self, name: str, bounds: Bounds, dtype: Any) -> Any:
        """Returns a new NumPy array with the elements within `bounds`.

        Raises:
            EpRuntimeError: the windows lack some of them.
        """
        found = np.empty([high - low for low, high in bounds], dtype)
        into, copied = found.view(_bits(dtype)), 0
        for theirs, view in self.pieces:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, theirs, strict=True)]
            if any(low >= high for low, high in both):
                continue
            into[_within(both, bounds)] = view[_within(both, theirs)]
            copied += math.prod(high - low for low, high in both)
        if copied != found.size:
            raise EpRuntimeError(
                f"the copy on this node has {copied} of {found.size} elements of {name} within "
                f"{list(bounds)}"
            )
        return found


def _within(part: Sequence[tuple[int, int]], whole: Bounds) -> tuple[slice, ...]:
    return tuple(
        slice(low - start, high - start)
        for (low, high), (start, _) in zip(part, whole, strict=True)
    )


def read_arrays(windows: Sequence[Any]) -> dict[str, StoredArray]:
    """Reads the arrays of a copy by name, from a buffer per window that they keep."""
    found: dict[str, StoredArray] = {}
    for window in windows:
        for name, dtype, shape, bounds, data in _pieces(window):
            stored = found.setdefault(name, StoredArray(dtype, shape))
            if data is not None:
                stored.pieces.append((bounds, data))
    return found


def _pieces(window: Any) -> Iterator[tuple[str, str, tuple[int, ...], Bounds, Any]]:
    """Yields (name, dtype, shape, bounds, view) of every piece; view None for no piece."""
    from jax import numpy as jnp  # knows the names of ml_dtypes

    mark = read_mark(window[:MARK_BYTES])
    assert mark is not None  # a committed copy has marks
    table = json.loads(bytes(window[MARK_BYTES : MARK_BYTES + mark.table_bytes]))
    start = pieces_start(mark.table_bytes)
    for name, dtype, shape in table["leaves"]:
        yield name, dtype, tuple(shape), (), None
    for number, rows, offset in table["pieces"]:
        name, dtype, shape = table["leaves"][number]
        bounds = tuple((low, high) for low, high in rows)
        sizes = [high - low for low, high in bounds]
        bits = _bits(jnp.dtype(dtype))
        data = np.frombuffer(window, bits, math.prod(sizes), start + offset)
        yield name, dtype, tuple(shape), bounds, data.reshape(sizes)
