"""`initialize()`: jax.distributed for a job that goes on when one of its processes dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ep_runtime import env
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base import jax_internals
from ep_runtime_client.daemons import coordination, node_coordination
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

    Call it in the place of `jax.distributed.initialize`, before anything uses JAX's devices, and
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
        # JAX lets process 0 host a service in any case: nobody asks this one.
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
    if num_processes is None:
        raise InvalidArgumentError(
            'num_processes must be given with address="node"', argument="num_processes"
        )
    if job is None:
        raise InvalidArgumentError(
            'job must be given with address="node", or $EP_RUNTIME_JOB or $SLURM_JOB_ID be set: '
            "all processes of the job find one service by it",
            argument="job",
        )
    return node_coordination.of_node(job, num_processes, heartbeat_timeout_s, _START_S)
