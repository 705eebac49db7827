"""Ops that go over rows of one device, as GB/s beside copies of the same run.

GB/s count the bytes that an op must read and write at least, of rows that groups have. The copy is
the faster one of two: an array handed back, and one negated, which is a kernel of XLA's. Each
subject is a program of its own, timed as `device_gemm` times its products; on CPU by the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ep_runtime_bench.base.device_time import CallTimer, gpu_clock
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.base.timing import in_turn, median
from ep_runtime_client.cli import render
from ep_runtime_client.cli.tables import Column

GPU_ROWS = 32768  # unless tokens say otherwise
CPU_ROWS = 2048
CPU_HIDDEN = 256
COLUMNS = (
    Column("subject", "SUBJECT"),
    Column("load", "LOAD"),
    Column("rows", "ROWS", "count"),
    Column("ms", "MS", "count"),
    Column("gb_s", "GB/S", "count"),
    Column("ratio_to_copy", "X COPY", "count"),
)

Program = Callable[..., Any]


class Timer(Protocol):
    """Microseconds of one call: the median of `repeats`."""

    def call_us(self, program: Program, operands: tuple[Any, ...], repeats: int) -> float: ...


class HostTimer:
    """By the host's clock, until the result is there."""

    def call_us(self, program: Program, operands: tuple[Any, ...], repeats: int) -> float:
        """The median of `repeats` calls."""
        call = {"": lambda: jax.block_until_ready(program(*operands))}
        return max(1e6 * median(in_turn(call, warmup=1, repeats=repeats)[""]), 1e-3)


@dataclasses.dataclass(frozen=True)
class Subject:
    """One program.

    Attributes:
        name: as the table says.
        load: how rows are spread over groups, or "".
        rows: that it works on.
        bytes_moved: that it must read and write; 0 where that says nothing.
        program: of the operands.
        operands: arrays.
    """

    name: str
    load: str
    rows: int
    bytes_moved: int
    program: Program
    operands: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class RowSizes:
    """What is measured: rows of a slab, and H."""

    rows: int
    hidden: int


def run(
    name: str, what: str, options: BenchOptions, subjects: Callable[[RowSizes], Iterable[Subject]]
) -> BenchReport:
    """Measures `subjects` on the first GPU, or on CPU."""
    if not options.on_gpus:
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices("cuda" if options.on_gpus else "cpu")[0]
    timer: Timer = CallTimer(gpu_clock) if options.on_gpus else HostTimer()
    with jax.default_device(device):
        rows = [*measure(options, timer, subjects(sizes_of(options)))]
    title = f"{what} on {device.device_kind}: {options.dtype}, medians of {options.repeats}"
    return BenchReport(name, title, COLUMNS, rows)


def sizes_of(options: BenchOptions) -> RowSizes:
    """Sizes that fit the device."""
    given = options.tokens_per_rank * options.top_k
    if options.on_gpus:
        return RowSizes(given or GPU_ROWS, options.hidden)
    return RowSizes(given or CPU_ROWS, min(options.hidden, CPU_HIDDEN))


def measure(
    options: BenchOptions, timer: Timer, subjects: Iterable[Subject]
) -> Iterator[dict[str, Any]]:
    """Rows of the table."""
    sizes = sizes_of(options)
    x = draw(0, options.dtype, sizes.rows, sizes.hidden)
    copies = {"copy: handed back": jnp.copy, "copy: negated": jnp.negative}
    fastest = 0.0
    for name, program in copies.items():
        row = _row(Subject(name, "", sizes.rows, 2 * x.nbytes, program, (x,)), options, timer)
        fastest = max(fastest, row["gb_s"])
        yield row
    for subject in subjects:
        row = _row(subject, options, timer)
        if row["gb_s"] is not None:
            row["ratio_to_copy"] = round(row["gb_s"] / max(fastest, 1e-9), 3)
        yield row


def draw(seed: int, dtype: str, *shape: int) -> jax.Array:
    """Normal values."""
    made = jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype)))
    drawn: jax.Array = made()
    return drawn


def _row(subject: Subject, options: BenchOptions, timer: Timer) -> dict[str, Any]:
    us = timer.call_us(jax.jit(subject.program), subject.operands, options.repeats)
    speed = round(subject.bytes_moved / us / 1e3, 1) if subject.bytes_moved else None
    render.err(f"{subject.name} {subject.load}: {us / 1e3:.4f} ms, {speed} GB/s")
    return {
        "subject": subject.name,
        "load": subject.load,
        "rows": subject.rows,
        "ms": round(us / 1e3, 4),
        "gb_s": speed,
        "ratio_to_copy": None,
    }
