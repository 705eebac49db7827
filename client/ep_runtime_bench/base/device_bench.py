"""A bench on GPUs in one process: its mesh, its programs, and their times by the device's clock.

A program makes n calls, each of which waits for the previous one, and reads the device's clock
between them (custom call `ep_clock_v1`, one thread that stores %globaltimer). An interval is the
time of one call: its kernels, and the launches that no kernel hides. It includes one reading of the
clock, which is measured alone (with calls that do nothing) and subtracted. Ranks are compared by
intervals, never by their clocks. The first call follows a `gate`, a call that waits for all ranks,
and a pause in which the host launches the rest. Its interval is dropped, because it has the
remaining skew between the ranks.

This needs neither a profiler nor its permissions, and works with and without XLA's command buffers;
no interval has time of the host.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_runtime_bench.base import routing
from ep_runtime_bench.base.options import BenchOptions, DeviceSample
from ep_runtime_client.cli import render
from ep_runtime_client.ops.kernels.ffi import ensure_registered
from ep_runtime_client.sessions.session import Session

AXIS = "ep"
ROWS = PartitionSpec(AXIS)
HOST_WARMUP = 3
ENOUGH_S = 0.7
LEAST = HOST_WARMUP + 2
COMPILERS = 16
Operands = Mapping[str, Any]
Program = Callable[[Any], Any]


def alone() -> None:
    """Does nothing, because a single process need not wait for others."""


class Programs:
    """Programs that are compiled ahead of the measurements, many at a time.

    A single process compiles in parallel; several compile one by one, all in the same order.
    """

    def __init__(self, parallel: bool) -> None:
        self._pool = ThreadPoolExecutor(COMPILERS if parallel else 1, "bench-compile")
        self._found: dict[Hashable, Future[Program]] = {}

    def add(self, key: Hashable, function: Program, operands: Any) -> None:
        """Starts to compile a program unless its key is known; `operands` may be abstract."""
        if key not in self._found:
            self._found[key] = self._pool.submit(_compiled, function, operands)

    def wait(self) -> None:
        """Waits until every added program is compiled or has failed."""
        for future in self._found.values():
            future.exception()

    def __getitem__(self, key: Hashable) -> Program:
        """Returns the compiled program. Raises the errors of its compilation."""
        return self._found[key].result()


def _compiled(function: Program, operands: Any) -> Program:
    return jax.jit(function).lower(operands).compile()


@dataclasses.dataclass
class Bench:
    """The state that all measurements of one process share.

    Attributes:
        clock: the devices' clock.
        start_together: a function that returns after every process has called it.
        with_ceiling: whether the link's ceiling can be measured.
        blocks: blocks of a kernel, by op and requested SMs.
    """

    options: BenchOptions
    session: Session
    mesh: Mesh
    clock: Clock
    start_together: Callable[[], object]
    with_ceiling: bool = True

    def __post_init__(self) -> None:
        self.samples: list[DeviceSample] = []
        self.blocks: dict[tuple[str, int], int] = {}
        self.programs = Programs(parallel=self.options.processes == 1)
        self._idx: dict[tuple[int, str], routing.Ints] = {}
        self._started = time.perf_counter()

    @property
    def spread(self) -> NamedSharding:
        """The sharding of dim 0 over the ranks."""
        return NamedSharding(self.mesh, ROWS)

    def idx(self, tokens: int, name: str) -> routing.Ints:
        """Returns the experts of all tokens, [tokens * N, K]."""
        if (tokens, name) not in self._idx:
            count, options = tokens * self.mesh.size, self.options
            self._idx[tokens, name] = routing.topk_idx(
                name, count, options.num_experts, options.top_k
            )
        return self._idx[tokens, name]

    def put(self, array: Any) -> jax.Array:
        """Puts the array on the mesh, dim 0 over the ranks; every process has the whole array."""
        return jax.make_array_from_callback(array.shape, self.spread, lambda part: array[part])

    def abstract(self, *dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """Describes an array, for compiling without it; sharded like the bench's arrays."""
        return jax.ShapeDtypeStruct(dims, dtype, sharding=self.spread)

    def mapped(self, body: Program) -> Program:
        """Maps `body` over devices, on the local blocks of operands sharded on dim 0."""
        settings: dict[str, Any] = {"in_specs": (ROWS,), "out_specs": ROWS, "check_vma": False}
        return jax.shard_map(body, mesh=self.mesh, **settings)

    def device_us(self, program: Program, operands: Any, repeats: int) -> list[float]:
        """Returns intervals on this process's slowest device of up to `repeats` runs of a chain,
        after a warm-up run."""
        found: list[float] = []
        for repeat, (readings, _) in enumerate(self._runs(program, operands, repeats + 1)):
            if repeat:
                parts = [np.asarray(shard.data) for shard in readings.addressable_shards]
                found += intervals_us(np.concatenate(parts)).max(axis=0).tolist()
        return found

    def host_s(self, program: Program, operands: Any, repeats: int) -> list[float]:
        """Returns seconds of up to `repeats` calls, each waited for, after HOST_WARMUP others."""
        runs = self._runs(program, operands, repeats + HOST_WARMUP)
        return [seconds for _, seconds in runs][HOST_WARMUP:]

    def _runs(self, program: Program, operands: Any, count: int) -> Iterator[tuple[Any, float]]:
        """Yields (result, seconds) of calls that all processes start together.

        Yields fewer than `count` if a single process would take longer than ENOUGH_S, because slow
        subjects need no more samples. Several processes could not agree on when to stop.
        """
        ends = time.perf_counter() + ENOUGH_S
        for number in range(count):
            enough = number >= LEAST and self.options.processes == 1
            if enough and time.perf_counter() > ends:
                return
            self.start_together()
            started = time.perf_counter()
            result = jax.block_until_ready(program(operands))
            yield result, time.perf_counter() - started

    def say(self, text: str) -> None:
        """Writes a progress line, because the table comes only at the end."""
        if jax.process_index() == 0:
            render.err(f"{time.perf_counter() - self._started:6.1f} s  {text}")

    def add(self, sample: DeviceSample) -> None:
        """Adds a sample and writes its line."""
        self.samples.append(sample)
        self.say(
            f"{sample.subject:8}{sample.op:17}T={sample.tokens:<6}{sample.routing:8}"
            f"{sample.precision:6}{sample.blocks or sample.sms:4} SMs  "
            f"p50 {median(sample.kernel_us):.1f} us"
        )


def meeting(mesh: Mesh) -> Callable[[], object]:
    """Returns a function that returns after every process has called it."""
    spread = NamedSharding(mesh, ROWS)
    ones = jax.jit(lambda: jnp.ones(mesh.size), out_shardings=spread)()
    total = jax.jit(jnp.sum)
    return lambda: jax.block_until_ready(total(ones))


def token_rows(bench: Bench, tokens: int) -> jax.Array:
    """Makes x [tokens * N, H] with values in [-1, 1), on the devices."""
    shape = (tokens * bench.mesh.size, bench.options.hidden)

    def values() -> jax.Array:
        row, column = (lax.broadcasted_iota(jnp.uint32, shape, dim) for dim in (0, 1))
        bits = row * jnp.uint32(0x85EBCA77) ^ column * jnp.uint32(0xC2B2AE3D)
        bits = (bits ^ bits >> 15) * jnp.uint32(0x2C1B3C6D)
        wide: jax.Array = (bits >> 8).astype(jnp.float32) / (1 << 23) - 1
        return wide.astype(bench.options.dtype)

    return jax.jit(values, out_shardings=bench.spread)()


# (token int32 [1], arrays, hold_ns) -> (token, nanoseconds uint32 [2], low word first). The clock
# is read after the arrays are ready; users of the returned token run after that and hold_ns.
Clock = Callable[[jax.Array, Sequence[jax.Array], int], tuple[jax.Array, jax.Array]]
# Time for the host to launch a whole chain; NCCL's own thread launches NCCL's kernels.
HOLD_NS = 500_000
LONG_HOLD_NS = 5_000_000
WARMUP = 2
# (token, operands of this device) -> results; every result must depend on the token.
DeviceOp = Callable[[jax.Array, Any], Any]


def gpu_clock(
    token: jax.Array, arrays: Sequence[jax.Array], hold_ns: int
) -> tuple[jax.Array, jax.Array]:
    """Reads the clock of an NVIDIA GPU: its Clock."""
    ensure_registered("cuda")
    shapes = (jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32))
    after, now = jax.ffi.ffi_call("ep_clock_v1", shapes)(token, *arrays, hold_ns=np.int64(hold_ns))
    return after, now


def nothing(token: jax.Array, operands: Any) -> tuple[()]:
    """A DeviceOp whose interval is one reading of the clock."""
    del token, operands
    return ()


def chain(
    clock: Clock,
    token: Callable[[], jax.Array],
    gate: DeviceOp,
    op: DeviceOp,
    calls: int,
    hold_ns: int = HOLD_NS,
) -> Callable[[Any], jax.Array]:
    """Returns a function of this device's operands -> readings uint32 [1, calls + 2, 2]."""

    def body(operands: Any) -> jax.Array:
        after = token()
        after, _ = clock(after, jax.tree.leaves(gate(after, operands)), hold_ns)
        after, now = clock(after, (), 0)
        readings = [now]
        for _ in range(calls + 1):
            after, now = clock(after, jax.tree.leaves(op(after, operands)), 0)
            readings.append(now)
        return jnp.stack(readings)[None]

    return body


def intervals_us(readings: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Converts readings [N, calls + 2, 2] to microseconds [N, calls]."""
    words = readings.astype(np.int64)
    nanoseconds = words[..., 0] + (words[..., 1] << 32)
    return np.diff(nanoseconds, axis=1)[:, 1:] / 1e3


class CallTimer:
    """Measures calls of programs that take much longer than their launch.

    It reads the clock between calls, in stream order: an interval is one call, one reading and the
    launches of both.
    """

    def __init__(self, clock: Clock) -> None:
        self._hold = jax.jit(lambda token: clock(token, (), HOLD_NS))
        self._read = jax.jit(lambda token, arrays: clock(token, jax.tree.leaves(arrays), 0))

    def call_us(
        self, program: Callable[..., Any], operands: tuple[Any, ...], repeats: int
    ) -> float:
        """Returns microseconds of one call, the median of `repeats`."""
        for _ in range(WARMUP):
            jax.block_until_ready(program(*operands))
        token, _ = self._hold(jnp.zeros(1, jnp.int32))
        token, now = self._read(token, ())
        readings = [now]
        for _ in range(repeats + 1):
            token, now = self._read(token, program(*operands))
            readings.append(now)
        return max(float(median(intervals_us(np.stack(readings)[None])[0])), 1e-3)
