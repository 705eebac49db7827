"""The daemon's state apart from sockets; the gRPC servicers and the fd server call it."""

from __future__ import annotations

import collections
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping

from ep_runtime.allowed_names import check_new_labels, check_new_name
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    PermissionDeniedError,
    PoolExhaustedError,
    RuntimeUnavailableError,
    SpecMismatchError,
)
from ep_runtime.v1 import session_service_pb2
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.base.supervision import LoopLag, Supervisor
from ep_runtime_server.callers.audit import Audit
from ep_runtime_server.callers.credentials import GivenOrder
from ep_runtime_server.callers.operations import Operations
from ep_runtime_server.callers.quotas import Connections, Quotas, Usage
from ep_runtime_server.callers.sessions import SessionRecord, Sessions, SessionState
from ep_runtime_server.cluster.cluster import Cluster
from ep_runtime_server.config import ServerConfig, merged
from ep_runtime_server.groups.attachment import AttachTokens
from ep_runtime_server.groups.chunked_calls import ChunkedCalls
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.groups.history import History
from ep_runtime_server.groups.lateness import LateRanks
from ep_runtime_server.journal import drains
from ep_runtime_server.journal.file import Journal
from ep_runtime_server.journal.recorder import DRAIN, Recorder
from ep_runtime_server.journal.recovery import Recovery
from ep_runtime_server.journal.rejoin import Rejoin
from ep_runtime_server.memory.cuda_device import Gpus
from ep_runtime_server.memory.devices import HostDevice
from ep_runtime_server.memory.fd_store import FdStore, by_set, stored_name
from ep_runtime_server.memory.windows import FREEING, Owner, WindowPool
from ep_runtime_server.nccl.unique_ids import UniqueIdBook

# RPCs that create something that a restarted daemon must know.
_MAKES_NEW = ("OpenSession", "CreateGroup", "RegisterLayers")

_ADMIN = ".AdminService/"


class Runtime:
    """Holds sessions, groups and memory, and carries out an operator's orders."""

    def __init__(
        self,
        settings: ServerConfig,
        clock: Clock,
        journal: Journal,
        gpus: Gpus | None = None,
        events: EventLog | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Makes an empty state; call `restore` next. Tests set `gpus`."""
        self.settings = settings
        self.clock = clock
        self.journal = journal
        self.incarnation = secrets.token_hex(8)
        self.started_s = clock.monotonic_s()
        self.events = EventLog(clock) if events is None else events
        self.audit = Audit(None) if audit is None else audit
        self.pool = WindowPool(
            HostDevice(settings.max_host_bytes),
            clock,
            self.events,
            Gpus(settings.max_bytes_per_gpu) if gpus is None else gpus,
        )
        self.connections = Connections()
        self.quotas = Quotas(settings.per_user, self.usage, self.fds)
        self.pool.quotas = self.quotas
        self.groups = Groups(self.pool, clock, self.events, self.quotas)
        self.attach_tokens = AttachTokens(clock)
        self.unique_ids = UniqueIdBook(clock, self.events, self.quotas)
        self.operations = Operations(clock)
        self.sessions = Sessions(
            clock,
            self.events,
            admit=lambda uid: self.admit(uid, sessions=1),
            on_end=self._session_ended,
        )
        self.recovery = Recovery(
            self.sessions, self.groups, self.pool, self.events, clock, settings.recovery_s
        )
        self.rejoin = Rejoin(self.groups, self.pool, self.recovery)
        self.recorder = Recorder(journal, self.sessions, self.groups, self.pool, self.events, clock)
        self.late_ranks = LateRanks(self.groups, self.events, clock)
        self.chunked_calls = ChunkedCalls(self.groups, self.events)
        self.history = History(self.groups, clock)
        self.failpoints = Failpoints(settings.testing)
        self.on_health: Callable[[], None] = lambda: None  # `healthy` may have changed
        self.supervisor = Supervisor(self.events, lambda: self.on_health())
        self.cluster: Cluster | None = None  # None without a cluster
        self.drain_order: drains.Drain | None = None
        self.ending = False
        self.loop_lag = LoopLag()
        self._idle_since_s = self.started_s

    def restore(self, fd_store: FdStore, stored: Mapping[str, int]) -> None:
        """Restores state from the journal and from systemd's descriptors, and begins a new journal.

        Args:
            fd_store: stores the descriptors of every window set from now on.
            stored: systemd's descriptors by name; this call closes them.
        """
        journal, recovery = self.journal, self.recovery
        incomplete = not journal.was_there or journal.cut_bytes > 0 or journal.odd_records > 0
        if journal.odd_records:
            self.events.add(
                "journal.unreadable",
                f"{journal.odd_records} records are no key with a value",
                level=logging.WARNING,
            )
        if journal.cut_bytes:
            self.events.add(
                "journal.cut",
                f"{journal.cut_bytes} bytes at the end of the journal were no whole record",
                level=logging.WARNING,
                cut_bytes=journal.cut_bytes,
            )
        facts = journal.take_facts()
        self._restore_drain(facts.get(DRAIN))
        recovery.restore(facts, incomplete=incomplete)
        self._adopt_stored(fd_store, stored)
        recovery.begin()
        self.recorder.listen(fd_store.windows_changed, lambda: recovery.word_counts_until_s)
        self.recorder.compact()

    def _restore_drain(self, record: object) -> None:
        try:
            self.drain_order = drains.restored(record)
        except (LookupError, TypeError) as error:
            told = f"{DRAIN}: {error}"
            self.events.add("journal.unreadable", told, level=logging.WARNING)
        if self.drain_order is not None:
            self.recorder.keep_drain(self.drain_order.record)
            self.events.add("server.draining", f"still {self.drain_order}")

    def _adopt_stored(self, fd_store: FdStore, stored: Mapping[str, int]) -> None:
        names = dict(stored)
        kept = by_set(stored)
        for windows in self.pool.sets:
            try:
                self.rejoin.adopt(windows, kept.get(windows.set_id, {}))
            except EpRuntimeError as error:
                self.events.add("windows.refused", f"systemd's store, {windows.owner}: {error}")
            else:
                for rank in kept.get(windows.set_id, {}):
                    names.pop(stored_name(windows.set_id, rank), None)
        for name in names:  # descriptors of sets that no longer exist
            fd_store.remove(name)
        for fd in stored.values():
            os.close(fd)

    def usage(self, uid: int) -> Usage:
        """Returns the user's current use of each limited resource."""
        groups = self.groups.of_user(uid)
        sessions = sum(session.uid == uid for session in self.sessions.not_over())
        host, *gpus = (self.pool.held_by(uid, device.name) for device in self.pool.devices())
        return Usage(
            sessions=sessions,
            groups=len(groups),
            layers=sum(len(group.layers) for group in groups),
            host_bytes=host,
            gpu_bytes=sum(gpus),
            fds=self.fds()[uid],
            journal_bytes=self.recorder.bytes_of(uid),
        )

    def fds(self) -> collections.Counter[int]:
        """Returns how many descriptors each user has, by uid."""
        sessions = collections.Counter(session.uid for session in self.sessions.not_over())
        connections = self.connections
        held = self.pool.fds() + self.unique_ids.fds()
        for uid in {*sessions, *connections.api, *connections.fd}:
            held[uid] += connections.fds_of(uid, sessions[uid])
        return +held

    def admit(self, uid: int, *, sessions: int = 0, api: int = 0, fd: int = 0) -> None:
        """Checks that a user may have this many more sessions and connections to both sockets.

        Raises:
            PoolExhaustedError: see Quotas.check.
        """
        held = sum(session.uid == uid for session in self.sessions.not_over())
        before = self.connections.fds_of(uid, held)
        after = self.connections.fds_of(uid, held + sessions, api, fd)
        self.quotas.check(uid, sessions=sessions, fds=after - before)

    def tell_refused(self, door: str, error: EpRuntimeError) -> None:
        """Adds an event for a caller that socket `door` refused for its user or a limit."""
        if isinstance(error, (PermissionDeniedError, PoolExhaustedError)):
            cause = error.fields.get("uid")
            self.events.deny(f"{door}.denied", cause, str(error), **error.fields)

    def users(self) -> list[int]:
        """Returns the uids that have a session, a group or a descriptor."""
        sessions = {session.uid for session in self.sessions.not_over()}
        groups = {group.owner.uid for group in self.groups.all()}
        return sorted(sessions | groups | set(self.fds()))

    @property
    def draining(self) -> bool:
        return self.ending or self.drain_order is not None

    @property
    def server_state(self) -> session_service_pb2.ServerState:
        if self.draining:
            return session_service_pb2.SERVER_STATE_DRAINING
        if self.recovery.under_way:
            return session_service_pb2.SERVER_STATE_RECOVERING
        return session_service_pb2.SERVER_STATE_SERVING

    @property
    def refusal(self) -> str:
        """Returns why the daemon admits nothing new or does not work; empty if it is healthy."""
        if self.draining:
            return f"it is {self.drain_order or 'draining: it ends'}"
        if self.recovery.under_way:
            return f"it waits for processes of before, {self.recovery.left_s:.0f} s at most"
        if self.journal.error:
            return f"it cannot write its journal: {self.journal.error}"
        failing = ", ".join(self.supervisor.failing)
        return f"its background work fails: {failing}; see its log" if failing else ""

    def check_serving(self) -> None:
        """Raises RuntimeUnavailableError while the daemon drains."""
        if self.draining:
            raise RuntimeUnavailableError(
                f"the daemon at {self.settings.directory} admits nothing new: {self.refusal}",
                address=f"unix://{self.settings.directory}",
            )

    async def before_answer(self, method: str) -> None:
        """Writes an RPC's changes to the journal, before the daemon answers the RPC.

        Raises:
            PoolExhaustedError: the journal cannot be written, and the call created something.
        """
        if _ADMIN not in method:
            self.failpoints.hit("rpc.before_answer")
        name = method.rpartition("/")[2]
        if name in _MAKES_NEW:
            self.recorder.require(all_of_it=name != "OpenSession")
        else:
            self.recorder.flush()
        if _ADMIN not in method:
            self.failpoints.hit("rpc.answer")

    async def claims_allowed(self, session: SessionRecord, name: str, wait_s: float) -> float:
        """Waits until groups may be created; returns how much of `wait_s` that took.

        Raises:
            RuntimeUnavailableError: draining, or still recovering after `wait_s`.
            PoolExhaustedError: the journal cannot be written.
        """
        self.check_serving()
        self.recorder.admit()
        owner = Owner(session.uid, session.job, name)
        self.recovery.holds_nothing(session, owner)
        began_s = self.clock.monotonic_s()
        if not await self.recovery.wait_over(owner, wait_s):
            raise RuntimeUnavailableError(
                f"the daemon at {self.settings.directory} started again and waits for earlier "
                f"processes, {self.recovery.left_s:.0f} s at most; retry",
                address=f"unix://{self.settings.directory}",
            )
        return self.clock.monotonic_s() - began_s

    def open_session(
        self, session: SessionRecord, job: str, labels: Mapping[str, str], process_index: int
    ) -> None:
        """Sets the job and labels of a session.

        Raises:
            SpecMismatchError: the session was opened with another job.
            InvalidArgumentError: the job or a label is not a valid name.
            RuntimeUnavailableError: the daemon is draining.
            PoolExhaustedError: the journal cannot be written.
        """
        if session.state is not SessionState.CONNECTED:
            self.sessions.heard(session)
            if session.job != job:
                raise SpecMismatchError(
                    f"session {session.session_id} belongs to job {session.job!r}, "
                    f"but the call names job {job!r}",
                    object=session.session_id,
                    field="job",
                    theirs=session.job,
                    ours=job,
                )
            return
        check_new_name("job", job)
        check_new_labels(labels)
        self.check_serving()
        self.recorder.admit()
        session.job = job
        session.labels = dict(labels)
        session.process_index = process_index
        session.state = SessionState.ACTIVE
        self.sessions.on_change(session)
        self.events.add(
            "session.active",
            f"process {session.pid} opened a session in job {job!r}",
            session_id=session.session_id,
            job=job,
        )

    def _session_ended(self, session: SessionRecord) -> None:
        self.operations.forget_session(session.session_id)
        if session.state is SessionState.FENCED:
            session.tell(
                session_service_pb2.WatchSessionResponse(
                    fence=session_service_pb2.FenceEvent(reason=session.fence_reason)
                )
            )
        self.groups.session_ended(session)
        session.tell(None)

    # Orders

    def drain(self, deadline_s: float, *, shutdown: bool, order: GivenOrder | None = None) -> None:
        """Stops admitting new sessions and groups.

        With `shutdown` the daemon ends, at the deadline at the latest. Without it, the drain lasts
        until `undrain`, also after restarts. `order` is None if a signal asked for the drain.

        Raises:
            PoolExhaustedError: the order is in force, but the journal cannot record it.
            InvalidArgumentError: the deadline is negative, or too large for a message to clients.
        """
        if deadline_s < 0:
            raise InvalidArgumentError(
                f"deadline must not be negative, got {deadline_s} s", argument="deadline"
            )
        now, before = self.clock.monotonic_s(), self.drain_order
        asked = drains.ordered(
            before,
            order,
            wall_s=self.clock.wall_s(),
            ends_at_s=now + deadline_s if shutdown else None,
        )
        event = asked.event(now)  # raises before anything is drained
        self.drain_order = asked
        if shutdown or before is None:
            told = f"{self.drain_order}" + (f", in {deadline_s:g} s at the latest" * shutdown)
            self.events.add("server.draining", told, **(order.fields if order is not None else {}))
        self._drain_changed(event)
        if not shutdown:
            self.recorder.require(all_of_it=True)

    def undrain(self, order: GivenOrder) -> bool:
        """Admits sessions and groups again; returns whether the daemon was draining.

        Raises:
            InvalidArgumentError: a signal asked for the drain, which ends the daemon.
            PoolExhaustedError: the order is in force, but the journal cannot record it.
        """
        drain, self.drain_order = self.drain_order, None
        if drain is None:
            return False
        if drain.signalled:
            self.drain_order = drain
            raise InvalidArgumentError(
                "a signal told the daemon to end, which cannot be taken back; start it again"
            )
        self.events.add("server.undrained", f"admits again: {order}", **order.fields)
        self._drain_changed(session_service_pb2.DrainEvent(taken_back=True))
        self.recorder.require(all_of_it=True)
        return True

    def _drain_changed(self, event: session_service_pb2.DrainEvent) -> None:
        self.recorder.keep_drain(self.drain_order.record if self.drain_order is not None else None)
        for session in self.sessions.not_over():
            session.tell(session_service_pb2.WatchSessionResponse(drain=event))
        self.on_health()

    def reconfigure(self, settings: ServerConfig, changed: Iterable[str]) -> list[str]:
        """Applies settings that can change now; returns the keys that need a restart.

        The new settings concern new callers only.
        """
        self.settings, left = merged(self.settings, settings, changed)
        self.quotas.limits = self.settings.per_user
        self.pool.limit(self.settings.max_host_bytes, self.settings.max_bytes_per_gpu)
        return left

    # Time

    def tick(self) -> None:
        """Runs all periodic work once; a failure of one part does not stop the others."""
        run = self.supervisor.run
        run("expiry of groups", self.groups.expire)
        run(FREEING, self.pool.free_again)
        run("expiry of attach tokens", self.attach_tokens.expire)
        run("ends of NCCL ids", self.unique_ids.tick)
        run("expiry of answers", self.operations.expire)
        run("marks of late heartbeats", self.sessions.mark_suspects)
        run("forgetting of sessions", self.sessions.prune)
        run("end of the recovery", self.recovery.settle)
        run("journal", self.recorder.tick)
        run("counts of denials", self.events.tick)
        if self.cluster is not None:
            run("cluster", self.cluster.tick)
        if self.sessions.not_over() or self.groups.all():
            self._idle_since_s = self.clock.monotonic_s()  # a retained group waits for its job

    @property
    def should_stop(self) -> bool:
        """Returns whether the daemon is drained, past its deadline, or idle for `idle_exit_s`."""
        now = self.clock.monotonic_s()
        empty = not self.sessions.not_over()
        # A fenced session cannot make calls, so do not wait for its process.
        quiet = not any(session.live for session in self.sessions.not_over())
        stop_at_s = self.drain_order.ends_at_s if self.drain_order is not None else None
        if stop_at_s is not None and (quiet or now >= stop_at_s):
            return True
        idle = self.settings.idle_exit_s
        return idle is not None and empty and now - self._idle_since_s >= idle
