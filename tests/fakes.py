"""Stand-ins that let tests run one layer of the project without the layers below."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import native_memory
import numpy as np
import pytest
from jax.sharding import Mesh

from ep_runtime import layer_specs, native, specs, wire
from ep_runtime.errors import StaleHandleError
from ep_runtime_client.base import jax_state
from ep_runtime_client.base.layers import EpLayer, LayerStack, live_groups
from ep_runtime_client.groups import registrations
from ep_runtime_client.ops.kernels import ffi

_generations = itertools.count(1)


def mesh_of(axes: dict[str, int], *, explicit: bool = False) -> Mesh:
    """Makes a mesh of the first devices with these axes."""
    devices = np.array(jax.devices()[: int(np.prod([*axes.values()]))])
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return Mesh(devices.reshape([*axes.values()]), [*axes], axis_types=(kind,) * len(axes))


class LocalGroup:
    """A group without a daemon: windows and board are memfds of this process.

    Has what the ops look at (name, spec, mesh, closed) and what tests register layers with.
    """

    def __init__(self, spec: specs.GroupSpec, mesh: Mesh, *, debug: bool = False) -> None:
        self.name, self.spec, self.mesh = spec.name, spec, mesh
        self.session = None
        self.group = self  # here the group's record and the users' group are the same object
        self.closed = False
        self.generation = next(_generations)
        self.native_group: int | None = None
        self.board: mmap.mmap | None = None
        self._handles = 0
        self._layers: dict[str, EpLayer | LayerStack] = {}
        if spec.transport == "memfd":
            ffi.ensure_registered()
            opened = native_memory.open_group(spec, self.generation, debug=debug)
            self.board, self.native_group = opened
        live_groups.add(self)  # type: ignore[arg-type]

    def require_layer(self, layer: EpLayer) -> None:
        if self.closed:
            raise StaleHandleError(f"layer {layer.name!r}: group {self.name!r} was closed")

    @property
    def layer_names(self) -> list[str]:
        return sorted(self._layers)

    def register_layer(self, name: str, **settings: Any) -> EpLayer:
        filled = layer_specs.check_layer(self.spec, layer_specs.LayerSpec(name, **settings))
        layer = EpLayer(self.spec, filled, layer_specs.layer_id(self.name, name))
        self._add(layer, wire.RegisteredLayer(filled, 0, layer.base_id, self._handles))
        return layer

    def register_layer_stack(self, name: str, num_layers: int, **settings: Any) -> LayerStack:
        filled = layer_specs.check_layer(self.spec, layer_specs.LayerSpec(name, **settings))
        base = layer_specs.stack_base_id(self.name, name)
        stack = LayerStack(self.spec, filled, num_layers, base)
        self._add(stack, wire.RegisteredLayer(filled, num_layers, base, self._handles))
        return stack

    def _add(self, layer: EpLayer | LayerStack, item: wire.RegisteredLayer) -> None:
        self._layers[layer.name] = layer
        if self.native_group is not None:
            native.library().add_layers(self.native_group, registrations.native_rows(layer, item))
            self._handles += item.num_handles

    def close(self) -> None:
        if self.closed:
            return
        if self.native_group is not None:
            jax_state.settle(self.mesh.devices.ravel())
        self.closed = True
        live_groups.remove(self)  # type: ignore[arg-type]
        if self.native_group is not None:
            native.library().close_group(self.native_group)


MakeGroup = Callable[..., LocalGroup]  # the fixture `make_group`


def local_group(
    axes: dict[str, int] | None = None,
    *,
    mesh: Mesh | None = None,
    debug: bool = False,
    **settings: Any,
) -> LocalGroup:
    """Makes a small group on a mesh of `axes`, by default 8 ranks of one EP group.

    With `node_size`, as if on several nodes, whose windows are all here; at most what divides.
    """
    mesh = mesh or mesh_of(axes or {"ep": 8})
    defaults: dict[str, Any] = {
        "name": f"group{next(_generations)}",
        "ep_axis": "ep",
        "num_experts": 16,
        "hidden_size": 16,
        "max_tokens_per_rank": 16,
        "max_top_k": 8,
        "max_token_dtype": "float32",
        "alignment": 8,
        "transport": "xla",
        "op_timeout_s": 30.0,
    }
    mesh_axes = tuple(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    given = defaults | settings
    if given.get("node_size"):
        sizes = [dict(mesh_axes)[str(axis)] for axis in np.atleast_1d(given["ep_axis"])]
        given["node_size"] = math.gcd(given["node_size"], math.prod(sizes))
    spec = specs.make_group_spec(mesh_axes=mesh_axes, **given)
    return LocalGroup(spec, mesh, debug=debug)


def module_group(axes: dict[str, int], **settings: Any) -> Any:
    """A fixture: `local_group` over memfd for the tests of one module."""

    @pytest.fixture(scope="module")
    def group() -> Iterator[LocalGroup]:
        made = local_group(axes, transport="memfd", **settings)
        yield made
        made.close()

    return group
