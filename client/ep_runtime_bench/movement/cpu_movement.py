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
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from ep_runtime.errors import EpRuntimeError
from ep_runtime_bench.base.clients import warm_daemon
from ep_runtime_bench.base.options import BenchOptions, BenchReport, DeviceSample, Sample
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
    samples = measured(options, Sample)
    rows = [_row(options, sample, samples) for sample in samples]
    rows.sort(key=lambda row: options.benches.index(row["op"]))
    where = "one process" if options.processes == 1 else f"{options.processes} processes"
    title = (
        f"token movement: {options.devices} CPU devices in {where}, top-{options.top_k} of "
        f"{options.num_experts} experts, bf16, medians of {options.repeats}"
    )
    return BenchReport("movement", title, COLUMNS, rows)


_Sample = TypeVar("_Sample", Sample, DeviceSample)


def measured(options: BenchOptions, kind: type[_Sample]) -> Sequence[_Sample]:
    """Returns the samples, of type `kind`, of one process, or of the slowest process of a job.

    Raises:
        EpRuntimeError: a process of several failed; its output is on the terminal.
    """
    if options.processes == 1:
        return _measure(options, "embedded", Member())
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
        return slowest(
            [kind(**one) for one in json.loads(path.read_text())]
            for path in sorted(Path(directory).glob("*.json"))
        )


def slowest(found: Iterable[Sequence[_Sample]]) -> list[_Sample]:
    """Returns one sample per call; each item of its lists is the largest of all processes."""
    samples = []
    for same in zip(*found, strict=True):
        times = {
            name: [max(each) for each in zip(*(getattr(one, name) for one in same), strict=True)]
            for name, value in vars(same[0]).items()
            if isinstance(value, list)
        }
        samples.append(dataclasses.replace(same[0], **times))
    return samples


def _row(options: BenchOptions, sample: Sample, samples: Sequence[Sample]) -> dict[str, Any]:
    op, row_bytes = sample.op, sample.row_bytes
    alike = [each for each in samples if (each.op, each.row_bytes) == (op, row_bytes)]
    medians = {each.subject: median(each.seconds) for each in alike}
    seconds, xla = medians[sample.subject], medians.get("xla")
    rows = options.rows_for(row_bytes)
    return {
        "op": op,
        "transport": sample.subject,
        "row_bytes": row_bytes,
        "tokens_per_rank": options.tokens_for(row_bytes),
        "rows": rows,
        "bytes": rows * row_bytes,
        "median_ms": round(seconds * 1e3, 3),
        "min_ms": round(min(sample.seconds) * 1e3, 3),
        "tokens_per_s": round(rows / options.top_k / seconds),
        "gb_per_s": round(rows * row_bytes / seconds / 1e9, 3),
        "ratio_to_xla": None if xla is None else round(xla / seconds, 2),
        "ratio_to_memcpy": round(medians[MEMCPY] / seconds, 3),
    }


def work(order: dict[str, Any], member: Member) -> int:
    """Runs in one process of several: measures, and writes the samples for the parent."""
    said: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in order["options"].items()
    }
    samples = _measure(BenchOptions(**said), order["address"], member)
    found = json.dumps([dataclasses.asdict(sample) for sample in samples])
    (Path(member.directory) / f"{member.index}.json").write_text(found)
    return 0


def _measure(options: BenchOptions, address: str, member: Member) -> list[Any]:
    name = "gpu_calls" if options.on_gpus else "cpu_calls"
    calls: Any = importlib.import_module(f"ep_runtime_bench.movement.{name}")
    return list(calls.measure(options, address, member))


if __name__ == "__main__":
    run_member(work, "ep-runtime bench")
