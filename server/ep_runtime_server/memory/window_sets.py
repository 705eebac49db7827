"""The memory of one group: its buffers and board, and the sessions that may use them."""

from __future__ import annotations

import dataclasses
import enum
import mmap
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ep_runtime import board, board_abi
from ep_runtime.allowed_names import shown
from ep_runtime.specs import GroupSpec
from ep_runtime_server.callers.credentials import GivenOrder
from ep_runtime_server.memory.devices import Allocation, Device


class WindowState(enum.Enum):
    LEASED = "leased"
    RETAINED = "retained"
    QUARANTINED = "quarantined"
    RELEASING = "releasing"


@dataclasses.dataclass
class Buffer:
    """One allocation of a window set; world_rank -1 is the board.

    After a restart `allocation` is None until a descriptor comes back. `identity` is None too
    if the journal lacks it.
    """

    buffer_id: str
    device: str
    world_rank: int
    size_bytes: int
    identity: tuple[int, int] | None = None
    allocation: Allocation | None = None

    @property
    def counted(self) -> bool:
        """Returns whether the buffer counts against limits; one that is only reported does not."""
        return self.allocation is not None or self.identity is not None


@dataclasses.dataclass(frozen=True)
class Owner:
    """The owner of memory: a group name within (uid, job)."""

    uid: int
    job: str
    name: str

    def __str__(self) -> str:
        return f"{shown(self.name)} (uid {self.uid}, job {shown(self.job)})"

    @property
    def fields(self) -> dict[str, Any]:
        """Returns the fields of an event about the group."""
        return {"group": self.name, "job": self.job, "uid": self.uid}

    @property
    def path(self) -> str:
        """Returns the group's name in a cluster's journals."""
        return f"{self.uid}/{self.job}/{self.name}"


def buffer_label(owner: Owner, generation: int, world_rank: int) -> str:
    return f"{owner.name}@{generation}/{'board' if world_rank < 0 else world_rank}"


class WindowSet:
    """The memory of one group on this node, under one generation at a time.

    Attributes:
        layout: layout of the board, with the group's spec and the world ranks of this node.
        set_id: the set's unique name in the journal.
        on_change: called after every change that a restarted daemon must know.
    """

    def __init__(
        self, owner: Owner, layout: board.BoardLayout, generation: int, created_s: float
    ) -> None:
        self.owner = owner
        self.layout = layout
        self.generation = generation
        self.created_s = created_s
        self.state = WindowState.LEASED
        self.buffers: list[Buffer] = []
        self.board: mmap.mmap | None = None
        self.holders: set[str] = set()
        self.set_id = f"w-{secrets.token_hex(6)}"
        self.on_change: Callable[[WindowSet], None] = lambda windows: None
        self._poison: tuple[board_abi.PoisonReason, int, GivenOrder | None] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Returns the fields of an event about the set."""
        return {**self.owner.fields, "generation": self.generation}

    @property
    def spec(self) -> GroupSpec:
        return self.layout.spec

    @property
    def wanted_ranks(self) -> list[int]:
        """Returns world ranks (-1 for the board) whose descriptors have not come back yet."""
        return [buffer.world_rank for buffer in self.buffers if buffer.allocation is None]

    def serves(self, spec: GroupSpec, ranks: Sequence[int]) -> bool:
        """Returns whether the set is the memory of these world ranks under this spec."""
        return self.spec == spec and self.layout.ranks == tuple(ranks)

    def is_on(self, uuids: Mapping[int, str]) -> bool:
        """Returns whether each window is on the GPU that its rank uses now."""
        return all(b.device == uuids.get(b.world_rank, b.device) for b in self.buffers)

    def assume(self, uuids: Mapping[int, str]) -> None:
        """Sets the GPUs of missing windows, as a process reports them."""
        for buffer in self.buffers:
            if buffer.allocation is None:
                buffer.device = uuids.get(buffer.world_rank, buffer.device)

    def hold(self, session_id: str) -> None:
        """Makes a session a holder, because it has or will get descriptors."""
        if session_id not in self.holders:
            self.holders.add(session_id)
            self.on_change(self)

    def adopt(self, found: dict[int, Allocation], mapped: mmap.mmap | None) -> None:
        """Adds checked allocations by world rank, and the board's mapping if present."""
        for buffer in self.buffers:
            if buffer.world_rank in found:
                buffer.allocation = found[buffer.world_rank]
                buffer.identity = buffer.allocation.identity
        if mapped is not None:
            self.board = mapped
            if self._poison is not None:
                self.poison(*self._poison)
        self.on_change(self)

    @property
    def size_bytes(self) -> int:
        return sum(buffer.size_bytes for buffer in self.buffers)

    @property
    def num_fds(self) -> int:
        """Returns the descriptors that the daemon holds or awaits, two of them for the board."""
        return len(self.buffers) + any(buffer.world_rank < 0 for buffer in self.buffers)

    def bytes_on(self, device: str) -> int:
        return sum(b.size_bytes for b in self.buffers if b.device == device and b.counted)

    def poison(
        self, reason: board_abi.PoisonReason, rank: int = -1, by: GivenOrder | None = None
    ) -> None:
        """Poisons the board, which ends the waits and calls of this generation.

        If the board has not come back yet, it is poisoned as soon as it has.
        """
        if self.board is None:
            self._poison = self._poison or (reason, rank, by)
        else:
            whom = board.NOBODY
            if by is not None:
                whom = board.By(by.caller.uid, by.caller.pid, by.note)
            board.poison(self.board, self.generation, reason, rank, whom)

    def allocate(self, parts: Sequence[tuple[int, Device, int]]) -> None:
        """Allocates each of the `parts`, as WindowPool lists them. Blocks.

        After an error, `buffers` has the parts that were allocated.
        """
        for rank, device, size_bytes in parts:
            allocation = device.allocate(f"{self.owner.name}/{rank}", size_bytes)
            label, identity = buffer_label(self.owner, self.generation, rank), allocation.identity
            self.buffers.append(Buffer(label, device.name, rank, size_bytes, identity, allocation))
            if rank < 0:
                self.board = allocation.map()
        assert self.board is not None
        board.format_board(self.board, self.layout, self.generation)

    def format_again(self, generation: int) -> None:
        """Formats the board for a new generation, if the set has no holders. Blocks."""
        assert not self.holders
        assert self.board is not None
        board.format_board(self.board, self.layout, generation)
        self.generation = generation
        self._poison = None

    def free(self) -> None:
        """Frees all buffers. Blocks for about 0.1 s per GiB.

        Raises ExceptionGroup if some cannot be freed; these stay in `buffers` for another try.
        """
        faults: dict[str, Exception] = {}
        for buffer in self.buffers:
            try:
                if buffer.world_rank < 0 and self.board is not None:
                    self.board.close()  # raises BufferError while a reader uses the board
                    self.board = None
                if buffer.allocation is not None:
                    buffer.allocation.free()
            except Exception as error:  # noqa: BLE001 - free the others too
                faults[buffer.buffer_id] = error
        self.buffers = [buffer for buffer in self.buffers if buffer.buffer_id in faults]
        if faults:
            said = "; ".join(f"{name}: {type(e).__name__}: {e}" for name, e in faults.items())
            raise ExceptionGroup(said, [*faults.values()])
