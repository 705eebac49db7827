"""Runs a group on memfds of this process, and its custom calls inside `jax.shard_map`."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from native_memory import Memory, make_spec, open_group

from ep_runtime import board, layer_specs, native, native_abi
from ep_runtime_client.ops.calls.plan import PlanArrays
from ep_runtime_client.ops.kernels.ffi import ensure_registered

_names = itertools.count()
FINGERPRINT = 12345
PLAN_NAMES = PlanArrays._fields


class NativeGroup:
    """A group's windows, board and one layer; ep is the mesh's last axis, world the arrays' first.

    Args:
        axes: mesh axes and sizes, "ep" last.
        layer: settings of the layer: top_k, alignment, in_flight.
        num_layers: more than 1 registers layer ids base .. base + num_layers - 1.
        memory: made by another process; None to make it here.
        local_ranks: world ranks of this process; None for all.
        settings: of make_group_spec.
    """

    def __init__(
        self,
        axes: dict[str, int],
        *,
        top_k: int = 2,
        alignment: int = 1,
        in_flight: int = 1,
        num_layers: int = 1,
        generation: int = 1,
        debug: bool = False,
        memory: Memory | None = None,
        local_ranks: list[int] | None = None,
        **settings: Any,
    ) -> None:
        settings.setdefault("name", f"native{next(_names)}")
        self.spec = make_spec(axes, max_top_k=top_k, alignment=alignment, **settings)
        self.layout = board.board_layout(self.spec)
        self.axes, self.top_k, self.alignment = axes, top_k, alignment
        devices = np.array(jax.devices("cpu")[: self.spec.world_size])
        self.mesh = Mesh(devices.reshape([*axes.values()]), [*axes])
        self.layer_id = layer_specs.layer_id(self.spec.name, "moe")
        ensure_registered()
        given = {"debug": debug, "local_ranks": local_ranks}
        self.board, self.number = open_group(self.spec, generation, memory, **given)
        self.add_layers(in_flight, num_layers)

    def add_layers(self, in_flight: int = 1, num_layers: int = 1) -> None:
        layers = [
            native_abi.LayerStruct(
                id=self.layer_id + i,
                name=b"moe[%d]" % i,
                fingerprint=FINGERPRINT,
                top_k=self.top_k,
                alignment=self.alignment,
                in_flight=in_flight,
                handle_base=i * in_flight,
            )
            for i in range(num_layers)
        ]
        native.library().add_layers(self.number, layers)

    def check(self) -> str | None:
        return native.library().check_group(self.number)

    def close(self) -> None:
        native.library().close_group(self.number)

    def __enter__(self) -> NativeGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def partition(self) -> PartitionSpec:
        return PartitionSpec(tuple(self.axes))

    def sharded(self, function: Any, jit: bool = True) -> Any:
        """Turns a function of local blocks into one of arrays with a leading world dim."""

        def local(*args: Any) -> Any:
            out = function(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: x[None], out)

        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=self.partition,
            out_specs=self.partition,
            check_vma=False,
        )
        return jax.jit(mapped) if jit else mapped

    def put(self, array: Any) -> jax.Array:
        """A host array with a leading world dim, one block per device."""
        array = np.asarray(array)
        sharding = jax.sharding.NamedSharding(self.mesh, self.partition)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def call(
        self,
        target: str,
        results: Any,
        *operands: jax.Array,
        index: Any = 0,
        handle: int = 0,
        rank: Any = None,
        fingerprint: int = FINGERPRINT,
        **attributes: Any,
    ) -> Any:
        """One custom call on this device's blocks; only inside `sharded`."""
        if rank is None:
            rank = jax.lax.axis_index(tuple(self.axes))
        return jax.ffi.ffi_call(target, results)(
            jnp.asarray(rank, jnp.int32).reshape(1),
            jnp.asarray(index, jnp.int32).reshape(1),
            *operands,
            layer_id=np.int64(self.layer_id),
            fingerprint=np.int64(fingerprint),
            handle=np.int64(handle),
            **attributes,
        )

    def prepare(self, topk_idx: jax.Array, capacity: int | None = None, **options: Any) -> Any:
        tokens, top_k = topk_idx.shape
        rows = capacity or self.spec.recv_capacity_per_rank
        ranks, experts = self.spec.ep_size, self.spec.experts_per_rank
        dims = ((tokens, top_k), (tokens, top_k), (ranks, 4), (ranks * tokens + 1,), (rows,))
        dims += ((rows,), (experts,), (experts,), (1,))
        shapes = tuple(jax.ShapeDtypeStruct(d, jnp.int32) for d in dims)
        return tuple(self.call("ep_prepare_v1", shapes, topk_idx, **options))

    def dispatch(self, tokens: Any, weights: Any, plan: Any, **options: Any) -> Any:
        rows = plan[4].shape[0]
        shapes = (
            jax.ShapeDtypeStruct((rows, tokens.shape[1]), tokens.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        )
        weights = jnp.zeros((0, 0), jnp.float32) if weights is None else weights
        return self.call("ep_dispatch_v1", shapes, tokens, weights, *plan, **options)

    def combine(self, rows: Any, weights: Any, plan: Any, **options: Any) -> Any:
        shape = jax.ShapeDtypeStruct((plan[0].shape[0], rows.shape[1]), rows.dtype)
        weights = jnp.zeros(0, jnp.float32) if weights is None else weights
        return self.call("ep_combine_v1", shape, rows, weights, *plan, **options)

    def dispatch_bwd(self, d_recv: Any, d_weights: Any, plan: Any, **options: Any) -> Any:
        shapes = (
            jax.ShapeDtypeStruct((plan[0].shape[0], d_recv.shape[1]), d_recv.dtype),
            jax.ShapeDtypeStruct(plan[0].shape, jnp.float32),
        )
        return self.call("ep_dispatch_bwd_v1", shapes, d_recv, d_weights, *plan, **options)

    def combine_bwd(self, grad: Any, rows: Any, weights: Any, plan: Any, **options: Any) -> Any:
        capacity = plan[4].shape[0]
        shapes = (
            jax.ShapeDtypeStruct((capacity, grad.shape[1]), grad.dtype),
            jax.ShapeDtypeStruct((0 if rows is None else capacity,), jnp.float32),
        )
        rows = jnp.zeros((0, 0), grad.dtype) if rows is None else rows
        weights = jnp.zeros(0, jnp.float32) if weights is None else weights
        return self.call("ep_combine_bwd_v1", shapes, grad, rows, weights, *plan, **options)
