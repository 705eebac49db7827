"""Where the time of a step goes: its kernels by name and by the part of the program they serve.

A profile names each kernel, copy and fill, and the HLO instruction that launched it; the compiled
program says in which scope that instruction was traced.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ep_runtime_bench.base.moe_cases import KernelTime, Profile

STEPS = 3
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*\bop_name="([^"]*)"', re.MULTILINE)
_SCOPE = re.compile(r"\bep_(\w+)/")
_OURS = re.compile(r"\b(\w+Kernel)\b|\bep_runtime::(?:\w+::|\(anonymous namespace\)::)*(\w+)")
_NAME_LENGTH = 60


@dataclasses.dataclass(frozen=True)
class _Event:
    """A kernel, copy or fill; `instruction` is "" where the profile does not say it."""

    kernel: str
    instruction: str
    start_ns: int
    duration_ns: int


class _Served(NamedTuple):
    """An event, the part of the program that it serves, and which step; None: nobody knows."""

    event: _Event
    part: str
    step: int | None


def profile(
    program: str, enqueue: Callable[[], object], *, warm: int, steps: int = STEPS
) -> Profile:
    """Of the last `steps` steps of many on device 0.

    Args:
        program: text of the compiled program.
        enqueue: starts one step and returns what is ready when it is done.
        warm: steps before them, which do not count: a GPU that had a rest is faster for a while.
        steps: how many count.
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
    """Of an instruction's op_name: forward or backward, and the scopes of ours around it."""
    again = "rematted_computation" in op_name or "checkpoint/" in op_name
    way = "backward" if "transpose(" in op_name or "_bwd/" in op_name else "forward"
    scopes = list(dict.fromkeys(_SCOPE.findall(op_name)))
    return f"{way}{' again' if again else ''} {'/'.join(scopes) or op_name.split('/')[-1]}"


def _totals(events: Iterable[_Event], parts: dict[str, str], warm: int, steps: int) -> Profile:
    served = _last(_with_parts(events, parts, warm + steps), steps)
    if not served:
        return Profile()
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    nanoseconds: collections.Counter[tuple[str, str]] = collections.Counter()
    first = end = served[0].event.start_ns
    busy = 0
    for event, part, _ in served:
        count[part, short(event.kernel)] += 1
        nanoseconds[part, short(event.kernel)] += event.duration_ns
        stop = event.start_ns + event.duration_ns
        busy += max(0, stop - max(end, event.start_ns))
        end = max(end, stop)
    span = end - first
    kernels = [
        KernelTime(*key, count[key] / steps, total / 1e9 / steps)
        for key, total in nanoseconds.most_common()
    ]
    return Profile(kernels, span / 1e9 / steps, (span - busy) / 1e9 / steps)


def _with_parts(events: Iterable[_Event], parts: dict[str, str], steps: int) -> list[_Served]:
    """The events in order, and what each of them serves.

    Kernels that CUDA replays from a graph come without their instruction. Kernels of one name
    follow each other in every step in the same order, so those of a step that has the names tell
    which the others are.
    """
    ordered = sorted(events, key=lambda event: event.start_ns)
    places: dict[str, list[int]] = collections.defaultdict(list)
    for place, event in enumerate(ordered):
        places[event.kernel].append(place)
    served = [_Served(event, parts.get(event.instruction, ""), None) for event in ordered]
    for of_name in places.values():
        each, rest = divmod(len(of_name), steps)
        if rest:
            continue
        for nth in range(each):
            alike = of_name[nth::each]
            known = {served[place].part for place in alike} - {""}
            part = next(iter(known)) if len(known) == 1 else None
            for step, place in enumerate(alike):
                one = served[place]
                served[place] = _Served(one.event, one.part if part is None else part, step)
    return served


def _last(served: list[_Served], steps: int) -> list[_Served]:
    """Those of the last `steps` steps; where nobody knows the step, all since they began."""
    known = [one.step for one in served if one.step is not None]
    least = max(known, default=0) - steps + 1
    starts = [one.event.start_ns for one in served if one.step is not None and one.step >= least]
    since = min(starts, default=0)
    return [
        one
        for one in served
        if (one.event.start_ns >= since if one.step is None else one.step >= least)
    ]


def _events(profile: Any) -> Iterator[_Event]:
    """Those of device 0; of all threads on CPU."""
    planes = {plane.name: plane for plane in profile.planes}
    gpu = planes.get("/device:GPU:0")
    plane = gpu or planes.get("/host:CPU")
    for line in () if plane is None else plane.lines:
        if gpu is not None and not line.name.startswith("Stream"):
            continue  # lines that only sum others up
        for event in line.events:
            instruction = str(dict(event.stats).get("hlo_op", ""))
            if gpu is not None or instruction:
                times = (int(event.start_ns), int(event.duration_ns))
                yield _Event(event.name, instruction, *times)


def short(kernel: str) -> str:
    """A kernel's name without namespaces and template arguments."""
    ours = _OURS.search(kernel)
    return ours[1] or ours[2] if ours else kernel[:_NAME_LENGTH]
