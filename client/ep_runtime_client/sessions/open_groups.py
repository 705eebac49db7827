"""The groups of one session: made once per name, found again, told what the daemon says."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ep_runtime import specs
from ep_runtime.allowed_names import check_new_name
from ep_runtime.errors import EpRuntimeError
from ep_runtime.v1 import session_service_pb2
from ep_runtime_client.base import jax_internals, jax_state
from ep_runtime_client.daemons import transport
from ep_runtime_client.groups import attach
from ep_runtime_client.groups.group import Group
from ep_runtime_client.groups.owner import GroupOwner
from ep_runtime_client.sessions.watchdog import Watchdog

if TYPE_CHECKING:
    from jax.sharding import Mesh


class OpenGroups:
    """By name. Thread-safe: groups of different names form side by side."""

    def __init__(self, session: GroupOwner, watchdog: Watchdog) -> None:
        self._session = session
        self._watchdog = watchdog
        self._lock = threading.RLock()
        self._forming: dict[str, threading.RLock] = {}
        self._groups: dict[str, Group] = {}

    def all(self) -> list[Group]:
        with self._lock:
            return list(self._groups.values())

    def get(self, name: str) -> Group | None:
        with self._lock:
            return self._groups.get(name)

    def transport_of(self, name: str, said: str) -> str:
        """What was said of a group; under tracing, which asks nobody, "auto" is what it has."""
        if not jax_internals.under_tracing():
            return said
        here = self.get(name)
        if here is None:
            jax_state.needs_eager("create_group", f"group {name!r}")
        return here.spec.transport if here is not None and said == "auto" else said

    def create(self, spec: specs.GroupSpec, mesh: Mesh, *, replace: bool) -> Group:
        """The group as `Session.create_group` returns it."""
        with self._forming_lock(spec.name):
            self._session.require_alive()
            found = self.get(spec.name)
            if found is not None and attach.is_same(found, spec, mesh, replace=replace):
                return found
            jax_state.needs_eager("create_group", f"such group {spec.name!r}")
            if found is None:
                check_new_name("group", spec.name)
            else:
                found.step_aside()
            group = attach.make_group(self._session, spec, mesh, replace=replace)
            self._watchdog.stop()
            with self._lock:
                self._groups[spec.name] = group
            return group

    def find(self, name: str, mesh: Mesh | None) -> Group:
        """The group as `Session.group` returns it."""
        with self._forming_lock(name):
            self._session.require_alive()
            found = self.get(name)
            if found is not None:
                found.require_open()
                return found
            jax_state.needs_eager("group", f"group {name!r}")
            spec = attach.stored_spec(self._session, name)
            mesh = mesh if mesh is not None else attach.default_mesh(spec)
            group = self.create(spec, mesh, replace=False)
            attach.adopt_layers(group)
            return group

    def _forming_lock(self, name: str) -> threading.RLock:
        with self._lock:
            return self._forming.setdefault(name, threading.RLock())

    def forget(self, group: Group) -> None:
        with self._lock:
            if self._groups.get(group.name) is group:
                del self._groups[group.name]

    def restore(self, control: transport.ControlChannel) -> None:
        """The daemon was started again: says what this process holds."""
        for group in self.all():
            if not group.is_gone:
                group.restore(control, self._session.token)
                self._watch(group)

    def changed(self, event: session_service_pb2.GroupEvent) -> None:
        """The daemon says that a group changed."""
        group = self.get(event.group)
        if group is None or group.generation != event.generation:
            return
        group.changed(event.state, event.reason, event.lost_members)
        self._watch(group)

    def session_ended(self) -> None:
        """The daemon ended the session, and with it the groups that say so."""
        for group in self.all():
            self._watch(group)

    def _watch(self, group: Group) -> None:
        """Ends this process in time once calls of the group end."""
        try:
            group.require_whole()
        except EpRuntimeError as error:
            self._watchdog.over(group, error, group.patience_s)
