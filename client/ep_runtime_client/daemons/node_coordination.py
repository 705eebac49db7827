"""A coordination service that a node's processes share, and that the first process starts."""

from __future__ import annotations

import selectors
import subprocess
import urllib.parse
from pathlib import Path

from ep_runtime import env
from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime_client.daemons import addresses, command_line, coordination, runtime


def of_node(job: str, processes: int, heartbeat_timeout_s: int, timeout_s: float) -> str:
    """Returns the address of the job's service on this node; the first process starts it.

    The service outlives the process that started it, and the daemon; it ends after the job's last
    process.

    Raises:
        RuntimeUnavailableError: the service does not start within `timeout_s`.
    """
    directory = addresses.parse_address(addresses.NODE).directory
    assert directory is not None
    env.make_directory(directory)
    name = f"coordination-{urllib.parse.quote(job, safe='')}"
    with runtime.locked(directory / "start.lock", timeout_s):
        file = directory / name
        if file.exists() and coordination.answers(file.read_text()):
            return file.read_text()
        options = ["--processes", str(processes), "--bind", "127.0.0.1:0", "--until-left"]
        options += ["--heartbeat-timeout", str(heartbeat_timeout_s)]
        address = _start(options, directory, name, timeout_s)
        file.write_text(address)
        return address


def _start(options: list[str], directory: Path, name: str, timeout_s: float) -> str:
    """Starts the command in a new session; returns the address that the command prints."""
    log = directory / f"{name}.log"
    command = command_line.python_command("ep_runtime_client.cli", ["coordination", *options])
    with runtime.own_file(log) as errors:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env.daemon_environment(),
            cwd="/",
            start_new_session=True,
        )
    assert started.stdout is not None
    with started.stdout, selectors.DefaultSelector() as selector:
        selector.register(started.stdout, selectors.EVENT_READ)
        line = started.stdout.readline().decode() if selector.select(timeout_s) else ""
    if not line:
        started.kill()
        started.wait()
        raise RuntimeUnavailableError(
            f"the coordination service did not start within {timeout_s:g} s; {log} says why",
            address="node",
        )
    started.returncode = 0  # no process waits for it, so suppress the object's warning
    return line.split()[-1]
