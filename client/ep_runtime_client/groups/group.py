"""A group in a training process: layers, sizes, health. Made by `Session.create_group`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ep_runtime import errors, layer_specs, specs, wire
from ep_runtime.allowed_names import check_name, check_new_name
from ep_runtime.arguments import as_int
from ep_runtime.errors import InvalidArgumentError, StaleHandleError
from ep_runtime.v1 import types_pb2
from ep_runtime_client.base import jax_state, meshes
from ep_runtime_client.base.jax_state import eager
from ep_runtime_client.base.layers import EpLayer, LayerStack, live_groups
from ep_runtime_client.daemons import transport
from ep_runtime_client.groups import estimate, forming, looking, registering
from ep_runtime_client.groups.formed import Formed, restore
from ep_runtime_client.groups.health import GroupHealth
from ep_runtime_client.groups.owner import GroupOwner
from ep_runtime_client.groups.registrations import Registrations
from ep_runtime_client.programs import failures

if TYPE_CHECKING:
    from jax.sharding import Mesh

_log = logging.getLogger("ep_runtime")
_PUBLIC = (
    *("name", "spec", "mesh", "session", "generation", "reattached", "closed"),
    *("capacity_per_rank", "staging_bytes_per_rank", "describe", "check", "close"),
    *("load", "skew"),
    *("register_layer", "register_layers", "register_layer_stack", "layer"),
)

# What still runs where a process is gone may wait for it in a collective of XLA.
LOST_SETTLE_S = 1.0


class Group:
    """An expert-parallel group: the devices of a mesh that exchange tokens, and their memory.

    `Session.create_group` makes it. Thread-safe.

    Attributes:
        name: unique among the groups of the user and job.
        spec: all settings of the group.
        mesh: the mesh that it was created on.
        session: the session that it belongs to.
        generation: the daemon's count of how often the group was formed; it grows each time.
        native_group: the group's object in the native library; None for transport "xla".
        reattached: True if it uses the windows of an earlier process again.
    """

    def __init__(self, session: GroupOwner, mesh: Mesh, formed: Formed) -> None:
        self.name = formed.spec.name
        self.spec = formed.spec
        self.mesh = mesh
        self.session = session
        self.generation = formed.generation
        self.native_group = formed.native_group
        self.reattached = formed.reattached
        self._formed = formed
        self._health = GroupHealth(formed, session.job)
        self._lock = threading.RLock()
        self._registrations = Registrations(formed.spec)
        self._looks = looking.GroupLooks(session, formed.spec, formed.generation)

    @property
    def closed(self) -> bool:
        """Whether the group has been closed."""
        return self._health.closed

    @property
    def is_gone(self) -> bool:
        """True where it was closed here, taken away by the daemon, or a process of it is gone."""
        return self._health.is_gone

    @property
    def capacity_per_rank(self) -> int:
        """C, the number of rows in one slab."""
        return self.spec.recv_capacity_per_rank

    @property
    def staging_bytes_per_rank(self) -> int:
        """Bytes of one rank's window, the memory for rows in transit; 0 for transport "xla"."""
        return estimate.staging_bytes(self.spec)

    def register_layer(
        self,
        name: str,
        *,
        top_k: int,
        alignment: int | None = None,
        in_flight: int = 1,
        replace: bool = False,
    ) -> EpLayer:
        """Registers one layer and returns the EpLayer that `moe` and `dispatch` take.

        The same name and settings again return the same layer, under tracing too.

        Args:
            name: unique in the group; letters, digits and . _ / : @ + -, [n], ['key'].
            top_k: K, at most the group's max_top_k.
            alignment: rows; None takes the group's.
            in_flight: dispatches of the layer that may be open at once, at most `lanes`.
            replace: replace a layer, or stack, of that name that has other settings. It waits, for
                a bounded time, for calls that run; programs compiled for the old layer then fail
                with StaleHandleError. Every process of the group must replace the layer before any
                uses it: otherwise calls wait for each other and fail after op_timeout_s.

        Returns:
            The EpLayer: hashable and static, for use inside and outside `jit`.

        Raises:
            InvalidArgumentError: top_k, alignment or in_flight is more than the group allows.
            SpecMismatchError: the name has other settings, and `replace` is False.
            StaleHandleError: the group was closed or reclaimed.

        Cost: one RPC; no memory. Nothing in a step.

        Examples:
            >>> layer = group.register_layer("block0/moe", top_k=2)
            >>> layer.name, layer.top_k, layer.group is group
            ('block0/moe', 2, True)
        """
        layer = layer_specs.LayerSpec(name, top_k=top_k, alignment=alignment, in_flight=in_flight)
        return self._registered([layer], replace, "register_layer")[0]

    def register_layers(
        self, layers: Iterable[layer_specs.LayerSpec], *, replace: bool = False
    ) -> list[EpLayer]:
        """Registers many layers at once; one RPC serves 4096 of them.

        The daemon registers all layers of one RPC or none.

        Args:
            layers: their specs, names unique in the group.
            replace: as in `register_layer`, for each.

        Returns:
            The layers in the order of the specs.

        Raises:
            EpRuntimeError: as `register_layer` does.

        Cost: one RPC for 4096 layers.
        """
        return self._registered(layers, replace, "register_layers")

    def _registered(
        self, layers: Iterable[layer_specs.LayerSpec], replace: bool, call: str
    ) -> list[EpLayer]:
        layers = list(layers)
        for layer in layers:
            if not isinstance(layer, layer_specs.LayerSpec):
                raise InvalidArgumentError(
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

    def register_layer_stack(
        self,
        name: str,
        num_layers: int,
        *,
        top_k: int,
        alignment: int | None = None,
        in_flight: int = 1,
        replace: bool = False,
    ) -> LayerStack:
        """Registers `num_layers` layers with the same settings, for a `lax.scan` over them.

        `stack[i]` is one of them, with i a Python or a traced int.

        Args:
            name: name of the stack, unique in the group.
            num_layers: 1 or more.
            top_k: as in `register_layer`, the same for all.
            alignment: as in `register_layer`, the same for all.
            in_flight: as in `register_layer`, the same for all.
            replace: as in `register_layer`.

        Returns:
            The LayerStack.

        Raises:
            InvalidArgumentError: num_layers is not an integer, or is out of range.
            EpRuntimeError: as `register_layer` does.

        Cost: one RPC. A scan over the stack compiles its body once.
        """
        num_layers = as_int("num_layers", num_layers)
        if not 1 <= num_layers <= specs.MAX_STACK_LAYERS:
            raise InvalidArgumentError(
                f"num_layers must be 1 to {specs.MAX_STACK_LAYERS}, got {num_layers}",
                argument="num_layers",
            )
        layer = layer_specs.LayerSpec(name, top_k=top_k, alignment=alignment, in_flight=in_flight)
        filled = layer_specs.check_layer(self.spec, layer)
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
        """Returns a registered layer or stack by its name, or one layer of a stack by "stack[i]".

        Args:
            name: name of a layer or a stack, or "stack[i]".

        Returns:
            The EpLayer or LayerStack.

        Raises:
            StaleHandleError: no layer of that name is registered.
            InvalidArgumentError: name is not printable text, or is too long.
            EpRuntimeError: this process does not know the name, and the daemon does not answer.

        Cost: no RPC for a layer that this process knows; else one.
        """
        check_name("layer", name)
        with self._lock:
            self.require_open()
            found = self._registrations.lookup(name)
            if found is None:
                jax_state.needs_eager("layer", self._registrations.such(name))
            if found is None and self.session.has_daemon:
                self.adopt([registering.ask(self.session, self.name, name)])
                found = self._registrations.lookup(name)
            if found is None:
                raise StaleHandleError(
                    f"group {self.name!r} has no layer {name!r}, it has {self.layer_names}",
                    group=self.name,
                    layer=name,
                )
            return found

    def registered(self, name: str) -> EpLayer | LayerStack | None:
        """As `layer`, of what this process knows; None where it knows none."""
        with self._lock:
            return self._registrations.lookup(name)

    @property
    def layer_names(self) -> list[str]:
        """Of the layers and stacks that this process knows."""
        with self._lock:
            return self._registrations.names

    def _register(
        self, layers: list[layer_specs.LayerSpec], stacks: list[wire.LayerStackSpec], replace: bool
    ) -> None:
        for name in (*(x.name for x in layers), *(x.spec.name for x in stacks)):
            check_new_name("layer", name)
        made = registering.register(
            self.session, self.spec, self.generation, layers, stacks, replace=replace
        )
        self.adopt([*made[0], *made[1]])

    def adopt(self, registered: Sequence[wire.RegisteredLayer]) -> None:
        """Makes registrations, defaults filled in, usable: ours by name, the library's by id."""
        if self._registrations.replaces(registered):
            self._settle()
        native = self.native_group
        self._registrations.add(registered, None if native is None else native.add_layers)

    def require_layer(self, layer: EpLayer) -> None:
        """Raises StaleHandleError where the group is gone, or the layer was replaced."""
        self.require_open(layer.name)
        self._registrations.require_current(layer)

    @eager
    def check(self, arrays: Any = None) -> Any:
        """Raises the error, if any, that a device reported since the last `check`, without a sync.

        If a peer dies in a step, or the group is reclaimed, calls return NaN. So save only arrays
        that `check` returned: `checkpointer.save(path, group.check(state))`.

        Args:
            arrays: any tree of arrays, which are waited for first; None waits for nothing.

        Returns:
            `arrays`, every value of which was computed while all processes lived.

        Raises:
            EpRuntimeError: the class in the report; else PeerLostError if a process of the group is
                gone or fenced, SessionFencedError if this process is, StaleHandleError after a
                close, reclaim or replacement.

        Cost: reads a report in memory; with arrays it waits for them.
        """
        if arrays is not None:
            import jax  # a control plane without JAX has no arrays

            try:
                with failures.translate_errors():
                    jax.block_until_ready(arrays)
            except errors.EpRuntimeError:
                self._health.take_report()  # of the same failure, which is told once
                raise
        # What the device saw says more than that the group is gone, which follows from it.
        found = self._health.take_report()
        if found is not None:
            raise found
        self.require_open()
        return arrays

    @eager
    def load(self) -> looking.GroupLoad:
        """Returns how even the experts are loaded: what `ep-runtime load` shows, as arrays.

        It counts the rows of all ranks since the group was formed.

        Returns:
            GroupLoad, whose `layers` has for each layer that was called `experts` int64 [E], the
            rows by expert, `ranks`, `max_mean`, `jain`, `fullest`, `dropped` and `rounds`.

        Raises:
            InvalidArgumentError: under tracing, or the session has no daemon.
            RuntimeUnavailableError: the daemon does not answer.
            NotImplementedError: transport "xla", whose calls nobody counts.

        Cost: three RPCs, and as many on each node of a cluster. Nothing in a step.
        """
        self.require_open()
        return self._looks.load()

    @eager
    def skew(self) -> looking.GroupSkew:
        """Returns which rank the others wait for: what `ep-runtime skew` shows, as arrays.

        It looks at the time since the last call of `skew` in this process; the first call looks at
        the time since the group was formed here.

        Returns:
            GroupSkew: `slow`, the rank that holds the others up or None, `holds_share` [world size]
            and `ops`, which has for each op its rates and the matrices `waits` and `arrivals_ms`
            [world size, world size].

        Raises:
            EpRuntimeError: as `load`.
            NotImplementedError: as `load`.

        Cost: as `load`.
        """
        self.require_open()
        return self._looks.skew()

    def describe(self) -> dict[str, Any]:
        """Returns the settings and the state of the group as plain values.

        Cost: none; no RPC.
        """
        with self._lock:
            layers = self._registrations.describe()
        return {
            "name": self.name,
            "job": self.session.job,
            "generation": self.generation,
            "state": str(self._health),
            "spec": self.spec.to_dict(),
            **estimate.sizes_of(self.spec),
            "reattached": self.reattached,
            "layers": layers,
        }

    def require_open(self, layer: str | None = None) -> None:
        """Raises where the group cannot be used any more.

        Raises:
            PeerLostError: a process of it is gone or fenced.
            SessionFencedError: this session was fenced.
            StaleHandleError: it was closed, reclaimed or replaced, or is another process's.
        """
        self._health.require_open(layer)
        self.session.require_alive()

    def require_whole(self, layer: str | None = None) -> None:
        """Raises where calls of the group, still open here, end: with what they end with."""
        self._health.require_whole(layer)

    @property
    def patience_s(self) -> float | None:
        """How long at least other processes are waited for whose calls have ended; None where
        they have not, or no other process has a part in the group."""
        end, alone = self._health.end, len(self._formed.ranks) == self.spec.world_size
        return None if end is None or alone else end.patience_s

    def changed(self, state: types_pb2.GroupState, reason: str, lost: Sequence[Any] = ()) -> None:
        """The daemon says that the group changed; of one that is gone every layer is stale."""
        self._health.changed(state, reason, lost)

    def restore(self, control: transport.ControlChannel, token: str) -> None:
        """Gives the group back to a daemon that was started again.

        Takes no lock: whoever waits for the daemon may hold it.

        Raises:
            RuntimeUnavailableError: the daemon is gone again.
            SessionFencedError: of the session.
        """
        place, layers = self.session.place, self._registrations.items
        try:
            found = restore(place, token, control, self._formed, layers)
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

        A broken group keeps its claim: the daemon forms it anew on the same memory. Any other is
        closed.
        """
        if self._health.broken:
            self.abandon()
        else:
            self.close()

    def abandon(self) -> None:
        """Unmaps the windows without a word to the daemon, which goes on keeping them."""
        self._settle()
        if self._shut():
            forming.unmap(self.native_group)
            self._formed.memory.close()

    def _settle(self) -> None:
        """Waits, bounded, for calls under way."""
        if self.native_group is not None and not self.closed and self.session.is_ours:
            within_s = LOST_SETTLE_S if self.is_gone else jax_state.SETTLE_S
            jax_state.settle(meshes.devices_of(self.mesh).ravel(), within_s)

    def _shut(self) -> bool:
        """Refuses further use; False where that has happened."""
        with self._lock:
            if self.closed:
                return False
            self._health.closed = True
        live_groups.remove(self)
        self.session.forget_group(self)
        return self.session.is_ours

    @eager
    def close(self) -> None:
        """Unmaps the group's windows and frees its memory at the daemon; later calls do nothing.

        It waits, for a bounded time, for calls that run. Programs that use the group's layers
        afterwards fail with StaleHandleError.

        Raises:
            InvalidArgumentError: under tracing.

        Cost: the wait, and one RPC.
        """
        self._settle()
        if self._shut():
            forming.leave(self.session, self.name, self.generation, self.native_group)
            self._formed.memory.close()

    def __dir__(self) -> list[str]:
        """What is for users; the rest is for this package."""
        return sorted(_PUBLIC)

    def __repr__(self) -> str:
        return f"<Group {self.name!r} {self._health} generation={self.generation}>"
