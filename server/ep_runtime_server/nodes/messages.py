"""Converts nodes to protobuf messages, and back; checks messages of other daemons."""

from __future__ import annotations

import dataclasses
from typing import Any

from ep_runtime import wire
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.text import printable
from ep_runtime.v1 import node_service_pb2
from ep_runtime_server.nodes.config import check_node_name, parse_endpoint
from ep_runtime_server.nodes.facts import NodeIdentity
from ep_runtime_server.nodes.registry import Node, NodeState

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
    return node_service_pb2.NodeInfo(
        identity=identity_to_proto(node.identity),
        coordinator=node.coordinator,
        state=f"NODE_STATE_{node.state.value}",
        since=wire.duration(max(0.0, now_s - node.since_s)),
        why=node.why,
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
