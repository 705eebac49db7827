"""The whole MoE layer, forward and backward, compared with plain JAX: time, memory, kernels.

A step computes the sum of squares of the layer's result and its gradient in tokens, router and
experts, in one process with all devices. "step" is one jitted step that the host waits for;
"enqueued" is the mean of many that were launched without waiting. "stock padded" drops tokens past
1.25 times an expert's even share, "stock dropless" drops none. "torch" is PyTorch, a process per
device, and drops none. Ours has room for any routing, or with a capacity factor for that multiple
of a rank's even share; DROPPED counts slots without a row. OF PLAIN is the time with a recipe over
the time without one; with "weights once" the weights are quantized before the timed step, as for
all layers of a model at once. Memory is the peak of the fullest device plus our windows; every
subject and case is measured in a fresh process. LAYER is memory without operands and their
gradients (if a device does not report its peak, by the plan of the compiled step), and ESTIMATE is
`estimate_memory`'s result for it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from ep_runtime_bench.base import clients, speeds
from ep_runtime_bench.base.moe_cases import (
    DROPLESS,
    PADDED,
    QUANTIZED,
    RECIPES,
    TORCH,
    LayerOrder,
    Measured,
    Profile,
    Step,
    of_all,
    settings,
)
from ep_runtime_bench.base.options import STOCK_LAYERS, BenchOptions, BenchReport
from ep_runtime_bench.base.timing import quantile
from ep_runtime_client.cli import render
from ep_runtime_client.cli.tables import Column

CLIENT_TIMEOUT_S = 120.0
SHOWN = 0.01  # share of a step; shorter kernels are shown as a sum
COLUMNS = (
    Column("case", "CASE"),
    Column("subject", "SUBJECT"),
    Column("step_p50_ms", "STEP P50 MS", "count"),
    Column("step_p99_ms", "P99", "count"),
    Column("enqueued_ms", "ENQUEUED MS", "count"),
    *speeds.COLUMNS,
    Column("times_as_fast_as_padded", "X PADDED", "count"),
    Column("times_as_fast_as_dropless", "X DROPLESS", "count"),
    Column("times_as_fast_as_torch", "X TORCH", "count"),
    Column("time_to_plain", "OF PLAIN", "count"),
    Column("memory_bytes", "MEMORY", "bytes"),
    Column("memory_to_padded", "X PADDED", "count"),
    Column("layer_bytes", "LAYER", "bytes"),
    Column("estimated_bytes", "ESTIMATE", "bytes"),
    Column("dropped", "DROPPED", "count"),
    Column("window_bytes", "WINDOWS", "bytes", wide=True),
    Column("planned_bytes", "PLANNED", "bytes", wide=True),
)
KERNEL_COLUMNS = (
    Column("case", "CASE"),
    Column("subject", "SUBJECT"),
    Column("part", "PART"),
    Column("kernel", "KERNEL"),
    Column("calls", "CALLS", "count"),
    Column("ms", "MS", "count"),
    Column("percent", "% OF STEP", "count"),
)

PEERS = {PADDED: "padded", DROPLESS: "dropless", TORCH: "torch"}

Found = Mapping[tuple[str, str], Measured]  # by case and subject


def run(options: BenchOptions) -> Iterator[list[BenchReport]]:
    """Measures every case with every subject, ours first; yields all results after each of them.

    Writes the kernel times of a subject to standard error as soon as they are known.

    Raises:
        RuntimeError: a process of ours failed; a failure of plain JAX is only reported.
    """
    found: dict[tuple[str, str], Measured] = {}
    with clients.warm_daemon() as address:
        wanted = orders(options, address)
        for order, said in clients.measured(wanted, CLIENT_TIMEOUT_S):
            key = (order.name, order.label)
            found[key] = Measured.from_dict(said)
            for line in kernel_lines({key: found[key]}):
                render.err(line)
            yield _reports(options, found)


def _reports(options: BenchOptions, found: Found) -> list[BenchReport]:
    kind = "GPUs" if options.on_gpus else "CPU devices"
    title = f"MoE layer, forward and backward: {options.devices} {kind}, {options.dtype}"
    whose = "kernels of device 0" if options.on_gpus else "operations of all devices together"
    kernels = f"where the time goes: {whose} in one step, without remat"
    return [
        BenchReport("moe", title, COLUMNS, make_rows(options, found)),
        BenchReport("moe_kernels", kernels, KERNEL_COLUMNS, [*kernel_rows(found)], explains=True),
    ]


def orders(options: BenchOptions, address: str) -> list[LayerOrder]:
    """Returns the orders of a run, in the order of measuring."""
    subjects = settings(options, weights=options.weights)
    if options.stock:
        names = dict(zip(STOCK_LAYERS, (PADDED, DROPLESS), strict=True))
        chosen = [names[name] for name in options.stock_layers]
        able = (PADDED, DROPLESS) if options.on_gpus else (PADDED,)
        subjects += [{"subject": name} for name in able if name in chosen]
    subjects += [{"subject": TORCH}] * options.torch
    found = []
    for subject, (name, case) in itertools.product(subjects, options.layers.items()):
        told = {**of_all(options, address), **subject, "config": options.model}
        found.append(LayerOrder(name=name, case=case, **told))
    return found


def make_rows(options: BenchOptions, found: Found) -> list[dict[str, Any]]:
    """Makes the table's rows: a case's subjects together, ours first."""
    known = list(dict.fromkeys(case for case, _ in found))
    return [row for case in known for row in _case_rows(options, found, case)]


def _case_rows(options: BenchOptions, found: Found, case: str) -> Iterator[dict[str, Any]]:
    subjects = {subject: measured for (name, subject), measured in found.items() if name == case}
    beside = {name: subjects[name].steps[0] for name in PEERS if name in subjects}
    known = {order.label: order for order in orders(options, "") if order.name == case}
    for subject, measured in subjects.items():
        order = known[subject]
        alike = dataclasses.replace(order, recipe=RECIPES[0], quantized=QUANTIZED[0])
        plain = subjects.get(alike.label)
        for step in reversed(measured.steps):  # the last step is the one without remat
            p50 = median(step.step_s)
            peak, windows = step.peak_bytes, measured.window_bytes
            memory = None if peak is None else peak + windows
            whole = step.planned_bytes + windows if memory is None else memory
            yield {
                "case": case,
                "subject": f"{subject} {step.variant}".strip(),
                "step_p50_ms": round(p50 * 1e3, 3),
                "step_p99_ms": round(quantile(step.step_s, 0.99) * 1e3, 3),
                "enqueued_ms": round(step.enqueued_s * 1e3, 3),
                **speeds.speeds(
                    step.enqueued_s,
                    order.case.tokens * options.devices,
                    order.case.flops,
                    step.joules,
                    speeds.gpu_name() if options.on_gpus else "",
                ),
                **_ratios(step, memory, beside),
                "time_to_plain": _to_plain(order, step, plain),
                "memory_bytes": memory,
                "layer_bytes": whole - measured.given_bytes,
                "estimated_bytes": measured.estimated_bytes,
                "dropped": measured.dropped,
                "window_bytes": windows,
                "planned_bytes": step.planned_bytes,
            }


def _to_plain(order: LayerOrder, step: Step, plain: Measured | None) -> float | None:
    """Returns a recipe's enqueued time over the one without a recipe; None if one is missing."""
    if plain is None or order.recipe == RECIPES[0]:
        return None
    like = next(each for each in plain.steps if each.variant == step.variant)
    return round(step.enqueued_s / like.enqueued_s, 3)


def _ratios(step: Step, memory: int | None, beside: Mapping[str, Step]) -> dict[str, Any]:
    """Returns ratios of enqueued times and of memory to the peers that were measured."""
    ratios: dict[str, Any] = {}
    for name, key in PEERS.items():
        if name in beside:
            ratio = beside[name].enqueued_s / step.enqueued_s
            ratios[f"times_as_fast_as_{key}"] = round(ratio, 3)
    other = beside[PADDED].peak_bytes if PADDED in beside else None
    if memory is not None and other:
        ratios["memory_to_padded"] = round(memory / other, 3)
    return ratios


def kernel_lines(found: Found) -> Iterator[str]:
    """Returns `kernel_rows` as lines of text."""
    for row in kernel_rows(found):
        name = f"{row['part']}  {row['kernel']}".strip()
        yield (
            f"{row['case']}: {row['subject']}: {row['ms']:9.3f} ms {row['percent']:5.1f}% "
            f"{row['calls']:6.2f} calls  {name}"
        )


def kernel_rows(found: Found) -> Iterator[dict[str, Any]]:
    """Returns the rows of `kernel_rows_of` for every case."""
    return kernel_rows_of({key: measured.profile for key, measured in found.items()})


def kernel_rows_of(profiles: Mapping[tuple[str, str], Profile]) -> Iterator[dict[str, Any]]:
    """Yields each profile's kernels that take more than SHOWN of a step, the rest, and idle time.

    Copies and fills count as kernels. Kernels that run concurrently can sum to more than a step.
    """
    for (case, subject), profile in profiles.items():
        kernels, step_s = profile.kernels, profile.step_s
        if not kernels:
            continue
        shown = [each for each in kernels if each.step_s > SHOWN * step_s]
        rest = [each for each in kernels if each.step_s <= SHOWN * step_s]
        lines = [(each.part, each.kernel, each.calls, each.step_s) for each in shown]
        lines.append(("others", "", sum(e.calls for e in rest), sum(e.step_s for e in rest)))
        lines.append(("no kernel", "", 0.0, profile.idle_s))
        for part, kernel, calls, seconds in lines:
            yield {
                "case": case,
                "subject": subject,
                "part": part,
                "kernel": kernel,
                "calls": round(calls, 2),
                "ms": round(seconds * 1e3, 3),
                "percent": round(100 * seconds / step_s, 1),
            }
