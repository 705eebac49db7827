"""Lines of `status` that need attention: late ranks, silent processes, certificates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ep_runtime.allowed_names import shown
from ep_runtime.text import duration
from ep_runtime_client.cli import render, users

Row = Mapping[str, Any]

_WARNED_S = 30 * 24 * 3600.0

# Advice by the letter of a process's state in /proc/PID/stat.
_STATES = {
    "T": "it is stopped (state T), and `kill -CONT {pid}` continues it",
    "t": "a debugger has stopped it (state t)",
    "D": "it waits in the kernel (state D), as for a disk or a driver",
}


def wanted(status: Row, others: Iterable[Row]) -> bool:
    """Whether a rank is late or a process silent, on this node or one of `others`."""
    here = status["late_ranks"] or status["silent_processes"]
    return bool(here) or any(row["num_late"] or row["num_silent"] for row in others)


def write(status: Row, others: Iterable[Row]) -> None:
    """Writes a line for each late rank and each silent process of the daemon's node."""
    for rank in status["late_ranks"]:
        whose = f"job {shown(rank['job'])}, user {users.name(rank['uid'])}"
        render.write_text(f"{rank['message']}; {whose}", start="LATE: ", then="  ")
    for process in status["silent_processes"]:
        render.write_text(silence(process), start="SILENT: ", then="  ")
    if not wanted(status, others):
        render.out("nothing is late, nobody is silent")


def certificates(status: Row) -> list[str]:
    """Makes a line for each certificate that expires soon or that cannot be read again."""
    cluster = status["cluster"] or {}
    found = [cluster["certificates_error"]] if cluster.get("certificates_error") else []
    for item in cluster.get("certificates") or ():  # an older daemon sends none
        if item["left_s"] <= 0:
            found.append(f"{item['path']} has ENDED; put a new one in its place")
        elif item["left_s"] < _WARNED_S:
            left = duration(item["left_s"])
            found.append(f"{item['path']} ends in {left}; put a new one in its place")
    return found


def silence(process: Row) -> str:
    """Describes a silent process: for how long, and its state in the kernel."""
    letter = process["process_state"] or "?"
    text = _STATES.get(letter, "its state in the kernel is {letter}")
    state = text.format(pid=process["pid"], letter=letter)
    return (
        f"process {process['pid']} (index {process['process_index']}) of job "
        f"{shown(process['job'])}, user {users.name(process['uid'])}: no heartbeat for "
        f"{duration(process['since_s'])}; {state}"
    )
