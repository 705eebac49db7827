"""The daemon's configuration, resolved and validated once."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from ep_runtime.errors import InvalidArgumentError, PermissionDeniedError
from ep_runtime_server.base.limits import DEFAULT_DRAIN_S, DEFAULT_RECOVERY_S
from ep_runtime_server.callers.credentials import Peer
from ep_runtime_server.callers.quotas import UserLimits
from ep_runtime_server.nodes.config import ClusterConfig, Endpoint, parse_endpoint


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """All settings of one daemon.

    Args:
        directory: the absolute path of the directory of the sockets.
        allow_uids: users served in addition to root and the daemon's user.
        allow_gids: groups whose members are served.
        max_host_bytes: limit of the bytes of host windows and boards together.
        max_bytes_per_gpu: limit of the bytes of windows on one GPU; None for the whole GPU.
        per_user: limits of one user.
        drain_s: how long the daemon waits for sessions to end after SIGTERM.
        idle_exit_s: end after this long without a session; None to never end.
        parent_pidfd: pidfd of a process; the daemon ends when that process is gone.
        ready_fd: receives one line of JSON once the sockets answer, then is closed.
        recovery_s: how long a restarted daemon waits for processes it knew before.
        testing: names of TESTING_SWITCHES, or failpoints.
        cluster: settings of the cluster; None for a single node.
        metrics: address that Prometheus reads; None for no metrics.
        metrics_detail: whether metrics include series for each rank and expert of each layer.
    """

    directory: Path
    allow_uids: frozenset[int] = frozenset()
    allow_gids: frozenset[int] = frozenset()
    max_host_bytes: int = 0
    max_bytes_per_gpu: int | None = None
    per_user: UserLimits = UserLimits()
    log_level: str = "info"
    drain_s: float = DEFAULT_DRAIN_S
    idle_exit_s: float | None = None
    parent_pidfd: int | None = None
    ready_fd: int | None = None
    recovery_s: float = DEFAULT_RECOVERY_S
    testing: frozenset[str] = frozenset()
    cluster: ClusterConfig | None = None
    metrics: Endpoint | None = None
    metrics_detail: bool = False

    @property
    def open_to_others(self) -> bool:
        """Returns whether users other than root and the daemon's user may connect."""
        return bool(self.allow_uids or self.allow_gids)

    def check_served(self, peer: Peer) -> None:
        """Raises PermissionDeniedError if the user may not connect."""
        served = (
            peer.uid in (0, os.geteuid())
            or peer.uid in self.allow_uids
            or not self.allow_gids.isdisjoint(peer.gids)
        )
        if not served:
            raise PermissionDeniedError(
                f"uid {peer.uid} is not served here; start the daemon with --allow-uid {peer.uid} "
                "or --allow-gid",
                uid=peer.uid,
                pid=peer.pid,
            )


def merged(
    ours: ServerConfig, theirs: ServerConfig, changed: Iterable[str]
) -> tuple[ServerConfig, list[str]]:
    """Merges changed keys of `theirs` into `ours`, and returns the keys that need a restart."""
    left = []
    for key in changed:
        name = key.replace("-", "_")
        if name in ("drain_s", "log_level", "idle_exit_s", "max_bytes_per_gpu"):
            ours = dataclasses.replace(ours, **{name: getattr(theirs, name)})
        elif name == "max_host_bytes":  # a user's share follows this limit, unless it was set
            host_bytes = theirs.per_user.host_bytes
            per_user = dataclasses.replace(ours.per_user, host_bytes=host_bytes)
            new = theirs.max_host_bytes
            ours = dataclasses.replace(ours, max_host_bytes=new, per_user=per_user)
        elif name.endswith("_per_uid") or name == "max_retain_s":
            limit = name.removeprefix("max_").removesuffix("_per_uid")
            value = getattr(theirs.per_user, limit)
            per_user = dataclasses.replace(ours.per_user, **{limit: value})
            ours = dataclasses.replace(ours, per_user=per_user)
        # Needs a restart if no other users were or will be allowed: the directory's mode changes.
        elif name in ("allow_uid", "allow_gid") and ours.open_to_others and theirs.open_to_others:
            ours = dataclasses.replace(ours, **{f"{name}s": getattr(theirs, f"{name}s")})
        else:
            left.append(key)
    return ours, left


def parse_metrics(text: str) -> Endpoint:
    """Parses the address of `--metrics`: HOST:PORT, or PORT on loopback.

    Raises:
        InvalidArgumentError: `text` is not an address, or prometheus-client is not installed.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise InvalidArgumentError(
            "--metrics needs prometheus-client: pip install 'ep-runtime[metrics]'",
            argument="--metrics",
        )
    return parse_endpoint(text, "--metrics", default_host="127.0.0.1")


def parse_bytes(text: str) -> int:
    """Parses a size such as '1073741824', '512M' or '2GiB', and returns bytes.

    Raises:
        InvalidArgumentError: not a positive size.
    """
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    cleaned = text.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = cleaned.rstrip("KMGT"), cleaned[len(cleaned.rstrip("KMGT")) :]
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise InvalidArgumentError(
            f"a size must be a positive number with K, M, G or T, got {text!r}", argument="size"
        )
    return size
