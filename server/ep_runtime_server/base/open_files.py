"""Counts and limits this process's file descriptors.

Some are reserved for the daemon itself, its cluster and `admin.sock`. Without this reserve, users
who hold all descriptors would also keep an operator from connecting.
"""

from __future__ import annotations

import errno
import os
import resource

from ep_runtime.errors import InvalidArgumentError, PoolExhaustedError
from ep_runtime_server.base import limits

LEAST_FDS = 128
# Reserved for the daemon: its files, two packets of windows, and connections to admin.sock.
RESERVED_FDS = 256

_HOW = "ulimit -n, LimitNOFILE= of systemd"


def num_open() -> int:
    """Counts open descriptors. Raises OSError if none is left to list them with."""
    return len(os.listdir("/proc/self/fd")) - 1  # minus the descriptor of the listing


def most_open() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_most_open() -> None:
    """Raises the soft limit of descriptors, because a group of W ranks needs W + 2 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_of_nodes() -> int:
    """Returns how many connections other nodes may open; the daemon opens as many to them."""
    return min(2 * limits.MAX_NODES, most_open() // 8)


def for_users(*, cluster: bool) -> int:
    """Returns how many descriptors all users may have together.

    Raises InvalidArgumentError if the limit of open files is below LEAST_FDS.
    """
    most = most_open()
    if most < LEAST_FDS:
        raise InvalidArgumentError(
            f"the limit of open files must be {LEAST_FDS} or more, got {most}; raise it ({_HOW})",
            argument="ulimit -n",
        )
    return most - min(RESERVED_FDS, most // 2) - (2 * most_of_nodes() if cluster else 0)


def is_shortage(error: OSError) -> bool:
    """Returns whether an error says that the process or the host ran out of descriptors."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def exhausted(what: str, error: OSError) -> PoolExhaustedError:
    """Makes the error for a refusal by the kernel, with counts if descriptors ran out."""
    if not is_shortage(error):
        return PoolExhaustedError(f"{what}: {error.strerror}; retry")
    most = most_open()
    return PoolExhaustedError(
        f"{what}: the daemon is out of file descriptors, its limit of open files is {most}; retry, "
        f"or raise it ({_HOW})",
        resource="fds",
        limit=most,
    )
