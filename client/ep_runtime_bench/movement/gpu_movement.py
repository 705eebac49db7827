"""Dispatch and combine on GPUs: times, bytes per second, and ratios to the link's ceiling.

Kernel time is a call's time on the device by the device's own clock (`device_bench.py`); step time
is that of one jitted call on the host until its result is ready. Both are the slowest rank's, p50
and p99 over the timed calls. Rates use kernel p50 and are per rank. Logical bytes count every
(token, slot) row. Physical bytes cross a link: each token once per distinct remote rank, whatever
was sent, so that rates of transports that send more are comparable; exact combine sends f32, twice
the bytes of 2-byte rows. Physical rates are the mean rank's; "busiest" is the link with most bytes,
in its busier direction. The ceiling is a kernel that only copies these rows, on as many blocks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from ep_runtime.layout import scaled_bytes
from ep_runtime_bench.base import routing
from ep_runtime_bench.base.options import (
    CEILING,
    PLAIN,
    BenchOptions,
    BenchReport,
    DeviceSample,
)
from ep_runtime_bench.base.timing import quantile
from ep_runtime_bench.movement import cpu_movement
from ep_runtime_client.cli.tables import Column

COLUMNS = (
    Column("op", "OP"),
    Column("tokens", "T", "count"),
    Column("routing", "ROUTING"),
    Column("precision", "SUMS"),
    Column("transport", "TRANSPORT"),
    Column("sms", "SMS", "count"),
    Column("kernel_p50_us", "KERNEL P50 US", "count"),
    Column("kernel_p99_us", "P99", "count"),
    Column("step_p50_us", "STEP P50 US", "count"),
    Column("step_p99_us", "P99", "count"),
    Column("logical_gb_per_s", "LOGICAL GB/S", "count"),
    Column("physical_gb_per_s", "PHYSICAL GB/S", "count"),
    Column("busiest_gb_per_s", "BUSIEST", "count"),
    Column("ratio_to_ceiling", "X CEILING", "count"),
    Column("ratio_to_xla", "X XLA", "count"),
    Column("ratio_to_plain", "X ALL-TO-ALL", "count"),
)


def run(options: BenchOptions) -> BenchReport:
    """Measures every case of every transport.

    Raises:
        EpRuntimeError: a process of several failed; its output is on the terminal.
    """
    samples = cpu_movement.measured(options, DeviceSample)
    clock_us = min(median(s.kernel_us) for s in samples if s.op == "clock") if samples else 0.0
    where = "one process" if options.processes == 1 else f"{options.processes} processes"
    title = (
        f"token movement: {options.devices} GPUs in {where}, H={options.hidden} {options.dtype}, "
        f"top-{options.top_k} of {options.num_experts} experts; a reading of the clock, "
        f"{clock_us:.2f} us, is taken off kernel times"
    )
    return BenchReport("movement", title, COLUMNS, make_rows(options, samples))


def make_rows(options: BenchOptions, samples: Sequence[DeviceSample]) -> list[dict[str, Any]]:
    """Makes the table's rows: every case after its ceiling, ours before the peers."""
    clock_us = [median(s.kernel_us) for s in samples if s.op == "clock"]
    table = _Table(options, samples, clock_us[0] if clock_us else 0.0)
    return [*table.rows()]


class _Table:
    def __init__(
        self, options: BenchOptions, samples: Sequence[DeviceSample], clock_us: float
    ) -> None:
        self._options, self._clock_us = options, clock_us
        self._samples = [s for s in samples if s.op != "clock"]

    def rows(self) -> Iterator[dict[str, Any]]:
        order = ["prepare", "dispatch", "combine", "pair"]
        subjects = [CEILING, PLAIN, *self._options.transports]
        key = lambda s: (  # noqa: E731 - the order of the table
            order.index(s.op),
            s.tokens,
            self._options.routing.index(s.routing),
            subjects.index(s.subject),
        )
        for sample in sorted(self._samples, key=key):
            yield self._row(sample)

    def _row(self, sample: DeviceSample) -> dict[str, Any]:
        p50 = self._kernel_us(sample)
        row: dict[str, Any] = {
            "op": sample.op,
            "tokens": sample.tokens,
            "routing": sample.routing,
            "precision": sample.precision,
            "transport": sample.subject,
            "sms": sample.blocks or sample.sms or None,
            "kernel_p50_us": round(p50, 1),
            "kernel_p99_us": round(quantile(sample.kernel_us, 0.99) - self._clock_us, 1),
            **self._steps(sample),
            **self._rates(sample, p50),
            "ratio_to_ceiling": self._ratio_to_ceiling(sample, p50),
            "kernel_us": [round(us, 3) for us in sample.kernel_us],
            "step_us": [round(s * 1e6, 1) for s in sample.step_s],
            "clock_us": round(self._clock_us, 3),
            "sms_asked": sample.sms,
            "network_bytes": sample.network_rows * self._options.row_bytes_on_gpus,
            "network_least_bytes": sample.network_least * self._options.row_bytes_on_gpus,
        }
        for name, subject in (("xla", "xla"), ("plain", PLAIN)):
            us = self._us_of(subject, sample)
            row[f"ratio_to_{name}"] = None if us is None else round(us / p50, 2)
        return row

    def _kernel_us(self, sample: DeviceSample) -> float:
        return max(median(sample.kernel_us) - self._clock_us, 1e-3)

    def _steps(self, sample: DeviceSample) -> dict[str, float]:
        if not sample.step_s:
            return {}
        return {
            "step_p50_us": round(median(sample.step_s) * 1e6, 1),
            "step_p99_us": round(quantile(sample.step_s, 0.99) * 1e6, 1),
        }

    def _rates(self, sample: DeviceSample, p50: float) -> dict[str, float]:
        if sample.op == "prepare":
            return {}
        options = self._options
        traffic = _traffic(options, sample.tokens, sample.routing)
        sent = bytes_of(options, sample)
        passes = 2 if sample.op == "pair" else 1
        slots = traffic.slots / options.devices * options.row_bytes_on_gpus * passes
        rates = {
            "logical_gb_per_s": slots,
            "physical_gb_per_s": traffic.remote_rows_per_rank * sent,
            "busiest_gb_per_s": traffic.busiest_rows * sent,
        }
        return {name: round(count / p50 / 1e3, 1) for name, count in rates.items()}

    def _ratio_to_ceiling(self, sample: DeviceSample, p50: float) -> float | None:
        """Returns the ratio of bytes per second to the ceiling with the same blocks and routing."""
        if sample.op not in ("dispatch", "combine") or sample.subject in (PLAIN, "nccl", "xla"):
            return None
        us = self._us_of(CEILING, sample, "sms")
        factor = bytes_of(self._options, sample) / self._options.row_bytes_on_gpus
        return None if us is None else round(us * factor / p50, 3)

    def _us_of(self, subject: str, sample: DeviceSample, *more: str) -> float | None:
        """Returns `subject`'s kernel time with the sample's op, tokens, routing and `more`."""
        case = operator.attrgetter("op", "tokens", "routing", *more)
        alike = (each for each in self._samples if case(each) == case(sample))
        found = (self._kernel_us(each) for each in alike if each.subject == subject)
        return None if sample.subject == CEILING else next(found, None)


def bytes_of(options: BenchOptions, sample: DeviceSample) -> int:
    """Returns the bytes that cross a link for one (token, remote rank)."""
    row_bytes = options.row_bytes_on_gpus
    if sample.op == "pair":
        return row_bytes + _sum_bytes(options, sample)
    return _sum_bytes(options, sample) if sample.op == "combine" else row_bytes


def _sum_bytes(options: BenchOptions, sample: DeviceSample) -> int:
    """Returns the bytes of a partial sum."""
    if sample.subject == CEILING or sample.precision == "fast":
        return options.row_bytes_on_gpus
    return options.hidden * 4 if sample.precision == "exact" else scaled_bytes(options.hidden)


@functools.cache
def _traffic(options: BenchOptions, tokens: int, name: str) -> routing.Traffic:
    ranks, experts = options.devices, options.num_experts
    idx = routing.topk_idx(name, tokens * ranks, experts, options.top_k)
    return routing.traffic(idx, ranks, experts)
