"""The coordinator's list of nodes: checks which nodes may join, and watches their leases.

Nodes are converted to protobuf messages, and back; messages of other daemons are checked.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ep_runtime import wire
from ep_runtime.errors import (
    GroupBusyError,
    InvalidArgumentError,
    PoolExhaustedError,
    StaleHandleError,
    VersionSkewError,
)
from ep_runtime.text import printable
from ep_runtime.v1 import node_service_pb2
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.nodes.config import Endpoint, check_node_name, parse_endpoint
from ep_runtime_server.nodes.facts import (
    ClusterFacts,
    NodeIdentity,
    fact_of_identity,
    identity_of_fact,
)


class NodeState(enum.Enum):
    """States of a node; the values are the protocol's names."""

    JOINED = "JOINED"
    UNREACHABLE = "UNREACHABLE"
    ABSENT = "ABSENT"
    REFUSED = "REFUSED"


@dataclasses.dataclass
class Node:
    """A node in the coordinator's list.

    `since_s` and `heard_s` are monotonic times; `why` is the reason for state REFUSED.
    """

    identity: NodeIdentity
    state: NodeState
    since_s: float
    coordinator: bool = False
    lease_id: str = ""
    heard_s: float = 0.0
    why: str = ""


def check_versions(ours: NodeIdentity, theirs: NodeIdentity) -> None:
    """Checks that two daemons may form groups together.

    They must share a protocol version, and `wire.work_together` must accept their releases.

    Raises:
        VersionSkewError: they may not; the error has both nodes, the field and both values.
    """
    fits = {
        "api_versions": not set(ours.api_versions).isdisjoint(theirs.api_versions),
        "server_version": wire.work_together(ours.server_version, theirs.server_version),
    }
    for field, fit in fits.items():
        mine, other = fact_of_identity(ours)[field], fact_of_identity(theirs)[field]
        if not fit:
            raise VersionSkewError(
                f"node {theirs.node!r} has {field}={other}, the coordinator {ours.node!r} has "
                f"{field}={mine}; install the same major version on both, and minor versions at "
                "most one apart",
                node=theirs.node,
                field=field,
                theirs=other,
                ours=mine,
            )


class Nodes:
    """The nodes of the cluster, which join and must report before their leases end."""

    def __init__(
        self,
        own: NodeIdentity,
        expected: Mapping[str, Endpoint],
        facts: ClusterFacts,
        clock: Clock,
        events: EventLog,
        on_gone: Callable[[str], None] = lambda node: None,
    ) -> None:
        """Gives each earlier node a full lease after a restart of the coordinator.

        `version` changes with each change of `all()`, except if only times change.

        `on_gone(node)` is called if a node left, is unreachable, or its daemon restarted.
        """
        self._on_gone = on_gone
        self.version = 1
        self._own = own
        self._expected = expected
        self._facts = facts
        self._clock = clock
        self._events = events
        now = clock.monotonic_s()
        self._nodes = {
            name: Node(identity_of_fact(name, fields), NodeState.JOINED, now, heard_s=now)
            for name, fields in facts.nodes.items()
            if name != own.node and self._may_join(name)
        }
        for name, address in expected.items():
            if name != own.node and name not in self._nodes:
                self._nodes[name] = self._absent(name, address)
        self._self = Node(own, NodeState.JOINED, now, coordinator=True)

    def _may_join(self, name: str) -> bool:
        return not self._expected or name in self._expected

    def _absent(self, name: str, address: Endpoint) -> Node:
        identity = NodeIdentity(name, address=str(address))
        return Node(identity, NodeState.ABSENT, self._clock.monotonic_s())

    def all(self) -> list[Node]:
        """Returns the coordinator, then all other nodes by name."""
        return [self._self, *(self._nodes[name] for name in sorted(self._nodes))]

    def join(self, identity: NodeIdentity) -> Node:
        """Adds a node, or renews its entry, with a new lease.

        Raises:
            InvalidArgumentError: the cluster's file lacks the node's name.
            VersionSkewError: see check_versions.
            GroupBusyError: another daemon of this name runs, or may still run.
            PoolExhaustedError: there are too many nodes, or the journal cannot be written.
        """
        name = identity.node
        check_versions(self._own, identity)
        if not self._may_join(name):
            raise InvalidArgumentError(
                f"node must be in the coordinator's cluster file, {sorted(self._expected)}, got "
                f"{name!r}",
                argument="node",
            )
        self._check_free(identity)
        if name not in self._nodes and len(self._nodes) + 1 >= limits.MAX_NODES:
            raise PoolExhaustedError(f"a cluster has at most {limits.MAX_NODES} nodes")
        self._facts.remember(name, fact_of_identity(identity))
        now = self._clock.monotonic_s()
        before = self._nodes.get(name)
        node = Node(identity, NodeState.JOINED, now, lease_id=secrets.token_hex(8), heard_s=now)
        self._nodes[name] = node
        self.version += 1
        again = before is not None and before.identity.incarnation == identity.incarnation
        if again and before is not None and before.state is NodeState.JOINED:
            node.since_s = before.since_s  # only the coordinator restarted
        if not again:
            self._on_gone(name)
        self._log("cluster.node_joined", node, "joined again" if again else "joined")
        return node

    def refused(self, identity: NodeIdentity, why: str) -> None:
        """Lists a refused daemon with the reason, unless another daemon has the name."""
        name, now = identity.node, self._clock.monotonic_s()
        try:
            self._check_free(identity)
        except GroupBusyError:
            return
        before = self._nodes.get(name)
        if not self._may_join(name) or (
            before is None and len(self._nodes) + 1 >= limits.MAX_NODES
        ):
            return
        node = Node(identity, NodeState.REFUSED, now, heard_s=now, why=why)
        self._nodes[name] = node
        if before is not None and before.state is NodeState.REFUSED:
            node.since_s = before.since_s
            if before.why == why:
                return
        self.version += 1
        self._on_gone(name)
        self._log("cluster.node_refused", node, f"is refused: {why}", level=logging.WARNING)

    def _check_free(self, identity: NodeIdentity) -> None:
        name = identity.node
        holder = self._own if name == self._own.node else None
        known = self._nodes.get(name)
        if known is not None and known.state is NodeState.JOINED:
            holder = known.identity
        # A daemon with the same ids is the same node restarted: only one daemon at a time can lock
        # the directory that has the node id. The boot id detects a copy on another host.
        if holder is not None and (holder.node_id, holder.boot_id) != (
            identity.node_id,
            identity.boot_id,
        ):
            raise GroupBusyError(
                f"node name {name!r} is taken by the daemon {holder.pid} on host "
                f"{holder.host_name!r} at {holder.address}; the one on host "
                f"{identity.host_name!r} at {identity.address} needs another --node",
                node=name,
                pid=holder.pid,
                host=holder.host_name,
                address=holder.address,
            )

    def report(self, name: str, lease_id: str) -> None:
        """Renews a lease. Raises StaleHandleError if the lease is unknown."""
        node = self._nodes.get(name)
        if node is None or not lease_id or node.lease_id != lease_id:
            raise StaleHandleError(
                f"node {name!r} has no such lease with the coordinator; join again", node=name
            )
        now = self._clock.monotonic_s()
        node.heard_s = now
        if node.state is NodeState.UNREACHABLE:
            node.state, node.since_s = NodeState.JOINED, now
            self.version += 1
            self._log("cluster.node_back", node, "is reachable again")

    def leave(self, name: str, lease_id: str) -> None:
        """Removes a node if it has this lease."""
        node = self._nodes.get(name)
        if node is None or not lease_id or node.lease_id != lease_id:
            return
        self._remove(name)
        self._on_gone(name)
        self._log("cluster.node_left", node, "left")

    def _remove(self, name: str) -> None:
        self._facts.forget(name)
        self.version += 1
        del self._nodes[name]
        if name in self._expected:
            self._nodes[name] = self._absent(name, self._expected[name])

    def tick(self) -> None:
        """Marks nodes without reports as UNREACHABLE, and removes those silent for too long."""
        now = self._clock.monotonic_s()
        for name, node in list(self._nodes.items()):
            silent_s = now - node.heard_s
            if node.state is NodeState.JOINED and silent_s >= limits.NODE_LEASE_S:
                node.state, node.since_s = NodeState.UNREACHABLE, node.heard_s
                self.version += 1
                self._on_gone(name)
                self._log(
                    "cluster.node_unreachable",
                    node,
                    f"sent no report for {silent_s:.0f} s",
                    level=logging.WARNING,
                )
            elif node.state is NodeState.UNREACHABLE and silent_s >= limits.NODE_FORGOTTEN_S:
                self._remove(name)
            elif node.state is NodeState.REFUSED and silent_s >= limits.NODE_LEASE_S:
                self._remove(name)  # it would have asked again if it still ran

    def _log(self, kind: str, node: Node, what: str, *, level: int = logging.INFO) -> None:
        identity = node.identity
        self._events.add(
            kind,
            f"node {identity.node!r} at {identity.address} {what}",
            level=level,
            node=identity.node,
            address=identity.address,
            host=identity.host_name,
            node_pid=identity.pid,
        )


MAX_TEXT_BYTES = 256
MAX_API_VERSIONS = 16
_IDENTITY = tuple(field.name for field in dataclasses.fields(NodeIdentity))


def identity_to_proto(identity: NodeIdentity) -> node_service_pb2.NodeIdentity:
    return wire.filled(node_service_pb2.NodeIdentity, identity)


def identity_from_proto(message: node_service_pb2.NodeIdentity) -> NodeIdentity:
    """Converts an identity. Raises InvalidArgumentError naming a malformed field."""
    versions = tuple(message.api_versions[: MAX_API_VERSIONS + 1])
    others = ("node", "uid", "pid", "api_versions")
    texts = {name: getattr(message, name) for name in _IDENTITY if name not in others}
    for name, text in (*texts.items(), *(("api_versions", version) for version in versions)):
        if not text or not text.isprintable() or len(text.encode()) > MAX_TEXT_BYTES:
            raise InvalidArgumentError(
                f"{name} must be 1 to {MAX_TEXT_BYTES} bytes of printable text, got {text[:80]!r}",
                argument=name,
            )
    if len(versions) > MAX_API_VERSIONS:
        raise InvalidArgumentError(
            f"api_versions must be at most {MAX_API_VERSIONS}", argument="api_versions"
        )
    parse_endpoint(texts["address"], "address")
    return NodeIdentity(
        node=check_node_name(message.node, "node"),
        uid=message.uid,
        pid=message.pid,
        api_versions=versions,
        **texts,
    )


def node_to_proto(node: Node, now_s: float) -> node_service_pb2.NodeInfo:
    return wire.filled(
        node_service_pb2.NodeInfo,
        node,
        identity=identity_to_proto(node.identity),
        state=f"NODE_STATE_{node.state.value}",
        since=wire.duration(max(0.0, now_s - node.since_s)),
    )


def node_from_proto(message: node_service_pb2.NodeInfo, now_s: float) -> Node:
    """Converts a node of the coordinator's list; an unknown state becomes UNREACHABLE."""
    known = {
        node_service_pb2.NodeState.Value(f"NODE_STATE_{state.value}"): state for state in NodeState
    }
    told: dict[str, Any] = {name: getattr(message.identity, name) for name in _IDENTITY}
    told["node"] = check_node_name(told["node"], "node")
    told["address"] = str(parse_endpoint(told["address"], "address"))
    return Node(
        NodeIdentity(**told | {"api_versions": tuple(told["api_versions"])}),
        known.get(message.state, NodeState.UNREACHABLE),
        now_s - wire.seconds(message.since),
        coordinator=message.coordinator,
        why=printable(message.why),
    )
