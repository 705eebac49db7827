"""Makes NCCL communicators of a group from the daemon's unique ids.

Transport "nccl" makes them before the process reports that it is attached, so a READY group has
every rank's communicators. Groups with rows in windows get theirs later (`nccl/beside.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ep_runtime import errors, native, native_abi, nccl, specs
from ep_runtime.nccl import Ranks
from ep_runtime.v1 import group_service_pb2, nccl_service_pb2, types_pb2
from ep_runtime_client.daemons import transport

_log = logging.getLogger("ep_runtime")

# The daemon starts a process that loads libnccl from a cold disk.
IDS_TIMEOUT_S = 40.0
# How often to ask whether the group is still forming.
_CHECK_EVERY_S = 0.25
# A rank that closes the group has finished its last call. Calls that others began with it end soon
# after, or never.
LEFT_GRACE_S = 2.0
# All processes learn of a dead one within this time.
TOLD_S = 2.0
_WATCH_JOIN_S = 5.0
_OVER = (types_pb2.GROUP_STATE_BROKEN, types_pb2.GROUP_STATE_CLOSED)


@dataclasses.dataclass(frozen=True)
class GroupWithNccl(native.OpenGroup):
    """An open group with the NCCL communicators that carry its rows.

    Attributes:
        nccl: the communicators.
        ranks: ranks of this process in the communicators.
        watch: the thread that watches the communicators.
    """

    nccl: nccl.NcclGroup
    ranks: Ranks | None = None
    watch: Watch | None = None

    def add_layers(self, layers: Sequence[native_abi.LayerStruct]) -> None:
        """Like `native.OpenGroup`; also registers the layers for calls between nodes."""
        super().add_layers(layers)
        self.nccl.add_layers(layers)

    def check(self) -> str | None:
        """Checks as `native.OpenGroup`, then asks NCCL."""
        found = super().check()
        return self.nccl.check() if found is None else found

    def end(self, why: errors.EpRuntimeError) -> None:
        """Like `native.OpenGroup`; also ends NCCL's calls, which would wait for a lost rank."""
        self.nccl.abort(why)

    def restored(self, control: transport.ControlChannel) -> None:
        """As in `native.OpenGroup`; reports that the communicators are ready."""
        if self.ranks is not None and not self.nccl.over.is_set():
            report(control, self.ranks, version_of(nccl.library()), "")

    def close(self) -> None:
        """Closes the communicators first, because running NCCL calls need the mapped windows."""
        self.nccl.close()
        if self.watch is not None:
            self.watch.join()
        super().close()


class Watch:
    """A thread that watches a group's communicators until it closes.

    Args:
        made: the communicators.
        name: name of the group.
        left: returns ranks needed by calls here whose processes have closed the group.
        report: tells the daemon about an error that no dead process explains.
    """

    def __init__(
        self,
        made: nccl.NcclGroup,
        name: str,
        left: Callable[[], Iterable[int]],
        report: Callable[[str], None],
    ) -> None:
        self._made, self._name = made, name
        self._left, self._report = left, report
        self._known: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="ep-runtime-nccl", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits, for a bounded time, until the thread ends, which it does when the group closes."""
        if self._thread is not threading.current_thread():
            self._thread.join(_WATCH_JOIN_S)

    def _run(self) -> None:
        until_s: float | None = None
        while (failure := self._made.await_failure(_CHECK_EVERY_S)) is not None:
            if failure:
                # The daemon's report of a dead process has more detail, so wait for it first.
                if not self._known and not self._made.over.wait(TOLD_S):
                    self._report(failure)
                return
            why = self._left_error()
            if why is not None and until_s is None:
                until_s = time.monotonic() + LEFT_GRACE_S
            if why is not None and until_s is not None and time.monotonic() > until_s:
                self._made.abort(why)
                return

    def _left_error(self) -> errors.PeerLostError | None:
        """Returns the error of calls with ranks that left; None if none has left."""
        why = None
        for rank in sorted({*self._left(), *self._known}):
            why = errors.PeerLostError(
                f"the process of rank {rank} closed group {self._name!r}",
                group=self._name,
                rank=rank,
            )
            if rank not in self._known:
                self._known.add(rank)
                self._made.rank_left(rank, why)
        return why


def make(
    control: transport.ControlChannel,
    library: nccl.NcclLibrary,
    ranks: nccl.Ranks,
    budget_s: float,
) -> nccl.NcclGroup:
    """Makes communicators of this process's ranks, joined with the others; reports to the daemon.

    Raises:
        RuntimeUnavailableError: no libnccl here or at the daemon.
        StaleHandleError: the group is gone, or another process failed with these ids.
        PeerLostError: a process of the group ended meanwhile.
        OpTimeoutError: the others did not join within the budget.
    """
    version = ""
    try:
        version = version_of(library)
        epoch, ids = unique_ids(control, ranks)
        group = library.make_group(ranks, ids)
        join(control, ranks, epoch, group, budget_s)
    except errors.EpRuntimeError as error:
        report(control, ranks, version, str(error))
        raise
    report(control, ranks, version, "")
    _log.info("group %r: NCCL %s communicators of %d ranks", ranks.name, version, ranks.ep_size)
    return group


def unique_ids(control: transport.ControlChannel, ranks: nccl.Ranks) -> tuple[int, list[bytes]]:
    """Returns (epoch of the group, one id per EP domain); the daemon makes ids when first asked.

    Raises:
        As `make`, except OpTimeoutError.
    """
    epoch = int(_group(control, ranks).epoch)
    found = control.call(
        control.nccl.GetUniqueIds,
        nccl_service_pb2.GetUniqueIdsRequest(name=ranks.name, generation=ranks.generation),
        timeout_s=IDS_TIMEOUT_S,
    )
    return epoch, list(found.unique_ids)


def join(
    control: transport.ControlChannel,
    ranks: nccl.Ranks,
    epoch: int,
    group: nccl.NcclGroup,
    budget_s: float,
) -> None:
    """Runs `group.init`; ends it early if the daemon reports that the group is over.

    Raises:
        As `make`.
    """
    raised: list[errors.EpRuntimeError] = []

    def init() -> None:
        try:
            group.init(budget_s)
        except errors.EpRuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=init, name="ep-runtime-nccl-init", daemon=True)
    thread.start()
    deadline = time.monotonic() + budget_s + nccl.CLOSE_TIMEOUT_S
    try:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(_CHECK_EVERY_S)
            over = _over(control, ranks, epoch) if thread.is_alive() else None
            if over is not None:
                group.abort(over)
                thread.join(nccl.CLOSE_TIMEOUT_S)
        if thread.is_alive():
            raise errors.EpRuntimeError(f"NCCL did not finish making group {ranks.name!r}")
        if raised:
            raise raised[0]
    except BaseException:
        group.close()
        raise


def _group(control: transport.ControlChannel, ranks: nccl.Ranks) -> types_pb2.Group:
    request = group_service_pb2.GetGroupRequest(name=ranks.name)
    return control.call(control.groups.GetGroup, request).group


def _over(
    control: transport.ControlChannel, ranks: nccl.Ranks, epoch: int
) -> errors.EpRuntimeError | None:
    """Returns why this generation can no longer become READY on these nodes; None if it can."""
    try:
        found = _group(control, ranks)
    except errors.RuntimeUnavailableError:
        return None  # processes form without the daemon; the next check asks again
    except errors.EpRuntimeError as error:
        return error
    same = found.generation == ranks.generation and found.epoch == epoch
    if same and found.state not in _OVER:
        return None
    return errors.PeerLostError(
        f"group {ranks.name!r}, generation {ranks.generation}, ended while its NCCL communicators "
        "were made",
        group=ranks.name,
    )


def version_of(library: nccl.NcclLibrary) -> str:
    """Returns a version such as "2.28.9". Raises the errors of `nccl.NcclLibrary.version`."""
    return nccl.version_text(library.version())


def report(control: transport.ControlChannel, ranks: nccl.Ranks, version: str, error: str) -> None:
    """Reports the communicators to the daemon; an empty `error` means that they are ready."""
    request = nccl_service_pb2.ReportCommunicatorsRequest(
        name=ranks.name, generation=ranks.generation, nccl_version=version, error=error
    )
    try:
        control.call(control.nccl.ReportCommunicators, request)
    except errors.EpRuntimeError as failed:  # a group that has ended needs no report
        _log.debug("group %r: NCCL not reported: %s", ranks.name, failed)


def ranks_of(
    spec: specs.GroupSpec, generation: int, world_ranks: Sequence[int], ordinals: Sequence[int]
) -> nccl.Ranks:
    """Returns the ranks and devices that this process adds to a group's communicators."""
    return nccl.Ranks(
        name=spec.name,
        generation=generation,
        ep_size=spec.ep_size,
        world_ranks=tuple(world_ranks),
        ordinals=tuple(ordinals),
        op_timeout_s=spec.op_timeout_s,
    )
