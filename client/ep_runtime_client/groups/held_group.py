"""A group in this process, behind the `Group` that users have."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ep_runtime import errors, layer_specs, wire
from ep_runtime.allowed_names import check_new_name
from ep_runtime.v1 import types_pb2
from ep_runtime_client.base import jax_state, meshes
from ep_runtime_client.base.layers import EpLayer, LayerStack, live_groups
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.client import DaemonClient
from ep_runtime_client.groups import estimate, forming, registrations
from ep_runtime_client.groups.formed import Formed, restore
from ep_runtime_client.groups.health import GroupHealth
from ep_runtime_client.programs import failures

if TYPE_CHECKING:
    from jax.sharding import Mesh

_log = logging.getLogger("ep_runtime")

# Calls of a broken group may wait for the dead process in an XLA collective.
LOST_SETTLE_S = 1.0


class HeldGroup:
    """Windows, layers and health of one group in this process. Thread-safe.

    Attributes:
        client: client of the group's daemon.
        group: the `Group` that users have.
        native_group: the group's object in the native library; None for transport "xla".
    """

    group: Any

    def __init__(self, client: DaemonClient, mesh: Mesh, formed: Formed) -> None:
        self.client = client
        self.name = formed.spec.name
        self.spec = formed.spec
        self.mesh = mesh
        self.generation = formed.generation
        self.native_group = formed.native_group
        self.reattached = formed.reattached
        self._formed = formed
        self._health = GroupHealth(formed, client.job)
        self._lock = threading.RLock()
        self._registrations = registrations.Registrations(formed.spec)

    @property
    def closed(self) -> bool:
        return self._health.closed

    @property
    def state(self) -> str:
        return str(self._health)

    @property
    def is_gone(self) -> bool:
        """Whether the group was closed here or reclaimed, or lost a process."""
        return self._health.is_gone

    def register_layers(
        self, layers: Iterable[layer_specs.LayerSpec], *, replace: bool, call: str
    ) -> list[EpLayer]:
        """Like `Group.register_layers`; errors under tracing name `call`."""
        layers = list(layers)
        for layer in layers:
            if not isinstance(layer, layer_specs.LayerSpec):
                raise errors.InvalidArgumentError(
                    f"layers must be ep.LayerSpec, got {layer!r}", argument="layers"
                )
        filled = [layer_specs.check_layer(self.spec, layer) for layer in layers]
        with self._lock:
            self.require_open()
            new = self._registrations.missing(filled, replace=replace)
            if new:
                jax_state.needs_eager(call, self._registrations.such(*(x.name for x in new)))
                self._register(new, [], replace)
            known = (self._registrations.known(layer, None) for layer in filled)
            return [layer for layer in known if isinstance(layer, EpLayer)]

    def register_stack(
        self, layer: layer_specs.LayerSpec, num_layers: int, *, replace: bool
    ) -> LayerStack:
        """Like `Group.register_layer_stack`."""
        name, filled = layer.name, layer_specs.check_layer(self.spec, layer)
        with self._lock:
            self.require_open()
            if self._registrations.known(filled, num_layers, replace=replace) is None:
                jax_state.needs_eager("register_layer_stack", self._registrations.such(name))
                self._registrations.check_members(name, num_layers)
                self._register([], [wire.LayerStackSpec(filled, num_layers)], replace)
            stack = self._registrations.known(filled, num_layers)
        assert isinstance(stack, LayerStack)  # known compares num_layers
        return stack

    def layer(self, name: str) -> EpLayer | LayerStack:
        """Like `Group.layer`."""
        with self._lock:
            self.require_open()
            found = self._registrations.lookup(name)
            if found is None:
                jax_state.needs_eager("layer", self._registrations.such(name))
            if found is None and self.client.has_daemon:
                self.adopt([registrations.ask(self.client, self.name, name)])
                found = self._registrations.lookup(name)
            if found is None:
                raise errors.StaleHandleError(
                    f"group {self.name!r} has no layer {name!r}, it has {self.layer_names}",
                    group=self.name,
                    layer=name,
                )
            return found

    def registered(self, name: str) -> EpLayer | LayerStack | None:
        """Returns a layer or stack that this process knows; else None."""
        with self._lock:
            return self._registrations.lookup(name)

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers and stacks that this process knows."""
        with self._lock:
            return self._registrations.names

    def _register(
        self, layers: list[layer_specs.LayerSpec], stacks: list[wire.LayerStackSpec], replace: bool
    ) -> None:
        for name in (*(x.name for x in layers), *(x.spec.name for x in stacks)):
            check_new_name("layer", name)
        made = registrations.register(
            self.client, self.spec, self.generation, layers, stacks, replace=replace
        )
        self.adopt([*made[0], *made[1]])

    def adopt(self, registered: Sequence[wire.RegisteredLayer]) -> None:
        """Makes registrations, with defaults filled in, usable here by name, natively by id."""
        if self._registrations.replaces(registered):
            self.settle()
        native = self.native_group
        self._registrations.add(registered, None if native is None else native.add_layers)

    def require_layer(self, layer: EpLayer) -> None:
        """Raises StaleHandleError if the group is gone, or the layer was replaced."""
        self._health.require_open(layer.name)
        self.client.require_alive()
        self._registrations.require_current(layer)

    def check(self, arrays: Any) -> Any:
        """Like `Group.check`."""
        if arrays is not None:
            import jax  # not at the top: a control plane runs without JAX

            try:
                with failures.translate_errors():
                    jax.block_until_ready(arrays)
            except errors.EpRuntimeError:
                self._health.take_report()  # drop the report of the failure that is raised here
                raise
        # A device's report is more precise than the group's end, which follows from it.
        found = self._health.take_report()
        if found is not None:
            raise found
        self.require_open()
        return arrays

    def describe(self) -> dict[str, Any]:
        """Like `Group.describe`."""
        with self._lock:
            layers = self._registrations.describe()
        return {
            "name": self.name,
            "job": self.client.job,
            "generation": self.generation,
            "state": self.state,
            "spec": self.spec.to_dict(),
            **estimate.sizes_of(self.spec),
            "reattached": self.reattached,
            "layers": layers,
        }

    def require_open(self, layer: str | None = None) -> None:
        """Raises if the group can no longer be used.

        Raises:
            PeerLostError: a process of the group is gone or fenced.
            SessionFencedError: this session was fenced.
            StaleHandleError: it was closed, reclaimed or replaced, or belongs to another process.
        """
        self._health.require_open(layer)
        self.client.require_alive()

    def require_whole(self, layer: str | None = None) -> None:
        """Raises the error that ends the calls of a group still open here, if any."""
        self._health.require_whole(layer)

    @property
    def patience_s(self) -> float | None:
        """The least time to wait for other processes after calls ended; None if calls continue or
        no other process takes part."""
        end, alone = self._health.end, len(self._formed.ranks) == self.spec.world_size
        return None if end is None or alone else end.patience_s

    def changed(self, state: types_pb2.GroupState, reason: str, lost: Sequence[Any] = ()) -> None:
        """Handles the daemon's event that the group changed; every layer is stale if it is over."""
        self._health.changed(state, reason, lost)

    def restore(self, control: transport.ControlChannel) -> None:
        """Gives the group back to a restarted daemon.

        Takes no lock, because a thread that waits for the daemon may hold it.

        Raises:
            RuntimeUnavailableError: the daemon is gone again.
            SessionFencedError: the session was fenced.
        """
        try:
            found = restore(self.client, control, self._formed, self._registrations.items)
        except (errors.RuntimeUnavailableError, errors.SessionFencedError):
            raise
        except errors.EpRuntimeError as error:
            _log.error("group %r did not outlive the daemon's restart: %s", self.name, error)
            self._health.give_up(str(error))
        else:
            self.changed(found.state, "lost a process while the daemon was away")
            if self.native_group is not None:
                self.native_group.restored(control)

    def step_aside(self) -> None:
        """Makes room for a group of the same name in this process.

        A broken group keeps its claim: the daemon forms it anew on the same memory. Any other group
        is closed.
        """
        if self._health.broken:
            self.abandon()
        else:
            self.close()

    def abandon(self) -> None:
        """Unmaps the windows without telling the daemon, which keeps them."""
        self.settle()
        if self._shut():
            forming.unmap(self.native_group)
            self._formed.memory.close()

    def settle(self) -> None:
        """Waits, for a bounded time, for running calls."""
        if self.native_group is not None and not self.closed and self.client.is_ours:
            within_s = LOST_SETTLE_S if self.is_gone else jax_state.SETTLE_S
            jax_state.settle(meshes.devices_of(self.mesh).ravel(), within_s)

    def _shut(self) -> bool:
        """Stops further use; returns False if it was stopped before."""
        with self._lock:
            if self.closed:
                return False
            self._health.closed = True
        live_groups.remove(self)
        return self.client.is_ours

    def close(self) -> None:
        """Like `Group.close`."""
        self.settle()
        if self._shut():
            forming.leave(self.client, self.name, self.generation, self.native_group)
            self._formed.memory.close()
