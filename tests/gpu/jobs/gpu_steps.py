"""Each process of the fault tests: runs steps through windows, exact to the bit."""

from __future__ import annotations

import hashlib
import os
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import block_ways
import jax
import jax.numpy as jnp
import numpy as np
from gpu.jobs import gpu_memory
from gpu.jobs.gpu_memory import call
from gpu.jobs.layouts import COUNT, TRANSPORT, TRIAL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime.v1 import group_service_pb2
from ep_runtime_client.daemons import transport

TOKENS, HIDDEN, TOP_K = 8, 64, 2
SETTINGS: dict[str, Any] = {
    "num_experts": 168 if COUNT == 8 else 12,  # on one to four ranks; on six to eight too
    "hidden_size": HIDDEN,
    "max_tokens_per_rank": TOKENS,
    "alignment": 8,
    "max_token_dtype": "float32",
    "op_timeout_s": 60.0,
    "retain_s": 60.0,
}
# Steps after which a process reports that it runs: compiling and capturing are over.
WARM_STEPS = 20
LONGEST_S = 60.0


class Steps:
    """A group over some devices of the job, and a step: dispatch, double the rows, combine.

    The step has no collective of XLA's: one of those would wait for a lost process for good.
    """

    top_k = TOP_K

    def __init__(
        self, session: ep.Session, name: str, devices: Sequence[Any], **settings: Any
    ) -> None:
        self.mesh = Mesh(np.array(devices), ("ep",))
        given = self._given = {**SETTINGS, "max_top_k": self.top_k, **settings}
        self._session, self._name = session, name
        layer = self.make_group()
        rng = np.random.default_rng(len(devices))
        count = TOKENS * len(devices)
        # Small integers: sums are exact in any order.
        self.tokens = self._put(rng.integers(1, 64, (count, HIDDEN)).astype(np.float32))
        rows = [rng.choice(given["num_experts"], self.top_k, replace=False) for _ in range(count)]
        self.topk_idx = self._put(np.array(rows, np.int32))
        self._step = self._program(layer)
        # Processes meet to form a group, because some tests' budgets are shorter than compiling.
        session.create_group(
            f"{name}-compiled", self.mesh, ep_axis="ep", transport="xla", **given
        ).close()

    def _program(self, layer: ep.EpLayer) -> Any:
        @jax.jit
        def step(tokens: Any, topk_idx: Any) -> Any:
            sent = ep.dispatch(layer, tokens, topk_idx)
            return ep.combine(layer, sent, sent.tokens * 2)

        return step.lower(self.tokens, self.topk_idx).compile()

    def make_group(self) -> ep.EpLayer:
        """Makes the group, again if it was closed, and returns its layer."""
        self.group = self._session.create_group(
            self._name, self.mesh, ep_axis="ep", transport=TRANSPORT, **self._given
        )
        self.layer = self.group.register_layer("moe/0", top_k=self.top_k)
        return self.layer

    def _put(self, array: Any) -> jax.Array:
        sharding = NamedSharding(self.mesh, PartitionSpec("ep"))
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    def start(self) -> jax.Array:
        """Enqueues a step."""
        return self._step(self.tokens, self.topk_idx)

    def shards_of(self, out: jax.Array) -> list[tuple[Any, Any]]:
        """(values, wanted values) of every shard that this process holds."""
        pairs = zip(out.addressable_shards, self.tokens.addressable_shards, strict=True)
        return [(np.asarray(got.data), np.asarray(x.data) * 2 * self.top_k) for got, x in pairs]

    def run(self) -> None:
        """One step, checked."""
        out = jax.block_until_ready(self.start())
        self.group.check()
        for got, want in self.shards_of(out):
            np.testing.assert_array_equal(got, want)

    def until_an_error(self, say: Callable[..., None]) -> dict[str, Any]:
        """Runs checked steps until one fails; returns its error as plain values,
        and when it came.
        """
        started, steps = time.monotonic(), 0
        try:
            with ep.translate_errors():
                while time.monotonic() - started < LONGEST_S:
                    self.run()
                    steps += 1
                    if steps == WARM_STEPS:
                        say(looping=True)
        except ep.EpRuntimeError as error:
            fields = {key: error.fields.get(key) for key in ("rank", "process", "layer", "op")}
            return {
                "ended": time.monotonic(),
                "kind": type(error).__name__,
                "text": str(error),
                "waited_s": error.fields.get("waited_s"),
                **fields,
            }
        return {"kind": "none", "steps": steps}


class BlockSteps(Steps):
    """The same step as a block call and its gradient: experts double values above zero."""

    def _program(self, layer: ep.EpLayer) -> Any:
        eye = np.eye(HIDDEN, dtype=np.float32)
        experts = self._put(np.stack([eye] * self._given["num_experts"]))
        params = ep.MoEParams(router=None, wi=experts, wo=2 * experts)
        weights = self._put(np.ones(self.topk_idx.shape, np.float32))

        @jax.jit
        def step(tokens: Any, topk_idx: Any, weights: Any, params: ep.MoEParams) -> Any:
            routing = ep.Routing(topk_idx, weights, None)

            def block(x: Any) -> Any:
                options: dict[str, Any] = {"gated": False, "activation": "relu"}
                return ep.moe(layer, x, params, routing=routing, **options)[0]

            y, pull = jax.vjp(block, tokens.astype(jnp.bfloat16))
            (grads,) = pull(jnp.ones_like(y))
            return (y + grads - 2 * self.top_k).astype(jnp.float32)

        given = (self.tokens, self.topk_idx, weights, params)
        (path,) = ep.explain(step, *given).paths
        assert TRIAL or path.path.startswith("cuda"), path
        compiled = step.lower(*given).compile()
        return lambda tokens, topk_idx: compiled(tokens, topk_idx, weights, params)


class ChunkSteps(BlockSteps):
    """The same in two chunks of the tokens, between nodes that send all rows."""

    top_k = 8

    def _program(self, layer: ep.EpLayer) -> Any:
        with block_ways.chunked(2):
            return super()._program(layer)


# Programs of steps by name; the last has room for one token's rows of every rank.
PROGRAMS: dict[str, tuple[type[Steps], dict[str, Any]]] = {
    "dispatch and combine": (Steps, {}),
    "block call": (BlockSteps, {}),
    "block call in parts": (BlockSteps, {"workspace": 1e-6}),
}


def of(
    program: str, session: ep.Session, name: str, devices: Sequence[Any], **settings: Any
) -> Steps:
    """Steps of a program of PROGRAMS."""
    steps, more = PROGRAMS[program]
    return steps(session, name, devices, **more, **settings)


class Windows:
    """Keeps the windows of a group in memory that outlives the group."""

    def __init__(self, session: ep.Session, group: ep.Group) -> None:
        client = session._client
        request = group_service_pb2.AcquireWindowsRequest(
            name=group.name, generation=group.generation
        )
        ticket = client.control.call(client.control.groups.AcquireWindows, request).ticket
        timeout_s = transport.MUTATE_TIMEOUT_S
        held = transport.redeem(client.place, client.token, ticket, timeout_s)
        self._fds = {int(item.world_rank): fd for item, fd in held}
        self._bytes = group.spec.ep_size * TOKENS * HIDDEN * 4  # rows of the first lane

    def digests(self) -> list[str]:
        """Returns a digest of each window, by world rank; "" if the window is all zero."""
        read = _host_bytes if TRIAL else _device_bytes
        found = [read(fd, self._bytes) for rank, fd in sorted(self._fds.items()) if rank >= 0]
        return [hashlib.sha256(data).hexdigest() if any(data) else "" for data in found]


def _host_bytes(fd: int, size: int) -> bytes:
    return os.pread(fd, size, 0)


def _device_bytes(fd: int, size: int) -> bytes:
    """Maps memory that the daemon made on a GPU for a moment; returns its first bytes."""
    from cuda.bindings import driver

    device = call(driver.cuDeviceGet, jax.local_devices()[0].local_hardware_id)
    call(driver.cuCtxPushCurrent, call(driver.cuDevicePrimaryCtxRetain, device))
    window = types.SimpleNamespace(bytes=size)
    state: dict[str, Any] = {"device": device, "fds": [(window, fd)]}
    gpu_memory.map_window(state)
    host = np.empty(size, np.uint8)
    call(driver.cuMemcpyDtoH, host.ctypes.data, state["window"][1], size)
    gpu_memory.unmap_window(state)
    call(driver.cuCtxPopCurrent)
    return host.tobytes()
