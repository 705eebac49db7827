"""Answers the RPCs of NodeService: converts requests, calls the cluster, converts answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import grpc

from ep_runtime import wire
from ep_runtime.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    StaleHandleError,
    VersionSkewError,
)
from ep_runtime.text import printable
from ep_runtime.v1 import node_service_pb2 as pb
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.cluster import views
from ep_runtime_server.cluster.assembly import Assemblies
from ep_runtime_server.cluster.coordination import ViewIds
from ep_runtime_server.cluster.relay import Relay
from ep_runtime_server.cluster.spanning import Spanning
from ep_runtime_server.groups.claims import checked_wait
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes import registry
from ep_runtime_server.nodes.facts import ClusterFacts, NodeIdentity

Context = grpc.aio.ServicerContext[Any, Any]

# How long a list of nodes is reused for later answers.
LISTED_ANEW_S = 0.25
MAX_MADE = 16


def check_certificate(context: Context, node: str) -> None:
    """Checks that the caller's certificate names the node. Accepts any caller on plain TCP.

    Raises:
        PermissionDeniedError: the certificate names other nodes; the error has all names.
    """
    about = context.auth_context()
    if b"ssl" not in about.get("transport_security_type", ()):
        return
    # Compare DNS names only, because a URI or an address could look like a node's name.
    names = [name.decode(errors="replace") for name in about.get("peer_dns", ())]
    if node not in names:
        raise PermissionDeniedError(
            f"--node must be a DNS name in --tls-cert, got {node!r} with a certificate for "
            f"{names[:8]}",
            node=node,
            names=names[:8],
        )


class NodeServicer:
    """Implements NodeService; see node_service.proto."""

    def __init__(
        self,
        nodes: registry.Nodes | None,
        assemblies: Assemblies,
        view_ids: ViewIds,
        relay: Relay,
        spanning: Spanning,
        facts: ClusterFacts,
        clock: Clock,
        coordinator: Callable[[], NodeIdentity],
    ) -> None:
        """`nodes` is None unless we coordinate; `coordinator()` has the coordinator's address."""
        self._nodes = nodes
        self._assemblies = assemblies
        self._view_ids = view_ids
        self._relay = relay
        self._spanning = spanning
        self._facts = facts
        self._clock = clock
        self._coordinator = coordinator
        self._made: dict[int, pb.GroupView] = {}  # converted views by epoch, the last MAX_MADE
        self._listed: tuple[int, float, list[pb.NodeInfo]] = (0, 0.0, [])  # version, time, nodes

    def _list(self) -> registry.Nodes:
        if self._nodes is None:
            address = self._coordinator().address
            raise StaleHandleError(
                f"this node does not coordinate; the coordinator is at {address}",
                coordinator=address,
            )
        return self._nodes

    def _all(self, nodes: registry.Nodes) -> list[pb.NodeInfo]:
        """Lists all nodes; reuses a list for LISTED_ANEW_S."""
        now = self._clock.monotonic_s()
        version, made_s, found = self._listed
        if version != nodes.version or now - made_s > LISTED_ANEW_S:
            found = [registry.node_to_proto(node, now) for node in nodes.all()]
            self._listed = nodes.version, now, found
        return found

    async def JoinCluster(
        self, request: pb.JoinClusterRequest, context: Context
    ) -> pb.JoinClusterResponse:
        nodes = self._list()
        identity = registry.identity_from_proto(request.identity)
        check_certificate(context, identity.node)
        try:
            self._facts.check_claim(identity.node, request.epoch)
            node = nodes.join(identity)
        except (InvalidArgumentError, VersionSkewError) as error:
            nodes.refused(identity, str(error))
            raise
        self._facts.heard(request.epoch)
        return pb.JoinClusterResponse(
            cluster_id=self._facts.cluster_id,
            epoch=self._facts.epoch,
            lease_id=node.lease_id,
            lease=wire.duration(limits.NODE_LEASE_S),
            report_interval=wire.duration(limits.NODE_REPORT_INTERVAL_S),
            nodes=self._all(nodes),
            nodes_version=nodes.version,
        )

    async def ReportNode(
        self, request: pb.ReportNodeRequest, context: Context
    ) -> pb.ReportNodeResponse:
        nodes = self._check_lease(request, context)
        # Send the list only if it is new, because each node reports every two seconds.
        news = request.nodes_version != nodes.version
        return pb.ReportNodeResponse(
            epoch=self._facts.epoch,
            nodes=self._all(nodes) if news else (),
            nodes_version=nodes.version,
        )

    async def LeaveCluster(
        self, request: pb.LeaveClusterRequest, context: Context
    ) -> pb.LeaveClusterResponse:
        nodes = self._list()
        check_certificate(context, request.node)
        nodes.leave(request.node, request.lease_id)
        return pb.LeaveClusterResponse()

    def _check_lease(self, request: Any, context: Context) -> registry.Nodes:
        nodes = self._list()
        check_certificate(context, request.node)
        nodes.report(request.node, request.lease_id)
        return nodes

    def _owner(self, request: Any, context: Context) -> Owner:
        """Checks the lease of a request about a group, and returns the group's owner."""
        self._check_lease(request, context)
        return views.key_from_proto(request.key)

    async def JoinGroup(
        self, request: pb.JoinGroupRequest, context: Context
    ) -> pb.JoinGroupResponse:
        owner = self._owner(request, context)
        spec = wire.group_spec_from_proto(request.spec)
        claims = views.claims_from_proto(request.claims, spec)
        part = views.NodePart(request.node, spec, claims, request.generation)
        if not request.generation:
            self._assemblies.differ(owner, part)
            return pb.JoinGroupResponse()
        known_missing = list(views.ranks_from_proto(request.missing_ranks))
        wait_s = checked_wait(wire.seconds(request.wait))
        view, missing = await self._assemblies.join(owner, part, known_missing, wait_s)
        return pb.JoinGroupResponse(
            view=self._view(view) if view is not None else None, missing_ranks=missing
        )

    def _view(self, view: views.GroupView) -> pb.GroupView:
        """Converts a view once for all nodes that ask for it."""
        if view.epoch not in self._made:
            self._made[view.epoch] = views.view_to_proto(view)
            if len(self._made) > MAX_MADE:
                del self._made[next(iter(self._made))]
        return self._made[view.epoch]

    async def ReportInit(
        self, request: pb.ReportInitRequest, context: Context
    ) -> pb.ReportInitResponse:
        owner = self._owner(request, context)
        self._assemblies.report(request.node, owner, request.epoch, printable(request.error))
        return pb.ReportInitResponse()

    async def AwaitGroup(
        self, request: pb.AwaitGroupRequest, context: Context
    ) -> pb.AwaitGroupResponse:
        owner = self._owner(request, context)
        wait_s = checked_wait(wire.seconds(request.wait))
        outcome, reason = await self._assemblies.outcome(owner, request.epoch, wait_s)
        return pb.AwaitGroupResponse(outcome=f"VIEW_OUTCOME_{outcome.value}", reason=reason)

    async def GetViewIds(
        self, request: pb.GetViewIdsRequest, context: Context
    ) -> pb.GetViewIdsResponse:
        owner = self._owner(request, context)
        made = await self._view_ids.of(owner, request.epoch, request.num_domains)
        return pb.GetViewIdsResponse(unique_ids=made.ids, nccl_version=made.version)

    async def TellGroup(
        self, request: pb.TellGroupRequest, context: Context
    ) -> pb.TellGroupResponse:
        check_certificate(context, request.node)
        owner = views.key_from_proto(request.key)
        report = views.report_from_proto(request)
        self._assemblies.ended(owner, request.epoch, report)
        ends = self._spanning.ends
        ends.heard(owner, request.epoch, report)
        if request.reports and request.node != self._coordinator().node:
            raise PermissionDeniedError(
                f"node {request.node!r} does not coordinate, so it has no reports of others",
                node=request.node,
            )
        for passed_on in map(views.report_from_proto, request.reports):
            with contextlib.suppress(PermissionDeniedError):  # its sender's fault, and our own
                ends.heard(owner, request.epoch, passed_on)
        if self._nodes is None:
            return pb.TellGroupResponse(told=not request.others)
        if len(request.others) > limits.MAX_NODES:
            raise InvalidArgumentError(
                f"others must be at most {limits.MAX_NODES} nodes, got {len(request.others)}",
                argument="others",
            )
        others = frozenset(request.others)
        unheard = await self._relay.pass_on(owner, request.epoch, report, others)
        return pb.TellGroupResponse(told=True, unheard=unheard)
