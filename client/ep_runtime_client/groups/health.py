"""Decides from the board, the daemon's events and its own calls whether a group can continue."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from ep_runtime import board, board_abi, errors
from ep_runtime.v1 import types_pb2
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.groups.formed import Formed

_OVER = (types_pb2.GROUP_STATE_BROKEN, types_pb2.GROUP_STATE_CLOSED)


@dataclasses.dataclass(frozen=True)
class End:
    """Why a group ended that this process has not closed.

    Attributes:
        error: the error that calls raise.
        patience_s: if the group's processes live and may form it anew: the least time for a call in
            an XLA collective to wait for one of them.
    """

    error: errors.EpRuntimeError
    patience_s: float = 0.0


class GroupHealth:
    """The health of one group in this process, from READY to its end.

    Attributes:
        closed: whether this process closed it.
        broken: whether a process of the group is gone or fenced, while others continue.
    """

    def __init__(self, formed: Formed, job: str) -> None:
        self.closed = False
        self.broken = False
        self._formed = formed
        self._job = job
        self._name = formed.spec.name
        self._fields = {"group": self._name, "generation": formed.generation}
        self._end: End | None = None
        self._lapsed: str | None = None  # why the daemon lost the group, whose calls continue
        self._told: errors.EpRuntimeError | None = None  # the end, as a call reported it
        self._report: errors.EpRuntimeError | None = None  # the next result of `take_report`

    @property
    def is_gone(self) -> bool:
        """Whether the group was closed here or reclaimed, or lost a process."""
        return self.closed or self._lapsed is not None or self.end is not None

    @property
    def end(self) -> End | None:
        """Returns why the group's calls end; None if they continue or this process closed it."""
        if not self.closed and self._end is None:
            # The board shows the end before the daemon's event arrives.
            poison = self._formed.memory.poison(self._formed.generation)
            if poison is not None:
                self._end = self._ended(poison, "", ())
                self.broken = isinstance(self._end.error, errors.PeerLostError)
        return self._end

    def __str__(self) -> str:
        return "CLOSED" if self.closed else "BROKEN" if self.is_gone else "READY"

    def give_up(self, reason: str) -> None:
        """Notes why the daemon no longer knows the group, although its calls continue."""
        self._lapsed = self._lapsed or reason

    def changed(self, state: types_pb2.GroupState, reason: str, lost: Sequence[Any]) -> None:
        """Handles the daemon's event that the group changed; every layer is stale if it is over."""
        if state not in _OVER:
            return
        self.broken = state == types_pb2.GROUP_STATE_BROKEN
        end = self._ended(self._formed.memory.poison(self._formed.generation), reason, lost)
        if self._end is None or type(self._end.error) is type(
            end.error
        ):  # the daemon's text has more detail
            self._end = end
        self._end_calls(self._end)

    def _ended(self, poison: board.Poison | None, reason: str, lost: Sequence[Any]) -> End:
        """Makes the end as the board records it, with the daemon's reason and lost members."""
        why = poison.reason if poison is not None else board_abi.PoisonReason.NONE
        if poison is not None and why is board_abi.PoisonReason.FENCED:
            return self._fenced(poison)
        if lost:
            return self._lost(int(lost[0].world_rank), int(lost[0].pid), reason)
        if poison is not None and why is board_abi.PoisonReason.PEER_LOST:
            return self._lost(poison.rank, poison.pid, reason)
        if poison is not None and why is board_abi.PoisonReason.RECLAIMED:
            return self._stale(f"was reclaimed {poison.by.told('ep-runtime reclaim')}", 0.0)
        if poison is not None and poison.by != board.NOBODY:
            reason = f"was replaced {poison.by.told('create_group(replace=True)')}"
        if not reason.startswith("was "):
            reason = f"is gone: {reason or 'its board says so'}"
        return self._stale(reason, self._formed.spec.op_timeout_s)

    def _stale(self, what: str, patience_s: float) -> End:
        text = f"group {self._name!r}, generation {self._formed.generation}, {what}"
        return End(errors.StaleHandleError(f"{text}; create it again", **self._fields), patience_s)

    def _lost(self, rank: int, pid: int, reason: str) -> End:
        """Makes the end by a lost process: rank -1 if only the link is lost, pid 0 if unknown."""
        who = "a peer" if rank < 0 else f"the process of rank {rank}"
        if pid > 0:
            who = f"process {pid} of rank {rank}"
        text = f"{who} in group {self._name!r} generation {self._formed.generation} is gone"
        reason = reason.removeprefix(f"process {pid}: ")
        why = f": {reason}" if reason else ""
        return End(errors.PeerLostError(text + why, rank=rank, process=pid, **self._fields))

    def _fenced(self, poison: board.Poison) -> End:
        group = f"group {self._name!r} generation {self._formed.generation}"
        fenced = f"was fenced {poison.by.told('ep-runtime fence')}"
        if poison.rank < 0 or poison.rank in self._formed.ranks:
            text = f"{group}: its session {fenced}; connect again and create the group anew"
            return End(errors.SessionFencedError(text, **self._fields))
        process = f"rank {poison.rank} (pid {poison.pid}, job {self._job!r})"
        text = f"the session of {process} {fenced}; {group} is broken"
        return End(errors.PeerLostError(text, rank=poison.rank, process=poison.pid, **self._fields))

    def _end_calls(self, end: End) -> None:
        """Ends calls on a separate thread, because NCCL's abort may wait for an XLA collective that
        never ends."""
        native_group = self._formed.native_group
        if native_group is not None:
            threading.Thread(
                target=native_group.end, args=(end.error,), name="ep-runtime-end", daemon=True
            ).start()

    def _reported(self) -> errors.EpRuntimeError | None:
        """Returns the first unreported error of the group's calls, and keeps it."""
        native_group = self._formed.native_group
        if self._report is None and not self.closed:
            text = live_groups.take_report(self._name)
            if text is None and native_group is not None:
                text = native_group.check()
            if text is not None:
                self._report = errors.parse(text) or errors.EpRuntimeError(text)
                end = self.end
                if end is not None and _is_of(self._report, end.error):
                    self._told = self._report
        return self._report

    def take_report(self) -> errors.EpRuntimeError | None:
        """Returns the first unreported error of the group's calls, and forgets it."""
        found, self._report = self._reported(), None
        return found

    def require_whole(self, layer: str | None) -> None:
        """Raises the error that ends the calls of a group still open here, if any."""
        end = self.end
        if end is not None and not self.closed:
            self._reported()
            if self._told is not None:  # a call's own words name op and layer
                self._told.raise_again()
            end.error.raise_again(layer)

    def require_open(self, layer: str | None) -> None:
        """Like `require_whole`; also raises StaleHandleError if closed or unknown to the daemon."""
        self.require_whole(layer)
        if self.closed or self._lapsed is not None:
            why = "was closed" if self.closed else f"is gone: {self._lapsed}"
            self._stale(why, 0.0).error.raise_again(layer)


def _is_of(call: errors.EpRuntimeError, end: errors.EpRuntimeError) -> bool:
    """Whether that end of the group made the call fail. A call that finds a replaced group closed
    blames the process, because that process closes before it reports the order."""
    return type(call) is type(end) and ("rank" in end.fields or "rank" not in call.fields)
