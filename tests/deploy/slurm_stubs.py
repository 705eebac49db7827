"""`slurm_stubs.py COMMAND ARGUMENT...`: stands in for commands of Slurm and systemd.

$STUBS is a folder in which they keep what they started. A node of the job is a name, and a folder
NAME below $STUBS in place of its /run. They take the options that the scripts give, and no others.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

STUBS = Path(os.environ["STUBS"])
READY_S = 60.0
STOP_S = 30.0


def scontrol(words: list[str]) -> int:
    """Imitates `scontrol show hostnames LIST`, for a list without brackets."""
    assert words[:2] == ["show", "hostnames"], words
    sys.stdout.write("\n".join(words[2].split(",")) + "\n")
    return 0


def _unit_file(unit: str) -> Path:
    return STUBS / f"{unit}-{os.environ['SLURMD_NODENAME']}.pid"


def systemd_run(words: list[str]) -> int:
    """Starts a unit of Type=notify and returns when it says READY=1."""
    parser = argparse.ArgumentParser()
    for name in ("--quiet", "--collect"):
        parser.add_argument(name, action="store_true")
    for name in ("--unit", "--uid", "--gid"):
        parser.add_argument(name, required=True)
    parser.add_argument("--property", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(words)
    properties = dict(item.split("=", 1) for item in arguments.property)
    assert properties["Type"] == "notify"
    assert (arguments.uid, arguments.gid) == (str(os.getuid()), str(os.getgid()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        address = f"\0{arguments.unit}-{os.environ['SLURMD_NODENAME']}"
        heard.bind(address)
        heard.settimeout(READY_S)
        unit = subprocess.Popen(
            arguments.command,
            env={**os.environ, "NOTIFY_SOCKET": f"@{address[1:]}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(STUBS / f"{arguments.unit}.log").open("a"),
            start_new_session=True,
        )
        _unit_file(arguments.unit).write_text(str(unit.pid))
        while b"READY=1" not in heard.recv(4096):
            pass
    return 0


def systemctl(words: list[str]) -> int:
    """Imitates `is-active --quiet UNIT` and `stop UNIT`."""
    order, unit = words[0], words[-1]
    try:
        pid = int(_unit_file(unit).read_text())
        fd = os.pidfd_open(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 3
    if order == "stop":
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(STOP_S * 1000), f"{unit} did not end within {STOP_S} s"
        _unit_file(unit).unlink()
    return 0


def srun(words: list[str]) -> int:
    """Runs one task per node; a task that fails ends the others at once."""
    assert words[:2] == ["--kill-on-bad-exit=1", "--wait=60"], words
    nodes = os.environ["SLURM_JOB_NODELIST"].split(",")
    tasks = []
    for number, node in enumerate(nodes):
        own = {
            "SLURM_STEP_NODELIST": ",".join(nodes),
            "SLURM_NTASKS": str(len(nodes)),
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": "0",
            # Every node has the same path in its own /run.
            "EP_RUNTIME_ADDRESS": os.environ["EP_RUNTIME_ADDRESS"].replace(nodes[0], node),
        }
        tasks.append(subprocess.Popen(words[2:], env={**os.environ, **own}))
    poll = select.poll()
    running = {os.pidfd_open(task.pid): task for task in tasks}
    for fd in running:
        poll.register(fd, select.POLLIN)
    worst = 0
    while running:
        for fd, _ in poll.poll():
            poll.unregister(fd)
            os.close(fd)
            code = running.pop(fd).wait()
            if code and not worst:
                worst = code if code > 0 else 128 - code
                for other in running.values():
                    other.kill()
    return worst


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1].replace("-", "_")](sys.argv[2:]))
