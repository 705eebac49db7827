"""Dispatch and combine per transport and row size, in one process or in several.

Bytes are those of the rows delivered (dispatch) or read (combine): tokens x top_k x row. A
transport that sends a token once per rank moves fewer bytes between ranks, so its rate is higher.
Several processes start every call together, and the time of a call is the slowest one's.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from ep_runtime.errors import EpRuntimeError
from ep_runtime_bench.base.clients import warm_daemon
from ep_runtime_bench.base.options import BenchOptions, BenchReport, Sample
from ep_runtime_bench.movement.memcpy import MEMCPY
from ep_runtime_client.cli.tables import Column
from ep_runtime_client.jobs.members import Member, Members, reserved_coordinator, run_member

COLUMNS = (
    Column("op", "OP"),
    Column("row_bytes", "ROW BYTES", "count"),
    Column("tokens_per_rank", "TOKENS/RANK", "count"),
    Column("transport", "TRANSPORT"),
    Column("median_ms", "MEDIAN MS", "count"),
    Column("tokens_per_s", "TOKENS/S", "count"),
    Column("gb_per_s", "GB/S", "count"),
    Column("ratio_to_xla", "X XLA", "count"),
    Column("ratio_to_memcpy", "X MEMCPY", "count"),
    Column("min_ms", "MIN MS", "count", wide=True),
    Column("rows", "ROWS", "count", wide=True),
    Column("bytes", "BYTES", "bytes", wide=True),
)


def run(options: BenchOptions) -> BenchReport:
    """Measures every row size, all transports and memcpy in turns.

    Raises:
        EpRuntimeError: a process of several failed; its output is on the terminal.
    """
    if options.processes == 1:
        calls = importlib.import_module("ep_runtime_bench.movement.cpu_calls")
        samples: Sequence[Sample] = calls.measure(options, "embedded", Member())
    else:
        samples = slowest(measure_together(options, Sample))
    rows = list(_rows(options, samples))
    rows.sort(key=lambda row: options.benches.index(row["op"]))
    where = "one process" if options.processes == 1 else f"{options.processes} processes"
    title = (
        f"token movement: {options.devices} CPU devices in {where}, top-{options.top_k} of "
        f"{options.num_experts} experts, bf16, medians of {options.repeats}"
    )
    return BenchReport("movement", title, COLUMNS, rows)


_Sample = TypeVar("_Sample")


def measure_together(options: BenchOptions, kind: Callable[..., _Sample]) -> list[list[_Sample]]:
    """Returns the samples, of type `kind`, of every process of a job."""
    with (
        warm_daemon() as address,
        tempfile.TemporaryDirectory(prefix="ep-runtime-bench-") as directory,
        reserved_coordinator() as coordinator,
        Members(
            "ep_runtime_bench.movement.cpu_movement",
            {"options": options.to_dict(), "address": address},
            processes=options.processes,
            directory=Path(directory),
            coordinator=coordinator,
        ) as started,
    ):
        code = started.wait()
        if code:
            raise EpRuntimeError(f"the bench's processes ended with {code}")
        return [
            [kind(**one) for one in json.loads(path.read_text())]
            for path in sorted(Path(directory).glob("*.json"))
        ]


def slowest(found: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Returns one sample per call, with the seconds of the slowest process."""
    return [
        Sample(same[0].op, same[0].subject, same[0].row_bytes, [max(s) for s in seconds])
        for same in zip(*found, strict=True)
        for seconds in [zip(*(one.seconds for one in same), strict=True)]
    ]


def _rows(options: BenchOptions, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    calls = dict.fromkeys((sample.op, sample.row_bytes) for sample in samples)
    for op, row_bytes in calls:
        seconds = {
            sample.subject: sample.seconds
            for sample in samples
            if (sample.op, sample.row_bytes) == (op, row_bytes)
        }
        for subject in seconds:
            yield _row(options, op, row_bytes, subject, seconds)


def _row(
    options: BenchOptions,
    op: str,
    row_bytes: int,
    subject: str,
    samples: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    seconds = median(samples[subject])
    xla = median(samples["xla"]) if "xla" in samples else None
    rows = options.rows_for(row_bytes)
    return {
        "op": op,
        "transport": subject,
        "row_bytes": row_bytes,
        "tokens_per_rank": options.tokens_for(row_bytes),
        "rows": rows,
        "bytes": rows * row_bytes,
        "median_ms": round(seconds * 1e3, 3),
        "min_ms": round(min(samples[subject]) * 1e3, 3),
        "tokens_per_s": round(rows / options.top_k / seconds),
        "gb_per_s": round(rows * row_bytes / seconds / 1e9, 3),
        "ratio_to_xla": None if xla is None else round(xla / seconds, 2),
        "ratio_to_memcpy": round(median(samples[MEMCPY]) / seconds, 3),
    }


def work(order: dict[str, Any], member: Member) -> int:
    """Runs in one process of several: measures, and writes the samples for the parent."""
    said: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in order["options"].items()
    }
    options = BenchOptions(**said)
    name = "gpu_calls" if options.on_gpus else "cpu_calls"
    calls = importlib.import_module(f"ep_runtime_bench.movement.{name}")
    samples = calls.measure(options, order["address"], member)
    found = json.dumps([dataclasses.asdict(sample) for sample in samples])
    (Path(member.directory) / f"{member.index}.json").write_text(found)
    return 0


if __name__ == "__main__":
    run_member(work, "ep-runtime bench")
