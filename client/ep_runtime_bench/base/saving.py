"""Writes files for `bench --save DIR`: one per row of a table, with all that a reader needs."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import ep_runtime
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_client.cli import render
from ep_runtime_client.cli.machine import nvml

GIT_TIMEOUT_S = 10.0
# Packages that install each component; the first installed one is used.
_PACKAGES = {
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "torch": ("torch",),
}


class Saving:
    """Writes the rows of one run to a folder; a newer version of a row replaces its file."""

    def __init__(self, folder: str, options: BenchOptions) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC)
        self._started = now.strftime("%Y%m%dT%H%M%S")
        machine = nvml.probe()
        self._known = {
            "date": now.date().isoformat(),
            "command": _command(),
            "commit": _commit(),
            "devices": options.devices,
            "machine": {
                "host": platform.node(),
                "gpus": [gpu.name for gpu in machine.gpus],
                "driver": machine.driver,
                "cpus": len(os.sched_getaffinity(0)),
            },
            "versions": _versions(options.torch),
        }

    def save(self, report: BenchReport) -> None:
        """Writes the report's rows, unless it only explains another one's."""
        if report.explains:
            return
        taken: dict[str, int] = {}
        for row in report.rows:
            texts = [str(row.get(one.key)) for one in report.columns if one.kind == "text"]
            name = re.sub(r"[^\w.]+", "-", " ".join([report.name, *texts]))
            taken[name] = number = taken.get(name, 0) + 1
            path = self._folder / f"{self._started}-{name}{f'-{number}' * (number > 1)}.json"
            body = {**self._known, "bench": report.name, "rows": [row]}
            path.write_text(json.dumps(render.document("bench_rows", body), indent=1) + "\n")


def _command() -> str:
    """Returns the command as typed, without --save."""
    words = ["ep-runtime", *sys.argv[1:]]
    if "--save" in words:
        place = words.index("--save")
        del words[place : place + 2]
    return shlex.join(words)


def _versions(torch: bool) -> dict[str, str]:
    found = {"ep-runtime": ep_runtime.__version__, "python": platform.python_version()}
    for name, packages in _PACKAGES.items():
        if name == "torch" and not torch:
            continue
        for package in packages:
            try:
                found[name] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            break
    return found


def _commit() -> str:
    """Returns the commit of this package's checkout; "" if there is none."""
    root = Path(ep_runtime.__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()
