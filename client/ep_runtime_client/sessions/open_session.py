"""Sessions of this process: one per daemon, with its groups; dropped in a forked child."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeGuard

from ep_runtime import specs
from ep_runtime.allowed_names import check_new_name
from ep_runtime.errors import EpRuntimeError
from ep_runtime.v1 import session_service_pb2
from ep_runtime_client.base import jax_internals, jax_state
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.addresses import Address
from ep_runtime_client.daemons.client import DaemonClient
from ep_runtime_client.daemons.link import Callbacks
from ep_runtime_client.daemons.pending_goodbyes import pending_goodbyes
from ep_runtime_client.groups import make_group
from ep_runtime_client.groups.held_group import HeldGroup
from ep_runtime_client.sessions.watchdog import Watchdog

if TYPE_CHECKING:
    from jax.sharding import Mesh


_log = logging.getLogger("ep_runtime")


class OpenSession:
    """A client and its groups. Thread-safe: groups of different names form concurrently."""

    def __init__(self, client: DaemonClient, labels: Mapping[str, str], watchdog: Watchdog) -> None:
        self.client = client
        self._watchdog = watchdog
        self._lock = threading.RLock()
        self._forming: dict[str, threading.RLock] = {}
        self._closed = False
        if client.has_daemon:
            try:
                client.connect(labels, Callbacks(self._restore, self._end, self._changed))
            except BaseException:
                client.stop()
                raise

    def groups(self) -> list[HeldGroup]:
        """Returns the groups that this process has not closed."""
        return [each for each in live_groups.all() if self._is_ours(each)]

    def get(self, name: str) -> HeldGroup | None:
        found = live_groups.get(name)
        return found if self._is_ours(found) else None

    def _is_ours(self, group: object) -> TypeGuard[HeldGroup]:
        return isinstance(group, HeldGroup) and group.client is self.client

    def transport_of(self, name: str, said: str) -> str:
        """Returns the transport to ask for; under tracing "auto" is the known group's transport."""
        if not jax_internals.under_tracing():
            return said
        here = self.get(name)
        if here is None:
            jax_state.needs_eager("create_group", f"group {name!r}")
        return here.spec.transport if here is not None and said == "auto" else said

    def create(self, spec: specs.GroupSpec, mesh: Mesh, *, replace: bool) -> HeldGroup:
        """Creates the group as `Session.create_group` does."""
        with self._forming_lock(spec.name):
            self.client.require_alive()
            found = self.get(spec.name)
            if found is not None and make_group.is_same(found, spec, mesh, replace=replace):
                return found
            jax_state.needs_eager("create_group", f"such group {spec.name!r}")
            if found is None:
                check_new_name("group", spec.name)
            else:
                found.step_aside()
            group = make_group.make_group(self.client, spec, mesh, replace=replace)
            self._watchdog.stop()
            return group

    def find(self, name: str, mesh: Mesh | None) -> HeldGroup:
        """Finds the group as `Session.group` does."""
        with self._forming_lock(name):
            self.client.require_alive()
            found = self.get(name)
            if found is not None:
                found.require_open()
                return found
            jax_state.needs_eager("group", f"group {name!r}")
            spec = make_group.stored_spec(self.client, name)
            mesh = mesh if mesh is not None else make_group.default_mesh(spec)
            group = self.create(spec, mesh, replace=False)
            make_group.adopt_layers(group)
            return group

    def _forming_lock(self, name: str) -> threading.RLock:
        with self._lock:
            return self._forming.setdefault(name, threading.RLock())

    def _restore(self, control: transport.ControlChannel) -> None:
        """Restores groups at a restarted daemon."""
        for group in self.groups():
            if not group.is_gone:
                group.restore(control)
                self._watch(group)

    def _changed(self, event: session_service_pb2.GroupEvent) -> None:
        """Handles the daemon's event that a group changed."""
        group = self.get(event.group)
        if group is None or group.generation != event.generation:
            return
        group.changed(event.state, event.reason, event.lost_members)
        self._watch(group)

    def _end(self, error: EpRuntimeError) -> None:
        """Handles the daemon's message that it ended the session, and with it all groups."""
        self.client.end(error)
        _log.error("%s: %s", type(error).__name__, error)
        for group in self.groups():
            self._watch(group)

    def _watch(self, group: HeldGroup) -> None:
        """Starts the watchdog if calls of the group have ended."""
        try:
            group.require_whole()
        except EpRuntimeError as error:
            self._watchdog.over(group, error, group.patience_s)

    def end(self, *, failed: bool = False) -> None:
        """Ends the session, however many `connect()` calls share it.

        Args:
            failed: False frees everything at once; True, after an error, keeps the windows for
                retain_s, for the job's next start.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for group in self.groups():
            group.abandon() if failed else group.close()
        if not failed:
            self._watchdog.closed()
        self.client.say_goodbye(failed=failed)
        self.client.stop()

    def at_exit(self) -> None:
        """Stops at the interpreter's end without telling the daemon, which then retains windows."""
        if self.client.is_ours and not self._closed:
            self._closed = True
            for group in self.groups():
                if group.native_group is not None:
                    group.native_group.stop_making()
            self.client.stop()


class OpenSessions:
    """Open sessions by daemon, each with the number of its `connect()` calls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[str, tuple[OpenSession, int]] = {}
        self._inherited: list[OpenSession] = []
        self._installed = False

    def acquire(
        self,
        address: Address,
        check: Callable[[OpenSession], None],
        make: Callable[[Address], OpenSession],
    ) -> OpenSession:
        """Returns the open session with that daemon, or makes one."""
        with self._lock:
            self._install()
            session, count = self._open.get(address.key, (None, 0))
            if session is not None and not session.client.alive:
                session.end()
                session, count = None, 0
            if session is None:
                session = make(address)
            else:
                check(session)
            self._open[address.key] = (session, count + 1)
            return session

    def find(self, address: Address) -> OpenSession | None:
        """Returns the open session with that daemon, without counting a call."""
        with self._lock:
            session, _ = self._open.get(address.key, (None, 0))
            return session if session is not None and session.client.alive else None

    def release(self, session: OpenSession) -> bool:
        """Counts one `close()`; returns whether it was the last one.

        Under tracing it counts nothing, because `connect()` there does not count either.
        """
        if jax_internals.under_tracing():
            return False
        with self._lock:
            for key, (found, count) in self._open.items():
                if found is session:
                    if count > 1:
                        self._open[key] = (session, count - 1)
                        return False
                    del self._open[key]
                    return True
        return False

    def ids(self) -> list[str]:
        """Returns the daemons' names of the open sessions."""
        with self._lock:
            return [x.client.session_id for x, _ in self._open.values() if x.client.session_id]

    def end_peer(self, session_id: str, reason: str) -> list[str]:
        """Asks each daemon to fence another session of the job and to kill its process if it may;
        returns the actions of the daemon that has that session.

        Raises:
            EpRuntimeError: a daemon does not answer, or refuses.
        """
        with self._lock:
            clients = [x.client for x, _ in self._open.values() if x.client.session_id]
        answers = [client.end_peer(session_id, reason) for client in clients]
        return [
            f"process {answer.pid} is fenced"
            + (" and killed" if answer.killed else ", and the daemon may not kill it")
            + (f"; {answer.awaited}" if answer.awaited else "")
            for answer in answers
            if answer.pid
        ]

    def embedded(self) -> bool:
        """Whether this process has a private daemon."""
        with self._lock:
            return "embedded" in self._open

    def _install(self) -> None:
        if not self._installed:
            self._installed = True
            os.register_at_fork(after_in_child=self._after_fork)
            atexit.register(self._at_exit)

    def _after_fork(self) -> None:
        """Forgets the sessions in a forked child; does not destroy them, as the parent has them.

        Another thread may have held the lock during the fork, and a process without gRPC's threads
        must not tear down a channel.
        """
        self._lock = threading.RLock()
        self._inherited += [session for session, _ in self._open.values()]
        self._open = {}
        live_groups.clear()
        pending_goodbyes.forget()

    def _at_exit(self) -> None:
        with self._lock:
            sessions = [session for session, _ in self._open.values()]
            self._open = {}
        for session in sessions:
            session.at_exit()


sessions = OpenSessions()
