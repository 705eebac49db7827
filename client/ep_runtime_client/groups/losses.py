"""A process of a group that is gone, as the others say it."""

from __future__ import annotations

import dataclasses

from ep_runtime.errors import PeerLostError


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is known of it.

    Attributes:
        rank: a world rank of the process; -1 where ranks live and do not reach each other.
        pid: of the process; 0 where it is not known.
        reason: what the daemon said; "" where the board alone says so.
    """

    rank: int
    pid: int
    reason: str = ""

    def error(self, group: str, generation: int, layer: str | None = None) -> PeerLostError:
        """The error that calls end with, in a call of that layer or beside all calls."""
        who = "a peer" if self.rank < 0 else f"the process of rank {self.rank}"
        if self.pid > 0:
            who = f"process {self.pid} of rank {self.rank}"
        subject = f"layer {layer!r}: " if layer is not None else ""
        why = f": {self.reason}" if self.reason else ""
        return PeerLostError(
            f"{subject}{who} in group {group!r} generation {generation} is gone{why}",
            rank=self.rank,
            process=self.pid,
            layer=layer,
            group=group,
            generation=generation,
        )
