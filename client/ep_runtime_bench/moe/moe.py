"""The whole MoE layer, forward and backward, beside stock JAX: time, memory, and kernels.

A step is the sum of squares of the layer's result and its gradient in tokens, router and experts,
in one process with all devices. "step" is one jitted step that the host waits for; "enqueued" one
of many launched one after another, divided by their number. "stock padded" drops tokens past 1.25
times an expert's even share, "stock dropless" drops none. Ours has room for any routing, or with a
capacity factor that much of a rank's even share, and DROPPED tells what found no row. OF PLAIN is
the time of a recipe over that of the same layer without one. Memory is the peak of the fullest
device with our windows; every subject and case is measured in a fresh process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from ep_runtime import env
from ep_runtime_bench.base.daemon import warm_daemon
from ep_runtime_bench.base.moe_cases import (
    CASES,
    COMPILED,
    CPU_CASES,
    DROPLESS,
    GO,
    PADDED,
    READY,
    RECIPES,
    WEIGHTS,
    Measured,
    Order,
    Step,
)
from ep_runtime_bench.base.options import STOCK_LAYERS, BenchOptions, BenchReport
from ep_runtime_bench.base.timing import median, quantile
from ep_runtime_client.cli import render
from ep_runtime_client.cli.render import Column
from ep_runtime_client.daemons.children import python_command

CLIENT_TIMEOUT_S = 120.0
# One after the other they would take seconds each; a measurement waits until all of them are up.
STARTED_TOGETHER = 3
SHOWN = 0.01  # of a step: kernels that take less are summed up
# Processes that have started already share the devices with the one that measures.
_CLIENT_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_CLIENT_MEM_FRACTION": "0.9",
}
_OLD_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses both together
COLUMNS = (
    Column("case", "CASE"),
    Column("subject", "SUBJECT"),
    Column("step_p50_ms", "STEP P50 MS", "count"),
    Column("step_p99_ms", "P99", "count"),
    Column("enqueued_ms", "ENQUEUED MS", "count"),
    Column("tflops", "TFLOP/S", "count"),
    Column("times_as_fast_as_padded", "X PADDED", "count"),
    Column("times_as_fast_as_dropless", "X DROPLESS", "count"),
    Column("time_to_plain", "OF PLAIN", "count"),
    Column("memory_bytes", "MEMORY", "bytes"),
    Column("memory_to_padded", "X PADDED", "count"),
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

Found = Mapping[tuple[str, str], Measured]  # by case and subject


def run(options: BenchOptions) -> Iterator[list[BenchReport]]:
    """Measures every case by every subject, ours first: all that is known after each of them.

    Where a step's time goes is written to standard error as soon as it is known.

    Raises:
        RuntimeError: a process of ours failed; one of stock JAX is only said.
    """
    found: dict[tuple[str, str], Measured] = {}
    with warm_daemon() as address:
        for key, measured in _measure(orders(options, address)):
            found[key] = measured
            for line in kernel_lines({key: measured}):
                render.err(line)
            yield _reports(options, found)


def _reports(options: BenchOptions, found: Found) -> list[BenchReport]:
    kind = "GPUs" if options.on_gpus else "CPU devices"
    title = f"MoE layer, forward and backward: {options.devices} {kind}, {options.dtype}"
    whose = "kernels of device 0" if options.on_gpus else "operations of all devices together"
    kernels = f"where the time goes: {whose} in one step, without remat"
    return [
        BenchReport("moe", title, COLUMNS, make_rows(options, found)),
        BenchReport("moe_kernels", kernels, KERNEL_COLUMNS, [*kernel_rows(found)]),
    ]


def orders(options: BenchOptions, address: str) -> list[Order]:
    """What is measured, in that order."""
    known = CASES if options.on_gpus else CPU_CASES
    subjects: list[tuple[Any, ...]] = [
        *itertools.product(options.transports, options.recipes, options.weights, options.capacity)
    ]
    if options.stock:
        able = (PADDED, DROPLESS) if options.on_gpus else (PADDED,)
        said = dict(zip(STOCK_LAYERS, (PADDED, DROPLESS), strict=True))
        chosen = [said[name] for name in options.stock_layers]
        subjects += [(name, RECIPES[0], WEIGHTS[0], 0.0) for name in able if name in chosen]
    found = []
    for subject, recipe, weights, factor in subjects:
        for name in options.cases:
            case = known[name]
            if options.tokens_per_rank:
                case = dataclasses.replace(case, tokens=options.tokens_per_rank)
            platform = "gpu" if options.on_gpus else "cpu"
            how = (options.devices, platform, options.dtype, options.repeats, address)
            found.append(Order(subject, name, case, *how, factor, recipe, weights))
    return found


def _measure(wanted: list[Order]) -> Iterator[tuple[tuple[str, str], Measured]]:
    """One process after the other; JAX starts in those that come next while one compiles."""
    left = collections.deque(wanted)
    waiting: collections.deque[_Client] = collections.deque()
    with contextlib.ExitStack() as all_ended:

        def start_some() -> None:
            for _ in range(min(STARTED_TOGETHER, len(left))):
                waiting.append(all_ended.enter_context(_Client(left.popleft())))

        start_some()
        for order in wanted:
            client = waiting.popleft()
            client.hear(READY)
            if not waiting:
                start_some()
            client.go()
            for other in waiting:
                other.hear(READY)  # from here on they are quiet
            client.hear(COMPILED)
            client.go()
            found = client.result()
            if found is not None:
                yield (order.name, order.label), found
            elif not order.is_stock:
                raise RuntimeError(f"{order.name}: {order.label} failed, see above")


class _Client:
    """Context manager: one process; none outlives the block, or a stage CLIENT_TIMEOUT_S."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heard: set[str] = set()
        command = python_command(
            "ep_runtime_bench.moe.client", [json.dumps(dataclasses.asdict(order))]
        )
        environment = env.child_environment() | _CLIENT_ENVIRONMENT
        environment.pop(_OLD_NAME, None)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)
        self._limit = self._limited()

    def _limited(self) -> threading.Timer:
        timer = threading.Timer(CLIENT_TIMEOUT_S, self._process.kill)
        timer.daemon = True
        timer.start()
        return timer

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._limit.cancel()
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def hear(self, stage: str) -> None:
        """Waits until it has said that stage, or has ended."""
        assert self._process.stdout is not None
        if stage not in self._heard:
            self._process.stdout.readline()
            self._heard.add(stage)
            self._limit.cancel()  # it may wait for its turn as long as others need

    def go(self) -> None:
        """Lets it begin the next stage."""
        self._limit.cancel()
        self._limit = self._limited()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `result` tells that it has ended
            self._process.stdin.write(GO + "\n")
            self._process.stdin.flush()

    def result(self) -> Measured | None:
        """What it measured; None, with a line that says why, where it failed."""
        out, _ = self._process.communicate()
        if self._process.returncode == 0:
            return Measured.from_dict(json.loads(out))
        order = self._order
        code = self._process.returncode
        render.err(f"{order.name}: {order.label}: no figures, it ended with exit code {code}")
        return None


def make_rows(options: BenchOptions, found: Found) -> list[dict[str, Any]]:
    """The table: a case's subjects together, ours first."""
    known = list(dict.fromkeys(case for case, _ in found))
    return [row for case in known for row in _case_rows(options, found, case)]


def _case_rows(options: BenchOptions, found: Found, case: str) -> Iterator[dict[str, Any]]:
    subjects = {subject: measured for (name, subject), measured in found.items() if name == case}
    beside = {name: subjects[name].steps[0] for name in (PADDED, DROPLESS) if name in subjects}
    known = {order.label: order for order in orders(options, "") if order.name == case}
    for subject, measured in subjects.items():
        order = known[subject]
        plain = subjects.get(dataclasses.replace(order, recipe=RECIPES[0]).label)
        for step in reversed(measured.steps):  # without remat first
            p50 = median(step.step_s)
            memory = None
            if step.peak_bytes is not None:
                memory = step.peak_bytes + measured.window_bytes
            yield {
                "case": case,
                "subject": f"{subject} {step.variant}".strip(),
                "step_p50_ms": round(p50 * 1e3, 3),
                "step_p99_ms": round(quantile(step.step_s, 0.99) * 1e3, 3),
                "enqueued_ms": round(step.enqueued_s * 1e3, 3),
                "tflops": round(order.case.flops / step.enqueued_s / 1e12, 1),
                **_ratios(step, memory, beside),
                "time_to_plain": _to_plain(order, step, plain),
                "memory_bytes": memory,
                "dropped": measured.dropped,
                "window_bytes": measured.window_bytes,
                "planned_bytes": step.planned_bytes,
            }


def _to_plain(order: Order, step: Step, plain: Measured | None) -> float | None:
    """Of a recipe's enqueued time; None of what has none, and where plain was not measured."""
    if plain is None or order.recipe == RECIPES[0]:
        return None
    like = next(each for each in plain.steps if each.variant == step.variant)
    return round(step.enqueued_s / like.enqueued_s, 3)


def _ratios(step: Step, memory: int | None, beside: Mapping[str, Step]) -> dict[str, Any]:
    """Of enqueued times and of memory; none of what was not measured."""
    ratios: dict[str, Any] = {}
    for name, key in ((PADDED, "padded"), (DROPLESS, "dropless")):
        if name in beside:
            ratio = beside[name].enqueued_s / step.enqueued_s
            ratios[f"times_as_fast_as_{key}"] = round(ratio, 3)
    other = beside[PADDED].peak_bytes if PADDED in beside else None
    if memory is not None and other:
        ratios["memory_to_padded"] = round(memory / other, 3)
    return ratios


def kernel_lines(found: Found) -> Iterator[str]:
    """`kernel_rows` as lines of text."""
    for row in kernel_rows(found):
        name = f"{row['part']}  {row['kernel']}".strip()
        yield (
            f"{row['case']}: {row['subject']}: {row['ms']:9.3f} ms {row['percent']:5.1f}% "
            f"{row['calls']:6.2f} calls  {name}"
        )


def kernel_rows(found: Found) -> Iterator[dict[str, Any]]:
    """Per case of ours: kernels above SHOWN of a step, the others together, and the time of none.

    Copies and fills count as kernels. Those that run at the same time can sum to more than a step.
    """
    for (case, subject), measured in found.items():
        kernels, step_s = measured.profile.kernels, measured.profile.step_s
        if not kernels:
            continue
        shown = [each for each in kernels if each.step_s > SHOWN * step_s]
        rest = [each for each in kernels if each.step_s <= SHOWN * step_s]
        lines = [(each.part, each.kernel, each.calls, each.step_s) for each in shown]
        lines.append(("others", "", sum(e.calls for e in rest), sum(e.step_s for e in rest)))
        lines.append(("no kernel", "", 0.0, measured.profile.idle_s))
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
