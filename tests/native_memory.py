"""Boards and windows for tests without a daemon, shared between processes. No JAX."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from typing import Any

from ep_runtime import board, native, specs

Memory = tuple[int, list[int]]  # fds of a board and of every window

# The group of most tests of native calls.
SIZES: dict[str, Any] = {
    "num_experts": 16,
    "hidden_size": 64,
    "max_tokens_per_rank": 8,
    "max_token_dtype": "float32",
    "max_top_k": 2,
}


def make_spec(axes: dict[str, int], **settings: Any) -> specs.GroupSpec:
    """Makes the group's spec; axes end with "ep"."""
    return specs.make_group_spec(
        mesh_axes=tuple(axes.items()),
        ep_axis="ep",
        outer_axes=tuple(a for a in axes if a != "ep"),
        **({"op_timeout_s": 60.0} | settings),
    )


def make_memory(spec: specs.GroupSpec, generation: int) -> Memory:
    """Makes a formatted board and empty windows."""
    sizes = [board.window_bytes(spec)] * spec.world_size
    fds = [os.memfd_create("ep-test") for _ in range(1 + len(sizes))]
    for fd, size in zip(fds, [board.board_bytes(spec), *sizes], strict=True):
        os.truncate(fd, size)
    with mmap.mmap(fds[0], 0) as pages:
        board.format_board(pages, board.board_layout(spec), generation)
    return fds[0], fds[1:]


def open_group(
    spec: specs.GroupSpec, generation: int, memory: Memory | None = None, **options: Any
) -> tuple[mmap.mmap, int]:
    """Opens a group in this process, on `memory` or new memory; yields its board and number."""
    board_fd, window_fds = memory or make_memory(spec, generation)
    given = {"generation": generation, "board_fd": board_fd, "window_fds": window_fds}
    try:
        number = native.library().open_group(spec, **given, **options)
        return mmap.mmap(board_fd, 0), number
    finally:
        for fd in (board_fd, *window_fds):
            os.close(fd)


class SharedGroup:
    """Memory of a group that other processes of this user open; this process watches its board."""

    def __init__(self, name: str, world_size: int, **settings: Any) -> None:
        self.settings = {**SIZES, **settings}
        self.spec = make_spec({"ep": world_size}, name=name, alignment=1, **self.settings)
        self.layout = board.board_layout(self.spec)
        self._memory = make_memory(self.spec, generation=1)
        self.board = mmap.mmap(self._memory[0], 0)

    def ticket(self) -> dict[str, Any]:
        """The text from which `open_memory` finds the memory in another process."""
        paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in (self._memory[0], *self._memory[1])]
        return {"name": self.spec.name, "settings": self.settings, "paths": paths}

    def close(self) -> None:
        self.board.close()
        for fd in (self._memory[0], *self._memory[1]):
            os.close(fd)


@contextlib.contextmanager
def shared_groups(
    world_size: int, *names: str, **settings: Any
) -> Iterator[tuple[list[SharedGroup], str]]:
    """Makes groups of `world_size` ranks, and the text by which other processes find them."""
    groups = [SharedGroup(name, world_size, **settings) for name in names]
    try:
        yield groups, json.dumps([group.ticket() for group in groups])
    finally:
        for group in groups:
            group.close()


def open_memory(ticket: dict[str, Any]) -> Memory:
    """Opens the memory behind `SharedGroup.ticket()`."""
    first, *rest = (os.open(path, os.O_RDWR) for path in ticket["paths"])
    return first, rest
