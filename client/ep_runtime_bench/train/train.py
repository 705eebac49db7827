"""A whole training step compared with plain JAX: time, tokens/s, memory, and time by kernel.

The model is a decoder whose layers a scan runs: attention, an MoE block, a head, AdamW. Ours has
room for any routing, or with a capacity factor for that multiple of a rank's even share. "stock
padded" drops tokens past 1.25 times an expert's even share and with remat saves nothing. "torch" is
the model in PyTorch, a process per device, and drops none. A step is one of six consecutive ones.
Memory is the peak of the fullest device plus our windows, weights and moments included. ZEROS and
COPIES are kernels on device 0 that fill or copy, by their names; IDLE is time without a kernel
there. Waits for slower ranks are part of our kernels' times.

--commit-every N measures steps with copies of the state (`ep.distributed.State`) and without, in
turns. A round has N steps, and one copy, which must have ended too. EXPOSED is the difference.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from ep_runtime_bench.base import clients, speeds
from ep_runtime_bench.base.moe_cases import PADDED, TORCH, Profile, of_all, settings
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.base.train_cases import (
    CPU_MODELS,
    MODELS,
    REMATS,
    ROUTINGS,
    Trained,
    TrainOrder,
)
from ep_runtime_bench.moe.moe import KERNEL_COLUMNS, kernel_rows_of
from ep_runtime_client.cli import render
from ep_runtime_client.cli.tables import Column

CLIENT_TIMEOUT_S = 240.0
COLUMNS = (
    Column("model", "MODEL"),
    Column("subject", "SUBJECT"),
    Column("step_ms", "STEP MS", "count"),
    Column("times_as_fast_as_stock", "X STOCK", "count"),
    Column("times_as_fast_as_torch", "X TORCH", "count"),
    *speeds.COLUMNS,
    Column("memory_bytes", "MEMORY", "bytes"),
    Column("memory_to_stock", "X STOCK", "count"),
    Column("zeros_ms", "ZEROS MS", "count"),
    Column("copies_ms", "COPIES MS", "count"),
    Column("idle_ms", "IDLE MS", "count"),
    Column("first_loss", "FIRST LOSS", "count", wide=True),
    Column("last_loss", "LAST LOSS", "count", wide=True),
    Column("window_bytes", "WINDOWS", "bytes", wide=True),
    Column("planned_bytes", "PLANNED", "bytes", wide=True),
)
COMMIT_COLUMNS = (
    Column("model", "MODEL"),
    Column("subject", "SUBJECT"),
    Column("commit_every", "EVERY", "count"),
    Column("without_ms", "STEP MS", "count"),
    Column("with_ms", "WITH COPIES MS", "count"),
    Column("exposed_ms", "EXPOSED MS", "count"),
    Column("copy_s", "COPY S", "count"),
    Column("copied_bytes", "COPY", "bytes"),
)
_ZEROS = re.compile(r"memset|broadcast", re.IGNORECASE)
_COPIES = re.compile(r"memcpy|copy|dynamic[-_](update[-_])?slice|transpose", re.IGNORECASE)

Found = Mapping[TrainOrder, Trained]


def run(options: BenchOptions) -> Iterator[list[BenchReport]]:
    """Trains every model with every subject, ours first; yields all results after each of them.

    Raises:
        RuntimeError: a process of ours failed; a failure of plain JAX is only reported.
    """
    found: dict[TrainOrder, Trained] = {}
    with clients.warm_daemon() as address:
        wanted = orders(options, address)
        for order, said in clients.measured(wanted, CLIENT_TIMEOUT_S):
            found[order] = Trained.from_dict(said)
            step = median(found[order].step_s)
            render.err(f"{order.name}: {order.label}: step {step * 1e3:.1f} ms")
            yield _reports(options, found)


def _reports(options: BenchOptions, found: Found) -> list[BenchReport]:
    kind = "GPUs" if options.on_gpus else "CPU devices"
    title = f"Training step: {options.devices} {kind}, {options.dtype}"
    profiles = {(order.name, order.label): each.profile for order, each in found.items()}
    copies = [*_commit_rows(found)]
    about = "copies of the state in the node's memory: medians of rounds"
    return [
        BenchReport("train", title, COLUMNS, make_rows(options, found)),
        *[BenchReport("train_commits", about, COMMIT_COLUMNS, copies)][: len(copies)],
        BenchReport(
            "train_kernels",
            "where the time goes: device 0 in one step",
            KERNEL_COLUMNS,
            [*kernel_rows_of(profiles)],
            explains=True,
        ),
    ]


def _commit_rows(found: Found) -> Iterator[dict[str, Any]]:
    for order, each in found.items():
        if (seen := each.committed) is not None:
            without, copied = median(seen.without_s), median(seen.with_s)
            yield {
                "model": order.name,
                "subject": order.label,
                "commit_every": order.commit_every,
                "without_ms": round(without * 1e3, 2),
                "with_ms": round(copied * 1e3, 2),
                "exposed_ms": round((copied - without) * 1e3, 2),
                "copy_s": round(median(seen.copy_s), 3),
                "copied_bytes": seen.copied_bytes,
            }


def orders(options: BenchOptions, address: str) -> list[TrainOrder]:
    """Returns the orders of a run: for each model ours first, then plain JAX."""
    known = MODELS if options.on_gpus else CPU_MODELS
    subjects = settings(options, remat=options.remat)
    if options.stock:
        again = dict.fromkeys("default" if remat != "none" else remat for remat in options.remat)
        subjects += [{"subject": PADDED, "remat": remat} for remat in again]
    subjects += [{"subject": TORCH}] * options.torch
    found = []
    for name, routing in itertools.product(options.models, options.routings):
        model = known[name]
        how: dict[str, Any] = {
            "name": name if routing == ROUTINGS[0] else f"{name} {routing}",
            "routing": routing,
            "commit_every": options.commit_every,
        }
        for subject in subjects:
            if subject["subject"] == TORCH and model.beside:
                continue  # the PyTorch client supports no second axis
            found.append(TrainOrder(model=model, **how, **of_all(options, address), **subject))
    return found


def make_rows(options: BenchOptions, found: Found) -> list[dict[str, Any]]:
    """Makes the table's rows: a model's subjects together, next to plain JAX of equal remat."""
    gpu = speeds.gpu_name() if options.on_gpus else ""
    named = {(order.name, order.label): each for order, each in found.items()}
    rows = []
    for order, each in found.items():
        again = order.remat != REMATS[0]
        beside = named.get((order.name, f"{PADDED} remat default" if again else PADDED))
        torch = None if again else named.get((order.name, TORCH))
        step = median(each.step_s)
        tokens = _tokens(order)
        flops = order.model.flops * tokens / (order.model.case.tokens * order.devices)
        memory = None if each.peak_bytes is None else each.peak_bytes + each.window_bytes
        row = {
            "model": order.name,
            "subject": order.label,
            "step_ms": round(step * 1e3, 2),
            **speeds.speeds(step, tokens, flops, each.joules, gpu),
            "memory_bytes": memory,
            **_kinds(each.profile),
            "first_loss": round(each.losses[0], 4),
            "last_loss": round(each.losses[-1], 4),
            "window_bytes": each.window_bytes,
            "planned_bytes": each.planned_bytes,
        }
        if beside is not None:
            row["times_as_fast_as_stock"] = round(median(beside.step_s) / step, 3)
            if memory is not None and beside.peak_bytes:
                row["memory_to_stock"] = round(memory / beside.peak_bytes, 3)
        if torch is not None:
            row["times_as_fast_as_torch"] = round(median(torch.step_s) / step, 3)
        rows.append(row)
    return rows


def _tokens(order: TrainOrder) -> int:
    """Returns tokens of a step on all devices; the two devices along tp share tokens."""
    return order.model.case.tokens * order.devices // order.axes.get("tp", 1)


def _kinds(profile: Profile) -> dict[str, float]:
    """Returns milliseconds of a step by kind of kernel; none without a profile."""
    if not profile.kernels:
        return {}
    kinds = {"zeros_ms": _ZEROS, "copies_ms": _COPIES}
    times = {
        key: sum(each.step_s for each in profile.kernels if pattern.search(each.kernel))
        for key, pattern in kinds.items()
    }
    times["idle_ms"] = profile.idle_s
    return {key: round(seconds * 1e3, 2) for key, seconds in times.items()}
