"""Buffers of a group's memory at the daemon."""

from __future__ import annotations

import dataclasses

from ep_runtime_server.memory.devices import Allocation


@dataclasses.dataclass
class Buffer:
    """One allocation; world_rank -1 is the board.

    After a restart `allocation` is None until a descriptor of it came back; `identity` is None
    too if nobody remembers it.
    """

    buffer_id: str
    device: str
    world_rank: int
    size_bytes: int
    identity: tuple[int, int] | None = None
    allocation: Allocation | None = None

    @property
    def counted(self) -> bool:
        """Whether it counts against the limit; memory that a process only reports does not."""
        return self.allocation is not None or self.identity is not None
