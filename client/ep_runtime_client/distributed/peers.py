"""Ends processes of a job that live, but keep all others waiting.

A process that waits says so in the coordination service, and again once it has waited for
`stuck_after_s`. If all that wait in one meeting have said both, those that are missing are stuck.
They are fenced and killed through the daemon, and the coordination service counts them as dead. The
same is done with processes that the coordination service has dropped, because their heartbeats have
stopped.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from ep_runtime import errors
from ep_runtime_client.base import jax_internals
from ep_runtime_client.daemons import coordination
from ep_runtime_client.daemons.departures import departures
from ep_runtime_client.sessions import open_session

_log = logging.getLogger("ep_runtime")

# Keys in the coordination service, each followed by the number of a process.
_SESSIONS = "ep_runtime/sessions/"
_WAITS = "ep_runtime/waits/"
_LOOK_S = 0.5
# A process reports that it waits after this time, long before it reports that it has waited too
# long, because processes begin to wait at different times. Most waits are shorter.
_SAY_S = 10.0
_WAITS_YET, _TOO_LONG = "yet", "too-long"
_ANSWER_S = 5.0


class For(enum.Enum):
    """Names what a process waits for."""

    RESULTS = "results"  # of a step's programs
    OTHERS = "others"  # at the end of a step
    STEPS = "steps"  # other processes' steps: this one has no device in the mesh


class _Wait(NamedTuple):
    """A wait of this process: what for, in which meeting of which processes, and since when."""

    what: For
    meeting: str
    members: Collection[int]
    since_s: float

    def told(self, now_s: float, stuck_after_s: float) -> str | None:
        """Returns the text that tells the other processes of this wait; None while it is short."""
        waited_s = now_s - self.since_s
        if waited_s < min(stuck_after_s / 4, _SAY_S):
            return None
        state = _WAITS_YET if waited_s < stuck_after_s else _TOO_LONG
        return f"{self.meeting} {self.what.value} {state}"


class Peers:
    """The other processes of the job, as this one sees them.

    Attributes:
        generation: number of the loop's generation; 0 without a loop.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._sessions: dict[int, list[str]] = {}
        self._wait: _Wait | None = None
        self._lock = threading.Lock()
        self._passed: set[int] = set()

    def follow(self, address: str) -> None:
        """Begins to act on departures that the coordination service tells.

        Raises:
            RuntimeError: it does not tell them.
        """
        told = jax_internals.watch_departures(address)
        next(told)
        threading.Thread(
            target=self._follow, args=(told,), name="ep-runtime-departures", daemon=True
        ).start()

    def _follow(self, told: Iterator[dict[int, bool]]) -> None:
        try:
            for left in told:
                for process in left:
                    self._end_waits(process)
                dropped = [process for process, was_dropped in left.items() if was_dropped]
                for text in self._end(dropped, "its heartbeats have stopped"):
                    _log.error("heartbeats of a process of the job have stopped: %s", text)
        except RuntimeError as error:  # JAX ends this process if the service is gone
            _log.info("this process no longer learns when other processes die: %s", error)

    def _end_waits(self, process: int) -> None:
        """Ends waits for a dead process: groups that form, and gloo's collectives. JAX's abort ends
        NCCL's."""
        with self._lock:
            if process in self._passed:  # later generations do not use it
                return
            departures.add(process)
            if process == 0:
                jax_internals.tell_topology()
            if jax_internals.backend_started() and jax.default_backend() == "cpu":
                coordination.cut_accepted()

    def passed(self, processes: Iterable[int]) -> None:
        """Notes that all living processes have met without these: no collective waits for them."""
        with self._lock:
            self._passed = set(processes)

    def publish(self) -> None:
        """Tells the others this process' sessions; `learn` after the next meeting."""
        value = " ".join(open_session.sessions.ids())
        service().key_value_set(f"{_SESSIONS}{_ours()}", value, True)

    def learn(self) -> None:
        """Reads the sessions that all processes have published."""
        self._sessions = {process: told.split() for process, told in _read(_SESSIONS).items()}

    def _end(self, processes: Iterable[int], reason: str) -> list[str]:
        """Makes the daemon fence processes and kill those that it may. Returns a text for each."""
        said: list[str] = []
        for process in processes:
            for session_id in self._sessions.get(process, ()) if process != _ours() else ():
                try:
                    said += open_session.sessions.end_peer(session_id, reason)
                except errors.EpRuntimeError as error:
                    _log.warning("process %d of the job is not fenced: %s", process, error)
        return said

    @contextlib.contextmanager
    def waiting(self, what: For, meeting: str, members: Collection[int]) -> Iterator[None]:
        """Reports that this process waits, as long as the context is open."""
        self._wait = _Wait(what, meeting, members, time.monotonic())
        try:
            yield
        finally:
            self._wait = None

    @contextlib.contextmanager
    def watched(self, stuck_after_s: float | None) -> Iterator[None]:
        """Ends processes for which all others have waited so long, while the context is open.

        None ends nobody.
        """
        over = threading.Event()
        if stuck_after_s is not None:
            threading.Thread(
                target=self._watch, args=(stuck_after_s, over), name="ep-runtime-stuck", daemon=True
            ).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, stuck_after_s: float, over: threading.Event) -> None:
        said = None
        while not over.wait(_LOOK_S):
            wait = self._wait
            told = wait.told(time.monotonic(), stuck_after_s) if wait is not None else None
            try:
                if told is None and said is not None:
                    service().key_value_delete(f"{_WAITS}{_ours()}")
                elif told is not None and told != said:
                    service().key_value_set(f"{_WAITS}{_ours()}", told, True)
                said = told
                if wait is not None and told is not None and told.endswith(_TOO_LONG):
                    self._look(wait, stuck_after_s)
            except RuntimeError as error:  # JAX ends this process if the service is gone
                _log.info("looking for stuck processes: %s", error)

    def _look(self, ours: _Wait, stuck_after_s: float) -> None:
        read = {p: told.split() for p, told in _read(_WAITS).items() if p in ours.members}
        here = {
            p: (For(what), state) for p, (met, what, state) in read.items() if met == ours.meeting
        }
        if any(state == _WAITS_YET for _, state in here.values()):
            return
        waits = {process: what for process, (what, _) in here.items()}
        stuck = stuck_of(waits, ours.members)
        if waits.keys() == {*ours.members} and For.RESULTS not in waits.values():
            # All members wait, so a missing process is one that comes back.
            stuck = sorted({*range(jax_internals.distributed().num_processes)} - waits.keys())
        if not stuck or self._wait is not ours:
            return
        reason = f"all others of the job have waited for it for {stuck_after_s:g} s"
        said = self._end(stuck, reason)
        _log.error("%s", "; ".join([f"processes {stuck} of the job are stuck: {reason}", *said]))
        if _ours() == min(waits.keys() - {*stuck}):
            address = jax_internals.distributed().coordinator_address
            for process in stuck:
                with contextlib.suppress(RuntimeError):  # it is gone already
                    jax_internals.report_death(address, process, _ANSWER_S)


def stuck_of(waits: Mapping[int, For], members: Collection[int]) -> list[int]:
    """Returns the processes that all others wait for; none if these are more than the others.

    A stuck process does not wait. If all processes wait, the stuck ones wait for results of a step
    whose other processes have their results.
    """
    stuck = sorted({*members} - waits.keys())
    waiting = sum(what is not For.STEPS for what in waits.values())
    if not stuck:
        stuck = sorted(process for process, what in waits.items() if what is For.RESULTS)
        waiting -= len(stuck)
    return stuck if len(stuck) <= waiting else []


def service() -> Any:
    """Returns this process's client of the coordination service."""
    return jax_internals.distributed().client


def _ours() -> int:
    return int(jax_internals.distributed().process_id)


def _read(key: str) -> dict[int, str]:
    """Values under a key of the coordination service, by process."""
    found = service().key_value_dir_get(key)
    return {int(name.rpartition("/")[2]): value for name, value in found}


peers = Peers()
