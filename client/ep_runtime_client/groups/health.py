"""Whether a group can go on, as its board, the daemon's events and its own calls say."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from ep_runtime import board, errors
from ep_runtime.errors import PeerLostError, StaleHandleError
from ep_runtime.v1 import types_pb2
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.groups.formed import Formed
from ep_runtime_client.nccl import communicators


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


class GroupHealth:
    """Of one group in this process, from READY to its end.

    Attributes:
        closed: by this process.
        broken: a process of the group is gone.
    """

    def __init__(self, formed: Formed) -> None:
        self.closed = False
        self.broken = False
        self._formed = formed
        self._name = formed.spec.name
        self._gone: str | None = None  # why
        self._loss: Loss | None = None  # where a process of it is gone
        self._told: PeerLostError | None = None  # the same, as a call told it
        self._report: errors.EpRuntimeError | None = None  # what `take_report` has to give

    @property
    def is_gone(self) -> bool:
        """True where it was closed here, taken away by the daemon, or a process of it is gone."""
        if not self.closed and self._gone is None:
            poison = self._poison()  # is there before the daemon's event
            if poison is not None:
                self.broken = poison.reason is board.PoisonReason.PEER_LOST
                self._loss = Loss(poison.rank, poison.pid) if self.broken else None
                self._gone = f"{poison.reason.name.replace('_', ' ').lower()}, says its board"
        return self.closed or self._gone is not None

    def _poison(self) -> Any:
        return self._formed.memory.poison(self._formed.generation)

    def __str__(self) -> str:
        return "CLOSED" if self.closed else "BROKEN" if self.is_gone else "READY"

    def give_up(self, reason: str) -> None:
        """It ends here, unless it has ended: for that reason."""
        self._gone = self._gone or reason

    def changed(self, state: types_pb2.GroupState, reason: str, lost: Sequence[Any]) -> None:
        """The daemon says that the group changed; of one that is gone every layer is stale."""
        if state in (types_pb2.GROUP_STATE_BROKEN, types_pb2.GROUP_STATE_CLOSED):
            self.broken = state == types_pb2.GROUP_STATE_BROKEN
            poison = self._poison()
            if lost:
                self._loss = Loss(int(lost[0].world_rank), int(lost[0].pid), reason)
            elif poison is not None and poison.reason is board.PoisonReason.PEER_LOST:
                self._loss = Loss(poison.rank, poison.pid, reason)
            self._gone = self._gone or reason or "was taken away by the daemon"
            self._end_calls(lost)

    def _end_calls(self, lost: Sequence[Any]) -> None:
        """On a thread of its own: NCCL's abort waits for what runs on the GPU, and a collective of
        XLA's there may wait for the dead process without end. Whoever brings the news goes on."""
        threading.Thread(
            target=communicators.end_calls,
            args=(self._formed.native_group, self._name, self._gone, lost),
            name="ep-runtime-end",
            daemon=True,
        ).start()

    def _reported(self) -> errors.EpRuntimeError | None:
        """The first error of the group's calls that nobody has been told of; keeps it."""
        native_group = self._formed.native_group
        if self._report is None and not self.closed:
            text = live_groups.take_report(self._name)
            if text is None and native_group is not None:
                text = native_group.check()
            if text is not None:
                self._report = errors.parse(text) or errors.EpRuntimeError(text)
                if isinstance(self._report, PeerLostError):
                    self._told = self._report
        return self._report

    def take_report(self) -> errors.EpRuntimeError | None:
        """The same, for the one who tells it."""
        found, self._report = self._reported(), None
        return found

    def require_whole(self, layer: str | None) -> None:
        """Raises PeerLostError where a process of the group, still open here, is gone."""
        if self.is_gone and self._loss is not None and not self.closed:
            self._reported()
            if self._told is not None:  # a call's own words name op and layer
                raise PeerLostError(str(self._told), **self._told.fields)
            raise self._loss.error(self._name, self._formed.generation, layer)

    def require_open(self, layer: str | None) -> None:
        """Raises also where it was closed or reclaimed: StaleHandleError."""
        self.require_whole(layer)
        if self.is_gone:
            generation = self._formed.generation
            reason = "was closed" if self.closed else f"is gone: {self._gone}"
            subject = f"layer {layer!r}: " if layer is not None else ""
            raise StaleHandleError(
                f"{subject}group {self._name!r}, generation {generation}, {reason}; "
                "create it again",
                group=self._name,
                layer=layer,
                generation=generation,
            )
