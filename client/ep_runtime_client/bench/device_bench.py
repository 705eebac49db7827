"""One process's view of a bench on GPUs: mesh, programs, and how they are timed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_runtime_client.bench import device_time, routing
from ep_runtime_client.bench.options import BenchOptions, DeviceSample
from ep_runtime_client.bench.timing import median
from ep_runtime_client.cli import render
from ep_runtime_client.members import Member
from ep_runtime_client.session import Session

AXIS = "ep"
ROWS = PartitionSpec(AXIS)
HOST_WARMUP = 3

Operands = dict[str, Any]


def alone() -> None:
    """One process is together as it is."""


@dataclasses.dataclass
class Bench:
    """One process's view of a run.

    Attributes:
        clock: of the devices.
        start_together: returns once every process is here.
        with_ceiling: the link's ceiling can be measured.
    """

    options: BenchOptions
    session: Session
    mesh: Mesh
    clock: device_time.Clock
    start_together: Callable[[], object]
    with_ceiling: bool = True

    def __post_init__(self) -> None:
        self.samples: list[DeviceSample] = []
        self._programs: dict[Any, Any] = {}
        self._idx: dict[tuple[int, str], routing.Ints] = {}
        self._started = time.perf_counter()

    def program(self, key: Any, make: Callable[[], Callable[..., Any]]) -> Any:
        """The program of that name, jitted when first asked for."""
        if key not in self._programs:
            self._programs[key] = jax.jit(make())
        return self._programs[key]

    def idx(self, tokens: int, name: str) -> routing.Ints:
        """Experts of all tokens, [tokens * N, K]."""
        if (tokens, name) not in self._idx:
            count, options = tokens * self.mesh.size, self.options
            self._idx[tokens, name] = routing.topk_idx(
                name, count, options.num_experts, options.top_k
            )
        return self._idx[tokens, name]

    def put(self, array: Any) -> jax.Array:
        """The array on the mesh, dim 0 over the ranks; every process holds all of it."""
        sharding = NamedSharding(self.mesh, ROWS)
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    def mapped(self, body: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`body` once per device on its blocks of the operands, all spread on dim 0."""
        settings: dict[str, Any] = {"in_specs": (ROWS,), "out_specs": ROWS, "check_vma": False}
        return jax.shard_map(body, mesh=self.mesh, **settings)

    def device_us(self, program: Any, operands: Operands, repeats: int) -> list[float]:
        """Intervals of `repeats` runs of a chain, after one that compiles and warms."""
        found: list[float] = []
        for repeat in range(repeats + 1):
            self.start_together()
            readings = jax.block_until_ready(program(operands))
            if repeat:
                found += device_time.slowest_rank_us(readings)
        return found

    def host_s(self, call: Callable[[], object], repeats: int) -> list[float]:
        """Seconds of `repeats` calls, each waited for, after HOST_WARMUP that warm."""
        found = []
        for repeat in range(repeats + HOST_WARMUP):
            self.start_together()
            started = time.perf_counter()
            jax.block_until_ready(call())
            if repeat >= HOST_WARMUP:
                found.append(time.perf_counter() - started)
        return found

    def add(self, sample: DeviceSample) -> None:
        """Keeps the figures, and shows that they are there: a table comes only at the end."""
        self.samples.append(sample)
        if jax.process_index() == 0 and sample.kernel_us:
            render.err(
                f"{time.perf_counter() - self._started:6.1f} s  {sample.subject:8}"
                f"{sample.op:17}T={sample.tokens:<6}{sample.routing:8}{sample.precision:6}"
                f"{sample.sms:4} SMs  p50 {median(sample.kernel_us):.1f} us"
            )


def start_gpus(options: BenchOptions, member: Member) -> Mesh:
    """The GPUs of this process and, where there are several processes, jax.distributed."""
    if member.processes > 1:
        each = options.devices // member.processes
        jax.distributed.initialize(
            member.coordinator,
            num_processes=member.processes,
            process_id=member.index,
            local_device_ids=range(member.index * each, (member.index + 1) * each),
        )
    return Mesh(np.array(jax.devices("gpu")[: options.devices]), (AXIS,))


def meeting(mesh: Mesh) -> Callable[[], object]:
    """A function that returns once every process has called it."""
    spread = NamedSharding(mesh, ROWS)
    ones = jax.jit(lambda: jnp.ones(mesh.size), out_shardings=spread)()
    total = jax.jit(jnp.sum)
    return lambda: jax.block_until_ready(total(ones))


def token_rows(bench: Bench, tokens: int) -> jax.Array:
    """x [tokens * N, H] with values in [-1, 1), made on the devices."""
    shape = (tokens * bench.mesh.size, bench.options.hidden)
    spread = NamedSharding(bench.mesh, ROWS)

    def values() -> jax.Array:
        row, column = (lax.broadcasted_iota(jnp.uint32, shape, dim) for dim in (0, 1))
        bits = row * jnp.uint32(0x85EBCA77) ^ column * jnp.uint32(0xC2B2AE3D)
        bits = (bits ^ bits >> 15) * jnp.uint32(0x2C1B3C6D)
        wide: jax.Array = (bits >> 8).astype(jnp.float32) / (1 << 23) - 1
        return wide.astype(bench.options.dtype)

    x: jax.Array = jax.jit(values, out_shardings=spread)()
    return x
