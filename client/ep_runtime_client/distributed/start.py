"""`initialize()`: jax.distributed for a job that continues when one of its processes dies."""

from __future__ import annotations

import selectors
import subprocess
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ep_runtime import env
from ep_runtime.errors import InvalidArgumentError, RuntimeUnavailableError
from ep_runtime_client.base import jax_internals
from ep_runtime_client.daemons import addresses, command_line, coordination, runtime
from ep_runtime_client.distributed.peers import peers

_NODE = "node"
_START_S = 60.0


def initialize(
    address: str = _NODE,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    job: str | None = None,
    heartbeat_timeout_s: int = coordination.HEARTBEAT_TIMEOUT_S,
    **options: Any,
) -> None:
    """Initializes jax.distributed so that the job goes on when one of its processes dies.

    Call it instead of `jax.distributed.initialize`, before anything uses JAX's devices, and
    before `connect(on_loss="continue")`. No process hosts the coordination service, so process 0
    may die too. If the service dies, JAX ends all processes.

    Works with JAX 0.10 to 0.12. Sets `jax_enable_recoverability` and the environment's flags that
    let NCCL's collectives end in an error.

    Args:
        address: HOST:PORT of an `ep-runtime coordination`, the same in every process. Or "node":
            one on this host, which the first process starts and which ends after the last.
        num_processes: of the whole job; needed with "node". None: as JAX detects it.
        process_id: of this process. None: as JAX detects it.
        local_device_ids: as jax.distributed.initialize takes them.
        job: name of the job, for "node". None takes $EP_RUNTIME_JOB or $SLURM_JOB_ID.
        heartbeat_timeout_s: with "node", how long a process that hangs may be silent before it is
            dead. Deaths on the service's host are known at once. With HOST:PORT give the
            command's `--heartbeat-timeout` here.
        options: further arguments of jax.distributed.initialize.

    Raises:
        InvalidArgumentError: "node" without num_processes or the job's name, or an address of
            another form.
        NotImplementedError: this jaxlib lacks what recovery needs, which the text names.
        RuntimeUnavailableError: the node's service does not start.

    Cost: starts a process with "node". Nothing in a step.
    """
    reason = jax_internals.recoverability_reason()
    if reason is not None:
        raise NotImplementedError(f"{reason}; {jax_internals.remedy()}")
    if address == _NODE:
        address = _of_node(job or env.job(), num_processes, heartbeat_timeout_s)
    coordination.split_address(address)
    env.let_collectives_end()
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        address,
        num_processes,
        process_id,
        local_device_ids,
        heartbeat_timeout_seconds=heartbeat_timeout_s,
        # JAX always starts a service in process 0. No process uses that one.
        coordinator_bind_address="127.0.0.1:0",
        **options,
    )
    state = jax_internals.distributed()
    jax_internals.forget_topology()
    coordination.register(address, state.process_id)
    try:
        peers.follow(address)
    except RuntimeError as error:
        raise NotImplementedError(
            f"the coordination service at {address} does not tell who has died ({error}); "
            + jax_internals.remedy()
        ) from error


def _of_node(job: str | None, num_processes: int | None, heartbeat_timeout_s: int) -> str:
    """Returns the address of the job's service on this node; the first process starts it.

    The service outlives the process that started it, and the daemon; it ends after the job's last
    process.
    """
    if num_processes is None:
        raise InvalidArgumentError(
            'num_processes must be given with address="node"', argument="num_processes"
        )
    if job is None:
        raise InvalidArgumentError(
            'address="node" needs job=, $EP_RUNTIME_JOB or $SLURM_JOB_ID: processes of a job find '
            "their service by the job's name",
            argument="job",
        )
    directory = addresses.parse_address(addresses.NODE).directory
    assert directory is not None
    env.make_directory(directory)
    name = f"coordination-{urllib.parse.quote(job, safe='')}"
    with runtime.locked(directory / "start.lock", _START_S):
        file = directory / name
        if file.exists() and coordination.answers(file.read_text()):
            return file.read_text()
        options = ["--processes", str(num_processes), "--bind", "127.0.0.1:0", "--until-left"]
        options += ["--heartbeat-timeout", str(heartbeat_timeout_s)]
        address = _start_service(options, directory, name)
        file.write_text(address)
        return address


def _start_service(options: list[str], directory: Path, name: str) -> str:
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
        line = started.stdout.readline().decode() if selector.select(_START_S) else ""
    if not line:
        started.kill()
        started.wait()
        raise RuntimeUnavailableError(
            f"the coordination service did not start within {_START_S:g} s; {log} says why",
            address="node",
        )
    started.returncode = 0  # no process waits for it, so suppress the object's warning
    return line.split()[-1]
