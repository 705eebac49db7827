"""A copy of a job's state in the daemon's windows: a group of processes, one window each.

Marks in the windows tell which step is complete, so neither a commit nor a read needs the daemon,
and a window keeps its mark after its process is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ep_runtime import specs, wire
from ep_runtime.errors import (
    EpRuntimeError,
    GroupNotReadyError,
    InvalidArgumentError,
    StaleHandleError,
)
from ep_runtime.v1 import group_service_pb2
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.client import DaemonClient
from ep_runtime_client.groups import make_group
from ep_runtime_client.groups.formed import Formed, Memory, fetch
from ep_runtime_client.groups.forming import Claim, form
from ep_runtime_client.groups.held_group import HeldGroup
from ep_runtime_client.groups.state_layout import (
    MARK_BYTES,
    NO_STEP,
    PAGE_BYTES,
    Layout,
    Mark,
    StoredArray,
    read_arrays,
    read_mark,
)

_POLL_S = 0.002
# Only calls that move tokens use a mesh.
_NO_MESH: Any = None
# A thread copies some 10 GB/s. System calls that write one file wait for each other, so windows are
# mapped.
_WRITERS = 4
_AT_ONCE = 64 << 20


def spec_of(name: str, layout: Layout, retain_s: float, generation: int) -> specs.GroupSpec:
    """Returns the spec of the group for the copy `name`: each process has one expert with 1-byte
    rows.

    `generation` of the job makes the spec unique, so that it replaces an earlier group of
    processes: that group may have as many processes with other ranks, whose windows the daemon
    would keep.
    """
    processes = len(layout.processes)
    axis = f"process.{generation}"
    return specs.make_group_spec(
        name=name,
        mesh_axes=((axis, processes),),
        ep_axis=(axis,),
        num_experts=processes,
        hidden_size=PAGE_BYTES,
        max_tokens_per_rank=layout.window_bytes // PAGE_BYTES,
        recv_capacity_per_rank=1,
        max_top_k=1,
        max_token_dtype="uint8",
        alignment=1,
        lanes=1,
        transport=specs.STATE,
        retain_s=retain_s,
    )


@dataclasses.dataclass(frozen=True)
class CopyMemory:
    """Descriptors of a copy's windows."""

    name: str
    size: int
    memory: Memory

    @contextlib.contextmanager
    def _files(self) -> Iterator[list[int]]:
        """Lends descriptors of all windows by rank, open until the end of the block."""
        with self.memory.lent(range(self.size)) as lent:
            by_rank = {int(item.world_rank): fd for item, fd in lent}
            if missing := [rank for rank in range(self.size) if rank not in by_rank]:
                raise EpRuntimeError(
                    f"copy {self.name!r}: the windows of ranks {missing} of {self.size} are not "
                    "on this node"
                )
            yield [by_rank[rank] for rank in range(self.size)]

    def marks(self) -> list[Mark | None]:
        """Returns the mark of every window."""
        with self._files() as files:
            return [read_mark(os.pread(file, MARK_BYTES, 0)) for file in files]

    @property
    def committed(self) -> int | None:
        """The step whose pieces all processes have written; None if there is none."""
        first, *rest = self.marks()
        if first is None or first.step == NO_STEP:
            return None
        same = (first.generation, first.step)
        whole = all(mark and (mark.generation, mark.step) == same for mark in rest)
        return first.step if whole else None

    def arrays(self) -> dict[str, StoredArray]:
        """Returns the arrays of a committed copy by name, as views that stay valid."""
        with self._files() as files:
            maps = [mmap.mmap(file, 0, prot=mmap.PROT_READ) for file in files]
        return read_arrays(maps)


class HeldCopy(HeldGroup):
    """A copy of which this process writes one window. The loss of a process does not end it,
    because its windows are then needed for a restore.

    Attributes:
        writing: the running write, which must not outlive the descriptors.
    """

    def __init__(self, client: DaemonClient, formed: Formed) -> None:
        super().__init__(client, _NO_MESH, formed)
        self.copy = CopyMemory(self.name, self.spec.world_size, formed.memory)
        self.rank = formed.ranks[0]
        self.writing: Future[None] | None = None
        self._window: np.ndarray | None = None  # mapped by the first write

    @property
    def is_gone(self) -> bool:
        return self.closed

    @property
    def whole(self) -> bool:
        """Whether every process of the group lives and the daemon knows it."""
        return not super().is_gone

    def require_whole(self, layer: str | None = None) -> None:
        """Does nothing: a process that lost another one continues, to restore."""

    def require_open(self, layer: str | None = None) -> None:
        """Raises InvalidArgumentError, because this is not a group of tokens."""
        raise make_group.is_state(self.name)

    def settle(self) -> None:
        """Waits for the running write."""
        if self.writing is not None and self.client.is_ours:
            self.writing.exception()

    def close(self) -> None:
        """Like `Group.close`."""
        super().close()
        self._window = None

    def _mark(self, step: int, table_bytes: int) -> bytes:
        return Mark(self.generation, step, table_bytes).packed()

    def write(self, layout: Layout, arrays: Sequence[Any], step: int) -> None:
        """Writes the pieces of this process, and then the mark for `step`."""
        with self._formed.memory.lent([self.rank]) as lent:
            [(_, file)] = lent
            if self._window is None:  # its pages are slow where they are touched first
                self._window = np.frombuffer(mmap.mmap(file, 0), np.uint8)
            os.pwrite(file, self._mark(NO_STEP, len(layout.table)) + layout.table, 0)
            with ThreadPoolExecutor(_WRITERS) as writers:
                copies = []
                for piece, array in zip(layout.own, arrays, strict=True):
                    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    window = self._window[piece.offset : piece.offset + len(data)]
                    for at in range(0, len(data), _AT_ONCE):
                        part = slice(at, at + _AT_ONCE)
                        copies.append(writers.submit(np.copyto, window[part], data[part]))
                for copy in copies:
                    copy.result()
            os.pwrite(file, self._mark(step, len(layout.table)), 0)

    def forget_uncommitted(self) -> None:
        """Clears the mark of a step that not every process has marked."""
        if self.copy.committed is None:
            with self._formed.memory.lent([self.rank]) as lent:
                for _, file in lent:
                    os.pwrite(file, self._mark(NO_STEP, 0), 0)

    def wait_committed(self, step: int, timeout_s: float) -> None:
        """Waits until every process has marked the step.

        Raises:
            PeerLostError: a process is gone.
            GroupNotReadyError: a process has not marked it in time.
        """
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while self.copy.committed != step:
            self._health.require_whole(None)
            if time.monotonic() > deadline:
                late = [r for r, m in enumerate(self.copy.marks()) if not m or m.step != step]
                raise GroupNotReadyError(
                    f"copy {self.name!r}: ranks {late} did not commit step {step} within "
                    f"{timeout_s:g} s",
                    group=self.name,
                    missing_ranks=late,
                )
            pause.wait(_POLL_S)


def make_copy(client: DaemonClient, spec: specs.GroupSpec, layout: Layout, here: int) -> HeldCopy:
    """Makes the copy's group with the other processes, on its earlier memory if that fits.

    Raises:
        GroupNotReadyError: some processes did not join in time.
        PoolExhaustedError: the daemon, or the user's quota, has no room.
    """
    make_group.check_shared(client, spec.name, layout.processes)
    claim = Claim((layout.processes.index(here),))
    held = HeldCopy(client, form(client, spec, claim, replace=True))
    live_groups.add(held)
    return held


@contextlib.contextmanager
def opened_copy(client: DaemonClient, name: str) -> Iterator[CopyMemory | None]:
    """Opens a copy of this job for reading, from any writer; None if the daemon has none."""

    def find(control: transport.ControlChannel) -> tuple[int, CopyMemory]:
        request = group_service_pb2.GetGroupRequest(name=name)
        group = control.call(control.groups.GetGroup, request).group
        spec = wire.group_spec_from_proto(group.spec)
        if spec.transport != specs.STATE:
            raise InvalidArgumentError(
                f"group {name!r} of this job holds no state; give the state another name",
                argument="name",
            )
        generation = int(group.generation)
        memory = fetch(client, control, name, generation)
        return generation, CopyMemory(name, spec.world_size, memory)

    try:
        generation, copy = client.run(find)
    except StaleHandleError:  # none, or one that is still forming, without memory
        yield None
        return
    try:
        yield copy
    finally:
        copy.memory.close()
        client.say_left(name, generation)
