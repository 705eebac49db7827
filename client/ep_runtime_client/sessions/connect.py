"""`connect()`: finds or makes the session of a process."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Mapping
from typing import Literal

from ep_runtime import env
from ep_runtime.allowed_names import check_new_labels
from ep_runtime.errors import InvalidArgumentError, SpecMismatchError
from ep_runtime_client.base import jax_internals, jax_state
from ep_runtime_client.daemons import addresses, runtime, transport
from ep_runtime_client.daemons.client import DaemonClient, job_name
from ep_runtime_client.sessions import open_session
from ep_runtime_client.sessions.open_session import OpenSession
from ep_runtime_client.sessions.session import Session
from ep_runtime_client.sessions.watchdog import Watchdog

_log = logging.getLogger("ep_runtime")

# With on_loss="end": seconds that a process may still run after a loss.
_GRACE_S = 5.0


def connect(
    address: str | None = None,
    *,
    job: str | None = None,
    labels: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
    on_loss: Literal["end", "continue"] = "end",
) -> Session:
    """Connects this process to a daemon and returns the Session that groups are created in.

    Use it as a context manager: its end frees everything. If an error leaves the block, or the
    process dies, windows stay allocated for retain_s.

    A process has one session per daemon: a second call returns the same session, which ends when
    each call has been closed. On CPU with jaxlib below 0.12, connect before JAX starts its
    backends, because they get their threads then.

    Args:
        address: `unix:///dir`, a daemon's socket directory; "embedded", a private daemon; "node",
            one that the first process of the node starts; "none", for transport="xla". For None see
            docs/operations.md.
        job: namespace of group names within the user. None takes $EP_RUNTIME_JOB, $SLURM_JOB_ID,
            the jax.distributed coordinator, else the pid.
        labels: dict of texts that `ep-runtime sessions` shows.
        timeout_s: how long to wait for the daemon, and in create_group for other processes.
        on_loss: what happens after a group has ended by a death, a fence or a reclaim. With "end"
            this process exits with code 1 after 5 s, because collectives of XLA could wait for
            ever. It stays if it has made another group by then (docs/operations.md). "continue" is
            for jobs of `ep.distributed`.

    Returns:
        The process's Session; `with` closes it.

    Raises:
        RuntimeUnavailableError: no daemon answers at a given address, or one does not start.
        PermissionDeniedError: the daemon does not serve this user, or its directory cannot be
            trusted.
        VersionSkewError: client and daemon share no protocol version.
        InvalidArgumentError: a wrong argument; "embedded" in a job of several processes; no session
            yet under tracing.
        SpecMismatchError: this process's session with the daemon has another job.

    Cost: one RPC and one heartbeat thread, and the start of a daemon if one must be started.
    Nothing in a step.

    Examples:
        >>> session = ep.connect("embedded")  # without an address: the node's daemon, if it runs
        >>> session.alive, session.address.startswith("unix://")
        (True, True)
    """
    if not isinstance(timeout_s, numbers.Real) or not 0 < timeout_s < float("inf"):
        raise InvalidArgumentError(
            f"timeout_s must be a positive number of seconds, got {timeout_s!r}",
            argument="timeout_s",
        )
    if on_loss not in ("end", "continue"):
        raise InvalidArgumentError(
            f'on_loss must be "end" or "continue", got {on_loss!r}', argument="on_loss"
        )
    job_name(job)
    named = _checked_labels(labels)
    if jax_internals.under_tracing():
        return _connected(choose(address, ask=False), job)
    jax_state.prepare_cpu_pool()
    jax_state.tell_host()

    def make(chosen: addresses.Address) -> OpenSession:
        client = DaemonClient(runtime.open_runtime(chosen, timeout_s), job, timeout_s)
        opened = OpenSession(client, named, Watchdog(_GRACE_S if on_loss == "end" else None))
        client.session = Session(opened)
        return opened

    check = lambda found: _check_same_job(found.client, job)  # noqa: E731
    return open_session.sessions.acquire(choose(address), check, make).client.session


def _checked_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        raise InvalidArgumentError(
            f"labels must map text to text, got {labels!r}", argument="labels"
        )
    for key, value in labels.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise InvalidArgumentError(
                f"labels must map text to text, got {key!r}: {value!r}", argument="labels"
            )
    check_new_labels(labels)
    return dict(labels)


def _connected(chosen: addresses.Address, job: str | None) -> Session:
    """Returns the open session with a daemon, under tracing."""
    found = open_session.sessions.find(chosen)
    if found is None:
        at = chosen.kind if chosen.directory is None else f"unix://{chosen.directory}"
        jax_state.needs_eager("connect", f"session with {at!r}")
    assert found is not None
    _check_same_job(found.client, job)
    return found.client.session


def _check_same_job(found: DaemonClient, job: str | None) -> None:
    """Raises SpecMismatchError if a later connect() asks for another job."""
    if job is not None and job != found.job:
        raise SpecMismatchError(
            f"this process's session with {found.address} has job {found.job!r}, "
            f"this call has job {job!r}; close that session first",
            object="session",
            field="job",
            theirs=found.job,
            ours=job,
        )


def choose(address: str | None, *, ask: bool = True) -> addresses.Address:
    """Returns the address that `connect(address)` uses; starts nothing.

    Without `ask` it does not contact the node's default daemon: an open session with it is proof
    enough.

    $EP_RUNTIME_ADDRESS counts like an argument. Without it: the node's default daemon if it
    answers, else "node" in a job of several processes, else an embedded one.

    Raises:
        PermissionDeniedError: another user could have made the default daemon's directory.
    """
    if address is not None:
        return addresses.parse_address(address)
    given = env.address()
    if given is not None:
        return addresses.parse_address(given, "EP_RUNTIME_ADDRESS")
    if open_session.sessions.embedded():
        return addresses.Address(addresses.EMBEDDED)  # this process has an embedded daemon already
    default = env.runtime_directory()
    known = addresses.Address(addresses.DIRECTORY, default)
    if not ask and open_session.sessions.find(known) is not None:
        return known
    if ask and runtime.answers(addresses.SocketDirectory(default), transport.READ_TIMEOUT_S):
        return known
    started = addresses.NODE if jax_state.num_processes() > 1 else addresses.EMBEDDED
    if ask:
        _log.info("no daemon answers at unix://%s, so connect() takes %r", default, started)
    return addresses.parse_address(started)
