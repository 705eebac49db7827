"""Makes NCCL communicators in the background for groups whose rows go through windows.

No call of such a group needs them, so `create_group` returns before they are ready, the group
continues if none can be made, and `ep-runtime groups -o wide` shows their state. A thread asks the
daemon for unique ids and joins the other processes' threads. Only `close` waits for the thread, for
a bounded time: the thread holds no lock while it works, and ends as soon as the group does.

It starts late, after a first step or while a large program compiles, because NCCL then loads its
kernels, and the driver delays launches meanwhile. Until NCCL is called, it runs nothing on a GPU.
An NCCL kernel that waits for its peers next to a step's kernel that waits for its own peers may
wait forever if the driver delays a launch of either.

In a process with several of the group's ranks NCCL loads its kernels before `create_group` returns
(`load_kernels`). Otherwise there is a deadlock: the driver, which loads a kernel on one device,
waits for the step's kernel there; that kernel waits for its peer on another device; and the peer's
launch waits for the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ep_runtime import native, nccl
from ep_runtime.errors import EpRuntimeError, OpTimeoutError, StaleHandleError
from ep_runtime_client.daemons import transport
from ep_runtime_client.nccl import communicators

_log = logging.getLogger("ep_runtime")

Run = Callable[[Callable[[transport.ControlChannel], Any]], Any]

# Seconds after the group is READY. The daemon needs half a second for the ids, and no GPU.
IDS_AFTER_S = 1.0
JOIN_AFTER_S = 2.0
# Budget for all processes to arrive and for NCCL to join them.
BUDGET_S = 60.0
# Budget of a tiny call with which NCCL loads its kernels before other work runs.
LOAD_BUDGET_S = 30.0
# A channel has megabytes of GPU buffers for each peer, from the first NCCL call on.
CHANNELS = 1
# Longest wait of a close for the thread; NCCL gives up within milliseconds.
_END_S = 10.0


_loaded: set[int] = set()  # CUDA ordinals of devices with NCCL's kernels loaded
_loading = threading.Lock()


def load_kernels(library: nccl.NcclLibrary, ordinals: Sequence[int]) -> None:
    """Makes NCCL load its kernels on devices of this process that lack them.

    Does nothing with one device: no kernel there waits for another launch of this process.

    Raises:
        EpRuntimeError: there is no NCCL, or it did not finish in time.
    """
    with _loading:
        wanted = sorted(set(ordinals) - _loaded)
        if len(set(ordinals)) < 2 or not wanted:
            return
        library.load_kernels(wanted, LOAD_BUDGET_S)
        _loaded.update(wanted)


@dataclasses.dataclass(frozen=True)
class GroupBesideNccl(native.OpenGroup):
    """An open group on windows, for which `beside` makes NCCL communicators."""

    beside: Beside

    def end(self, why: EpRuntimeError) -> None:
        """Like `native.OpenGroup`."""
        self.beside.end(why)

    def restored(self, control: transport.ControlChannel) -> None:
        """Like `native.OpenGroup`."""
        self.beside.tell(control)

    def stop_making(self) -> None:
        """Like `native.OpenGroup`."""
        self.beside.stop_making()

    def close(self) -> None:
        """Closes the communicators, then the group."""
        self.beside.close()
        super().close()


class Beside:
    """The communicators of one group, and the thread that makes and watches them.

    Args:
        run: runs work with the daemon's RPCs, and again if the daemon restarted (`Session.run`).
        ranks: ranks of this process.
    """

    def __init__(self, run: Run, ranks: nccl.Ranks) -> None:
        self._rpcs = run
        self._ranks = dataclasses.replace(ranks, carries_rows=False, max_channels=CHANNELS)
        self._over = threading.Event()  # the group is over: do not make or report any more
        self._settled = threading.Event()  # ready, or failed
        self._lock = threading.Lock()
        self._made: nccl.NcclGroup | None = None
        self._ready = False
        self._error: EpRuntimeError | None = None
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ep-runtime-nccl", daemon=True)
        self._thread.start()

    @property
    def settled(self) -> bool:
        """Whether the communicators are ready or have failed."""
        return self._settled.is_set()

    def await_ready(self, timeout_s: float) -> nccl.NcclGroup:
        """Waits for the communicators.

        Raises:
            OpTimeoutError: they are not ready after `timeout_s`.
            EpRuntimeError: why there are none; StaleHandleError if the group was closed.
        """
        name = self._ranks.name
        if not self._settled.wait(timeout_s):
            raise OpTimeoutError(
                f"group {name!r} has no NCCL communicators after {timeout_s:g} s", group=name
            )
        with self._lock:
            if self._ready and self._made is not None and not self._over.is_set():
                return self._made
        raise self._error or StaleHandleError(f"group {name!r} was closed", group=name)

    def _run(self) -> None:
        try:
            made = self._make()
            self._settled.set()
            if made is not None:
                self._watch(made)
        except EpRuntimeError as error:
            self._failed(error)
        finally:
            self._settled.set()
            if self._made is not None:
                self._made.close()

    def _make(self) -> nccl.NcclGroup | None:
        """Makes the communicators; returns None if the group ended before."""
        if self._paused(IDS_AFTER_S):
            return None
        library, ranks = nccl.library(), self._ranks
        epoch, ids = self._rpcs(lambda control: communicators.unique_ids(control, ranks))
        if self._paused(JOIN_AFTER_S):
            return None
        made = library.make_group(ranks, ids)
        with self._lock:
            self._made = made
        if self._over.is_set():
            return None
        control = self._rpcs(lambda control: control)
        communicators.join(control, ranks, epoch, made, BUDGET_S)
        with self._lock:
            self._ready = not self._over.is_set()
        if not self._ready:
            return None
        self._rpcs(self.tell)
        _log.info("group %r has NCCL communicators in addition to its windows", ranks.name)
        return made

    def _paused(self, until_s: float) -> bool:
        """Waits until so long after the group was READY; returns whether the group is over."""
        return self._over.wait(max(0.0, self._started_s + until_s - time.monotonic()))

    def _watch(self, made: nccl.NcclGroup) -> None:
        """Watches until the group closes or a communicator fails; a lost process is reported
        elsewhere."""
        failure = made.await_failure(float("inf"))
        if failure and not self._over.wait(communicators.TOLD_S):
            raise EpRuntimeError(failure)

    def _failed(self, error: EpRuntimeError) -> None:
        with self._lock:
            self._ready, self._error = False, self._error or error
        if self._over.is_set():
            return
        _log.warning("group %r goes on without NCCL communicators: %s", self._ranks.name, error)
        try:
            self._rpcs(self.tell)
        except EpRuntimeError as failed:
            _log.debug("group %r: NCCL not reported: %s", self._ranks.name, failed)

    def tell(self, control: transport.ControlChannel) -> None:
        """Tells the daemon whether the communicators are ready or failed; nothing before that."""
        with self._lock:
            known = self._ready or self._error is not None
            error = str(self._error or "")
        if not known or self._over.is_set():
            return
        version = ""
        with contextlib.suppress(EpRuntimeError):  # a missing library is the reported error
            version = communicators.version_of(nccl.library())
        communicators.report(control, self._ranks, version, error)

    def end(self, why: EpRuntimeError) -> None:
        """Ends NCCL's running calls with `why`, because the group broke."""
        self._over.set()
        with self._lock:
            made, self._error = self._made, self._error or why
        if made is not None:
            made.abort(why)

    def stop_making(self) -> None:
        """Stops before the process ends, because NCCL must not unload while its threads run."""
        with self._lock:
            ready = self._ready
        if not ready:
            self.end(_closed(self._ranks.name))
            self._join()

    def close(self) -> None:
        """Closes the communicators; aborts them if they are still being made."""
        with self._lock:
            ready, made = self._ready, self._made
            self._over.set()
        if ready and made is not None:
            made.close()
        else:
            self.end(_closed(self._ranks.name))
        self._join()

    def _join(self) -> None:
        """Waits for the thread if it is in NCCL, which returns; not if it waits for the daemon."""
        if self._made is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)


def _closed(name: str) -> EpRuntimeError:
    return StaleHandleError(f"group {name!r} was closed", group=name)
