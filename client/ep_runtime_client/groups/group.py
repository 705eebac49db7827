"""A group in a training process: layers, sizes, health. `Session.create_group` makes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ep_runtime import layer_specs, specs
from ep_runtime.allowed_names import check_name
from ep_runtime.arguments import as_int
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.jax_state import eager
from ep_runtime_client.base.layers import EpLayer, LayerStack
from ep_runtime_client.groups import estimate, load_and_skew
from ep_runtime_client.groups.held_group import HeldGroup


class Group:
    """An expert-parallel group: the devices of a mesh that exchange tokens, and their memory.

    `Session.create_group` makes it. Thread-safe.

    Attributes:
        name: unique among the groups of the user and job.
        spec: all settings of the group.
        mesh: the mesh that it was created on.
        session: the session that it belongs to.
        generation: the daemon's count of how often the group was formed; it grows each time.
        reattached: True if it uses the windows of an earlier process again.
    """

    def __init__(self, held: HeldGroup) -> None:
        # Some versions of JAX register options in this module, and then trace programs again. So
        # import it before our ops do, perhaps while the first step is traced.
        import jax.extend  # noqa: F401

        self.name = held.name
        self.spec = held.spec
        self.mesh = held.mesh
        self.session = held.client.session
        self.generation = held.generation
        self.reattached = held.reattached
        self._held = held
        self._load_and_skew = load_and_skew.LoadAndSkew(held.client, held.spec, held.generation)

    @property
    def closed(self) -> bool:
        """Whether the group has been closed."""
        return self._held.closed

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
        return self._held.register_layers([layer], replace=replace, call="register_layer")[0]

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
        return self._held.register_layers(layers, replace=replace, call="register_layers")

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
        return self._held.register_stack(layer, num_layers, replace=replace)

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
        return self._held.layer(name)

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
        return self._held.check(arrays)

    @eager
    def load(self) -> load_and_skew.GroupLoad:
        """Returns how even the experts are loaded: what `ep-runtime load` shows, as arrays.

        It counts the rows of all ranks since the group was formed.

        Returns:
            GroupLoad, whose `layers` has for each layer that was called `experts` int64 [E], the
            rows by expert, `ranks`, `max_mean`, `jain`, `fullest`, `dropped` and `extra_chunks`.
            `computed` has the rows that each rank computed, copies of experts included.

        Raises:
            InvalidArgumentError: under tracing, or the session has no daemon.
            RuntimeUnavailableError: the daemon does not answer.
            NotImplementedError: transport "xla", whose calls nobody counts.

        Cost: three RPCs, and as many on each node of a cluster. Nothing in a step.
        """
        self._held.require_open()
        return self._load_and_skew.load()

    @eager
    def skew(self) -> load_and_skew.GroupSkew:
        """Returns which rank the others wait for: what `ep-runtime skew` shows, as arrays.

        It looks at the time since the last call of `skew` in this process; the first call looks at
        the time since the group was formed here.

        Returns:
            GroupSkew: `slow` is the rank for which others wait most, or None; `holds_share` is
            [world size]; `ops` has each op's rates and matrices `waits` and `arrivals_ms` [world
            size, world size].

        Raises:
            EpRuntimeError: as `load`.
            NotImplementedError: as `load`.

        Cost: as `load`.
        """
        self._held.require_open()
        return self._load_and_skew.skew()

    def describe(self) -> dict[str, Any]:
        """Returns the settings and the state of the group as plain values.

        Cost: none; no RPC.
        """
        return self._held.describe()

    @eager
    def close(self) -> None:
        """Unmaps the group's windows and frees its memory at the daemon; later calls do nothing.

        It waits, for a bounded time, for calls that run. Programs that use the group's layers
        afterwards fail with StaleHandleError.

        Raises:
            InvalidArgumentError: under tracing.

        Cost: the wait, and one RPC.
        """
        self._held.close()

    def __repr__(self) -> str:
        return f"<Group {self.name!r} {self._held.state} generation={self.generation}>"
