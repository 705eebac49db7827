"""NodeService: convert, call, convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from ep_runtime import wire
from ep_runtime.errors import PermissionDeniedError, StaleHandleError
from ep_runtime.v1 import node_service_pb2 as pb
from ep_runtime.v1 import node_service_pb2_grpc
from ep_runtime_server import config, node_wire
from ep_runtime_server.clock import Clock
from ep_runtime_server.cluster_facts import ClusterFacts
from ep_runtime_server.nodes import Nodes

Context = grpc.aio.ServicerContext


def check_certificate(context: Context[Any, Any], node: str) -> None:
    """Whether the caller's certificate is the node's. Plain TCP has none, and proves nothing.

    Raises:
        PermissionDeniedError: it is another's; names both.
    """
    about = context.auth_context()
    if b"ssl" not in about.get("transport_security_type", ()):
        return
    names = [name.decode(errors="replace") for name in about["x509_subject_alternative_name"]]
    if node not in names:
        raise PermissionDeniedError(
            f"a daemon calls itself node {node!r}, and its certificate is for {names[:8]}; "
            "--node and --tls-cert must belong together",
            node=node,
            names=names[:8],
        )


class NodeServicer(node_service_pb2_grpc.NodeServiceServicer):
    """See node_service.proto."""

    def __init__(
        self, nodes: Nodes | None, facts: ClusterFacts, clock: Clock, coordinator: Callable[[], str]
    ) -> None:
        """`nodes` is None where we are not the coordinator, which is at `coordinator()`."""
        self._nodes = nodes
        self._facts = facts
        self._clock = clock
        self._coordinator = coordinator

    def _list(self) -> Nodes:
        if self._nodes is None:
            raise StaleHandleError(
                f"this node does not coordinate; the coordinator is at {self._coordinator()}",
                coordinator=self._coordinator(),
            )
        return self._nodes

    def _all(self, nodes: Nodes) -> list[Any]:
        now = self._clock.monotonic_s()
        return [node_wire.node_to_proto(node, now) for node in nodes.all()]

    async def JoinCluster(  # noqa: N802
        self, request: pb.JoinClusterRequest, context: Context[Any, Any]
    ) -> pb.JoinClusterResponse:
        nodes = self._list()
        identity = node_wire.identity_from_proto(request.identity)
        check_certificate(context, identity.node)
        node = nodes.join(identity)
        self._facts.heard(request.epoch)
        return pb.JoinClusterResponse(
            cluster_id=self._facts.cluster_id,
            epoch=self._facts.epoch,
            lease_id=node.lease_id,
            lease=wire.duration(config.NODE_LEASE_S),
            report_interval=wire.duration(config.NODE_REPORT_INTERVAL_S),
            nodes=self._all(nodes),
        )

    async def ReportNode(  # noqa: N802
        self, request: pb.ReportNodeRequest, context: Context[Any, Any]
    ) -> pb.ReportNodeResponse:
        nodes = self._list()
        check_certificate(context, request.node)
        nodes.report(request.node, request.lease_id)
        return pb.ReportNodeResponse(epoch=self._facts.epoch, nodes=self._all(nodes))

    async def LeaveCluster(  # noqa: N802
        self, request: pb.LeaveClusterRequest, context: Context[Any, Any]
    ) -> pb.LeaveClusterResponse:
        nodes = self._list()
        check_certificate(context, request.node)
        nodes.leave(request.node, request.lease_id)
        return pb.LeaveClusterResponse()
