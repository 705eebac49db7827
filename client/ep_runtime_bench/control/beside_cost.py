"""What NCCL communicators cost a group whose rows go through windows: time, memory, channels."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

from ep_runtime.errors import EpRuntimeError
from ep_runtime_client.cli.tables import Column

READY_TIMEOUT_S = 60.0
_QUERY = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
# As NCCL says it of each communicator.
_CHANNELS = re.compile(r"(\d+) coll channels,.* (\d+) p2p channels, (\d+) p2p channels per peer")
COLUMNS = (
    Column("what", "WHAT"),
    Column("beside", "WITH", "count"),
    Column("without", "EP_RUNTIME_NCCL=0", "count"),
)


def used_mib() -> list[int]:
    """Memory in use on each GPU of the machine, of all processes."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in done.stdout.split() if line.isdecimal()]


def grown_mib(before: list[int], after: list[int]) -> int | None:
    """Of the GPU that has the most more in use; None where nobody tells."""
    return max((b - a for a, b in zip(before, after, strict=True)), default=None)


def costs(group: Any, before: list[int]) -> dict[str, Any]:
    """In the client, after its first call: what became of the group's communicators.

    Args:
        group: on GPUs.
        before: memory in use before it was created.
    """
    from ep_runtime_client.nccl.beside import GroupBesideNccl

    called = used_mib()
    found: dict[str, Any] = {"MiB of a GPU after the first call": grown_mib(before, called)}
    held = group.native_group
    if not isinstance(held, GroupBesideNccl):
        return found
    try:
        made = held.beside.await_ready(READY_TIMEOUT_S)
    except EpRuntimeError as error:
        return found | {"why there are none": str(error)}
    found["ms from create_group to READY"] = round(held.beside.ready_after_s * 1e3)
    found["MiB of a GPU once READY"] = grown_mib(before, used_mib())
    for turn in ("first", "second"):
        started = time.perf_counter()
        made.try_sum(READY_TIMEOUT_S)
        key = f"ms of the {turn} all-reduce, its sums exact"
        found[key] = round((time.perf_counter() - started) * 1e3)
    found["MiB of a GPU after all-reduces"] = grown_mib(before, used_mib())
    return found


def told(path: Path) -> dict[str, str]:
    """Environment of a client whose NCCL says in that file what it makes."""
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(path)}


def channels(path: Path) -> dict[str, Any]:
    """Of the communicator that was made last, as NCCL said it in that file."""
    text = path.read_text(errors="replace") if path.exists() else ""
    said = _CHANNELS.findall(text)
    names = ("channels of collectives", "channels of sends", "of them to one peer")
    return dict(zip(names, map(int, said[-1]), strict=True)) if said else {}


def rows(beside: dict[str, Any], without: dict[str, Any]) -> list[dict[str, Any]]:
    """One per fact, of a client with communicators and of one without."""
    return [
        {"what": what, "beside": value, "without": without.get(what)}
        for what, value in beside.items()
    ]
