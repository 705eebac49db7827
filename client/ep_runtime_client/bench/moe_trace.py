"""Where the time of a step goes: its kernels by name and by the part of the program they serve.

A profile names each kernel and the HLO instruction that launched it; the compiled program says
in which scope that instruction was traced. While a profile is taken XLA launches kernels one by
one, outside of command buffers.
"""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from ep_runtime_client.bench.moe_cases import KernelTime

STEPS = 3
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*\bop_name="([^"]*)"', re.MULTILINE)
_SCOPE = re.compile(r"\bep_(\w+)/")
_OURS = re.compile(r"\b(\w+Kernel)\b")
_NAME_LENGTH = 60


def kernel_times(program: str, run: Callable[[], object], steps: int = STEPS) -> list[KernelTime]:
    """Kernels of a step of device 0, longest first.

    Args:
        program: text of the compiled program.
        run: one step; returns when it is done.
        steps: how many to profile.
    """
    parts = {name: part_of(op_name) for name, op_name in _INSTRUCTION.findall(program)}
    with tempfile.TemporaryDirectory(prefix="ep-bench-") as directory:
        with jax.profiler.trace(directory):
            for _ in range(steps):
                run()
        found = [*Path(directory).rglob("*.xplane.pb")]
        if not found:
            return []
        profile = jax.profiler.ProfileData.from_file(str(found[0]))
    return _totals(profile, parts, steps)


def part_of(op_name: str) -> str:
    """Of an instruction's op_name: forward or backward, and the scopes of ours around it."""
    again = "rematted_computation" in op_name or "checkpoint/" in op_name
    way = "backward" if "transpose(" in op_name or "_bwd/" in op_name else "forward"
    scopes = list(dict.fromkeys(_SCOPE.findall(op_name)))
    return f"{way}{' again' if again else ''} {'/'.join(scopes) or op_name.split('/')[-1]}"


def _totals(profile: Any, parts: dict[str, str], steps: int) -> list[KernelTime]:
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    nanoseconds: collections.Counter[tuple[str, str]] = collections.Counter()
    for kernel, instruction, duration in _events(profile):
        key = (parts.get(instruction, ""), short(kernel))
        count[key] += 1
        nanoseconds[key] += duration
    return [
        KernelTime(*key, count[key] / steps, total / 1e9 / steps)
        for key, total in nanoseconds.most_common()
    ]


def _events(profile: Any) -> Iterator[tuple[str, str, int]]:
    """(kernel, HLO instruction or "", nanoseconds) of device 0; of all threads on CPU."""
    planes = {plane.name: plane for plane in profile.planes}
    gpu = planes.get("/device:GPU:0")
    plane = gpu or planes.get("/host:CPU")
    for line in () if plane is None else plane.lines:
        if gpu is not None and not line.name.startswith("Stream"):
            continue  # lines that only sum others up
        for event in line.events:
            instruction = dict(event.stats).get("hlo_op", "")
            if gpu is not None or instruction:
                yield event.name, str(instruction), int(event.duration_ns)


def short(kernel: str) -> str:
    """A kernel's name without namespaces and template arguments."""
    ours = _OURS.search(kernel)
    return ours[1] if ours else kernel[:_NAME_LENGTH]
