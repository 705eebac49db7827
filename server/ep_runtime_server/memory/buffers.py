"""A buffer of a window set: the board or one window."""

from __future__ import annotations

import dataclasses

from ep_runtime_server.memory.devices import Allocation


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
