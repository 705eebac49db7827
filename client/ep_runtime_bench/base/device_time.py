"""Measures calls by the device's own clock.

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

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ep_runtime_client.ops.kernels.ffi import ensure_registered

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


def slowest_rank_us(readings: jax.Array) -> list[float]:
    """Returns microseconds of each call on the slowest device of this process."""
    parts = [np.asarray(shard.data) for shard in readings.addressable_shards]
    return intervals_us(np.concatenate(parts)).max(axis=0).tolist()


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
