"""Options of `serve` for a cluster: addresses, certificates and plain TCP."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ep_runtime import files
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_server.nodes.certificates import Tls, read_tls
from ep_runtime_server.nodes.facts import MAX_EPOCH
from ep_runtime_server.nodes.seal import read_secret

MAX_NODE_BYTES = 120
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_LOOPBACK = "127.0.0.1"
_ANY = "0.0.0.0"
_FLAGS = ("node", "listen", "epoch_at_least", "tls_cert", "tls_key", "tls_ca", "insecure", "secret")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """An address HOST:PORT; with port 0 the system chooses the port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_any(self) -> bool:
        """Returns whether the host part stands for all addresses of the host."""
        return _flag(self.host, "is_unspecified")

    @property
    def is_loopback(self) -> bool:
        return self.host == "localhost" or _flag(self.host, "is_loopback")


def _flag(host: str, name: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(host), name))
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """A daemon's settings for its cluster.

    Args:
        node: this daemon's node name.
        listen: the address of this daemon's node service.
        coordinator: the address of the coordinator's node service; None on the coordinator.
        coordinator_name: the coordinator's node name if the cluster's file has it, else empty.
        tls: certificates and key; None for plain TCP.
        secret: the secret that requests must prove on plain TCP, which `serve` requires.
        expected: addresses by node name, from the cluster's file; empty without a file.
        epoch_at_least: a coordinator uses only larger epochs.
    """

    node: str
    listen: Endpoint
    coordinator: Endpoint | None = None
    coordinator_name: str = ""
    tls: Tls | None = None
    expected: Mapping[str, Endpoint] = dataclasses.field(default_factory=dict)
    epoch_at_least: int = 0
    secret: bytes = dataclasses.field(default=b"", repr=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a daemon that belongs to a cluster."""
    group = parser.add_argument_group(
        "cluster", "daemons of several nodes that form groups together; one of them coordinates"
    )
    add = group.add_argument
    add("--coordinator", metavar="HOST:PORT", help="coordinate the cluster, and listen there")
    add("--join", metavar="HOST:PORT", help="join the coordinator at this address")
    add("--cluster", metavar="FILE", help="TOML file with coordinator, and addresses in [nodes]")
    add("--node", metavar="NAME", help="this node's name (default: the host's)")
    add(
        "--listen",
        metavar="HOST:PORT",
        help="with --join: address at which other nodes reach this one",
    )
    add(
        "--epoch-at-least",
        type=int,
        metavar="N",
        help="for a coordinator that lost its file: the largest epoch that its nodes show",
    )
    add("--tls-cert", metavar="PEM", help="certificate that contains the node's name")
    add("--tls-key", metavar="PEM", help="key of --tls-cert")
    add("--tls-ca", metavar="PEM", help="authority that signed every node's certificate")
    add(
        "--insecure",
        action="store_true",
        help="use plain TCP without certificates; on loopback unless --listen gives an address",
    )
    add(
        "--secret",
        metavar="FILE",
        help="with --insecure: the secret that all daemons share; mode 0600",
    )


def parse_endpoint(text: str, argument: str, *, default_host: str = "") -> Endpoint:
    """Parses HOST:PORT or [IPV6]:PORT; also :PORT and PORT if `default_host` is set.

    Raises:
        InvalidArgumentError: `text` has none of these forms.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]") and _flag(host[1:-1], "version"):
        host = host[1:-1]
    elif host and not _HOST.fullmatch(host):
        port = ""
    host = host or default_host
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgumentError(
            f"{argument} must be HOST:PORT with a port up to 65535, got {text!r}", argument=argument
        )
    return Endpoint(host, int(port))


def check_node_name(name: str, argument: str) -> str:
    """Returns `name`. Raises InvalidArgumentError if it is not a lower-case DNS name."""
    if len(name) > MAX_NODE_BYTES or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"{argument} must be a lower-case DNS name of at most {MAX_NODE_BYTES} bytes, "
            f"got {name!r}",
            argument=argument,
        )
    return name


def make_cluster_config(arguments: argparse.Namespace) -> ClusterConfig | None:
    """Makes the cluster's configuration from the flags; None if they name no cluster.

    Raises:
        InvalidArgumentError: flags that contradict each other, files that cannot be read, an
            address that plain TCP may not use.
    """
    roles = [name for name in ("coordinator", "join", "cluster") if getattr(arguments, name)]
    if len(roles) > 1:
        given = " and ".join(f"--{name}" for name in roles)
        raise InvalidArgumentError(
            f"{given}: give one of --coordinator, --join and --cluster", argument=f"--{roles[1]}"
        )
    if not roles:
        alone = [flag for flag in _FLAGS if getattr(arguments, flag)]
        if alone:
            flag = f"--{alone[0].replace('_', '-')}"
            raise InvalidArgumentError(
                f"{flag} needs --coordinator, --join or --cluster", argument=flag
            )
        return None
    if arguments.listen and not arguments.join:
        raise InvalidArgumentError(
            "--listen needs --join; --coordinator and --cluster name the address themselves",
            argument="--listen",
        )
    tls = _read_tls(arguments)
    name = check_node_name(arguments.node or socket.gethostname().lower(), "--node")
    if arguments.cluster:
        made = _from_file(Path(arguments.cluster), name, tls)
    elif arguments.coordinator:
        listen = parse_endpoint(
            arguments.coordinator, "--coordinator", default_host=_ANY if tls else _LOOPBACK
        )
        made = ClusterConfig(name, listen, tls=tls)
    else:
        made = _joining(arguments, name, tls)
    if tls is None:
        made = dataclasses.replace(made, secret=_read_secret(arguments))
    if tls is None and made.listen.is_any:
        raise InvalidArgumentError(
            f"--insecure needs loopback or one named address, got {made.listen}, which means every "
            "address of the host",
            argument="--insecure",
        )
    epoch = arguments.epoch_at_least or 0
    if epoch and (made.coordinator is not None or not 0 < epoch <= MAX_EPOCH):
        raise InvalidArgumentError(
            f"--epoch-at-least is for the coordinator, 1 to {MAX_EPOCH}, got {epoch}",
            argument="--epoch-at-least",
        )
    return dataclasses.replace(made, epoch_at_least=epoch)


def _joining(arguments: argparse.Namespace, name: str, tls: Tls | None) -> ClusterConfig:
    coordinator = parse_endpoint(arguments.join, "--join", default_host=_LOOPBACK)
    if arguments.listen:
        listen = parse_endpoint(
            arguments.listen, "--listen", default_host=_ANY if tls else _LOOPBACK
        )
    else:
        listen = Endpoint(local_address_towards(coordinator), 0)
        if tls is None and not listen.is_loopback:
            raise InvalidArgumentError(
                "--insecure uses loopback unless you name an address; --listen "
                f"{listen.host}:PORT admits everybody who reaches it",
                argument="--insecure",
            )
    return ClusterConfig(name, listen, coordinator, tls=tls)


def local_address_towards(target: Endpoint) -> str:
    """Returns the address from which this host reaches `target`, without sending anything.

    Raises:
        InvalidArgumentError: the target's name is unknown, or there is no route to it.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            target.host, target.port or 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidArgumentError(
            "cannot find the address at which other nodes reach this one, because "
            f"{target} has no route ({error.strerror or error}); give --listen HOST:PORT",
            argument="--join",
        ) from error


def _read_secret(arguments: argparse.Namespace) -> bytes:
    """Reads the secret for plain TCP, needed because all local users can reach loopback."""
    if arguments.allow_uid or arguments.allow_gid:
        raise InvalidArgumentError(
            "--insecure must not be given with --allow-uid or --allow-gid, because it is for "
            "daemons that serve one user; take certificates "
            "(`ep-runtime certs` makes some for a lab)",
            argument="--insecure",
        )
    if not arguments.secret:
        raise InvalidArgumentError(
            "--insecure needs --secret FILE, the same for every daemon: `(umask 077; openssl rand "
            "-hex 32 > FILE)` makes one",
            argument="--secret",
        )
    return read_secret(arguments.secret)


def _read_tls(arguments: argparse.Namespace) -> Tls | None:
    given = {
        flag: getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        for flag in ("--tls-cert", "--tls-key", "--tls-ca")
    }
    missing = [flag for flag, path in given.items() if not path]
    if arguments.insecure:
        if len(missing) < len(given):
            raise InvalidArgumentError(
                "--insecure means no certificates; give either", argument="--insecure"
            )
        return None
    if arguments.secret:
        raise InvalidArgumentError("--secret goes with --insecure", argument="--secret")
    if missing:
        raise InvalidArgumentError(
            f"daemons trust each other by certificates: {', '.join(missing)} missing (`ep-runtime "
            "certs` makes some for a lab); plain TCP only with --insecure",
            argument=missing[0],
        )
    return read_tls(*given.values())


def _from_file(path: Path, name: str, tls: Tls | None) -> ClusterConfig:
    """Reads the cluster's file. Raises InvalidArgumentError, naming a wrong key."""
    try:
        content = tomllib.loads(files.read(path).decode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgumentError(
            f"--cluster: cannot read {path}: {reason}", argument="--cluster"
        ) from error
    expected = _nodes_of(path, content)
    coordinator = content["coordinator"]
    for wanted, what in ((coordinator, "coordinator"), (name, "--node (this host's by default)")):
        if wanted not in expected:
            raise InvalidArgumentError(
                f"--cluster: {what} must be one of {sorted(expected)}, the [nodes] of {path}, got "
                f"{wanted!r}",
                argument="--cluster",
            )
    other = None if coordinator == name else expected[coordinator]
    return ClusterConfig(name, expected[name], other, coordinator, tls, expected)


def _nodes_of(path: Path, content: dict[str, Any]) -> dict[str, Endpoint]:
    nodes = content.get("nodes")
    unknown = sorted(content.keys() - {"coordinator", "nodes"})
    if unknown or not isinstance(content.get("coordinator"), str) or not isinstance(nodes, dict):
        raise InvalidArgumentError(
            f'--cluster: {path} must have coordinator = "NAME" and [nodes] of NAME = "HOST:PORT"'
            + (f", and nothing else; got {unknown}" if unknown else ""),
            argument="--cluster",
        )
    return {
        check_node_name(name, f"--cluster: a name in [nodes] of {path}"): parse_endpoint(
            str(address), f"--cluster: address of {name!r} in {path}"
        )
        for name, address in nodes.items()
    }
