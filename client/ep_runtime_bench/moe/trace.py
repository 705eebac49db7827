"""Profiles a step: its kernels by name and by the part of the program that launched them.

A profile names each kernel, copy and fill, and the HLO instruction that launched it; the compiled
program's text has that instruction's scope.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from ep_runtime_bench.base.moe_cases import KernelTime, Profile

STEPS = 3
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*\bop_name="([^"]*)"', re.MULTILINE)
_SCOPE = re.compile(r"\bep_(\w+)/")
_OURS = re.compile(r"\b(\w+Kernel)\b|\bep_runtime::(?:\w+::|\(anonymous namespace\)::)*(\w+)")
_NAME_LENGTH = 60


@dataclasses.dataclass(frozen=True)
class _Event:
    """A kernel, copy or fill; `instruction` is "" if the profile does not have it."""

    kernel: str
    instruction: str
    start_ns: int
    duration_ns: int


def profile(
    program: str, enqueue: Callable[[], object], *, warm: int, steps: int = STEPS
) -> Profile:
    """Profiles the last `steps` of many steps on device 0.

    Args:
        program: text of the compiled program.
        enqueue: starts one step and returns arrays that are ready when the step is done.
        warm: steps before these, which are not counted, because an idle GPU is faster at first.
        steps: number of counted steps.
    """
    parts = {name: part_of(op_name) for name, op_name in _INSTRUCTION.findall(program)}
    with tempfile.TemporaryDirectory(prefix="ep-bench-") as directory:
        with jax.profiler.trace(directory):
            done = None
            for _ in range(warm + steps):
                done = enqueue()
            jax.block_until_ready(done)
        found = [*Path(directory).rglob("*.xplane.pb")]
        if not found:
            return Profile()
        events = _events(jax.profiler.ProfileData.from_file(str(found[0])))
        return _totals(events, parts, warm, steps)


def part_of(op_name: str) -> str:
    """Returns "forward" or "backward" and our scopes, from an instruction's op_name."""
    again = "rematted_computation" in op_name or "checkpoint/" in op_name
    way = "backward" if "transpose(" in op_name or "_bwd/" in op_name else "forward"
    scopes = list(dict.fromkeys(_SCOPE.findall(op_name)))
    return f"{way}{' again' if again else ''} {'/'.join(scopes) or op_name.split('/')[-1]}"


def _totals(events: Iterable[_Event], parts: dict[str, str], warm: int, steps: int) -> Profile:
    """Sums the times of the last `steps` steps of `warm` + `steps`; see `_window`."""
    ordered = sorted(events, key=lambda event: event.start_ns)
    window = _window(ordered, warm, steps)
    if window is None:
        return Profile()
    begin, end = window
    served = _parts_of(ordered, parts, warm + steps)
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    times: dict[tuple[str, str], _Busy] = collections.defaultdict(_Busy)
    busy = _Busy()
    for event, part in zip(ordered, served, strict=True):
        start, stop = max(event.start_ns, begin), min(event.start_ns + event.duration_ns, end)
        if start >= stop:
            continue
        key = (part, short(event.kernel))
        count[key] += 1
        times[key].add(start, stop)
        busy.add(start, stop)
    kernels = [
        KernelTime(*key, count[key] / steps, time.total_ns / 1e9 / steps)
        for key, time in sorted(times.items(), key=lambda item: -item[1].total_ns)
    ]
    span = end - begin
    return Profile(kernels, span / 1e9 / steps, (span - busy.total_ns) / 1e9 / steps)


class _Busy:
    """Time in which at least one of some events ran; add events in the order of their starts.

    Concurrent events count once, so that no sum exceeds the elapsed time.
    """

    def __init__(self) -> None:
        self.total_ns = 0
        self._end_ns = 0

    def add(self, start_ns: int, stop_ns: int) -> None:
        self.total_ns += max(0, stop_ns - max(start_ns, self._end_ns))
        self._end_ns = max(self._end_ns, stop_ns)


def _window(ordered: list[_Event], warm: int, steps: int) -> tuple[int, int] | None:
    """Finds when the last `steps` steps began and ended, in nanoseconds; None if unknown.

    The longest of the kernels that ran equally often in every step marks the steps. Other kernels
    may run far ahead of their step: a copy to the device waits for nothing. Without warm-up steps
    all events count.
    """
    if warm == 0 and ordered:
        ends = (event.start_ns + event.duration_ns for event in ordered)
        return ordered[0].start_ns, max(ends)
    taken: collections.Counter[str] = collections.Counter()
    starts: dict[str, list[int]] = collections.defaultdict(list)
    for event in ordered:
        taken[event.kernel] += event.duration_ns
        starts[event.kernel].append(event.start_ns)
    for name, _ in taken.most_common():
        each, rest = divmod(len(starts[name]), warm + steps)
        if not rest:
            first = starts[name][::each]  # of every step
            return first[warm - 1], first[-1]
    return None


def _parts_of(ordered: list[_Event], parts: dict[str, str], steps: int) -> list[str]:
    """Returns the part of the program to which each event belongs; "" if unknown.

    Kernels that CUDA replays from a graph have no instruction in the profile. Kernels of one name
    run in the same order in every step, so a step with instructions tells the parts of the others.
    """
    served = [parts.get(event.instruction, "") for event in ordered]
    places: dict[str, list[int]] = collections.defaultdict(list)
    for place, event in enumerate(ordered):
        places[event.kernel].append(place)
    for of_name in places.values():
        each, rest = divmod(len(of_name), steps)
        if rest:
            continue
        for nth in range(each):
            alike = of_name[nth::each]
            known = {served[place] for place in alike} - {""}
            if len(known) == 1:
                for place in alike:
                    served[place] = next(iter(known))
    return served


def _events(profile: Any) -> Iterator[_Event]:
    """Yields the events of device 0, or of all threads on CPU."""
    planes = {plane.name: plane for plane in profile.planes}
    gpu = planes.get("/device:GPU:0")
    plane = gpu or planes.get("/host:CPU")
    for line in () if plane is None else plane.lines:
        if gpu is not None and not line.name.startswith("Stream"):
            continue  # these lines only repeat others' events
        for event in line.events:
            instruction = str(dict(event.stats).get("hlo_op", ""))
            if gpu is not None or instruction:
                times = (int(event.start_ns), int(event.duration_ns))
                yield _Event(event.name, instruction, *times)


def short(kernel: str) -> str:
    """Returns a kernel's name without namespaces and template arguments."""
    ours = _OURS.search(kernel)
    return ours[1] or ours[2] if ours else kernel[:_NAME_LENGTH]
