"""A node's membership of a cluster: joins the coordinator, reports, and rejoins after a loss.

A node whose coordinator is unreachable still serves its own jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import random
from collections.abc import Iterable
from typing import Any

from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError, StaleHandleError
from ep_runtime.v1 import node_service_pb2 as pb
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.nodes import registry
from ep_runtime_server.nodes.config import Endpoint
from ep_runtime_server.nodes.facts import ClusterFacts, NodeIdentity
from ep_runtime_server.nodes.peers import Peers


class Standing(enum.Enum):
    """States of a daemon's link to the coordinator; the values are the protocol's names."""

    COORDINATOR = "COORDINATOR"
    JOINING = "JOINING"
    JOINED = "JOINED"
    LOST = "LOST"
    REFUSED = "REFUSED"


class Membership:
    """A node's membership of the coordinator's cluster.

    Attributes:
        link: the state of the link to the coordinator.
        since_s: since when the link has this state.
        error: the reason for the state; empty if the node has joined.
        lease_id: the lease of the last join; empty before the first join.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        coordinator: Endpoint,
        coordinator_name: str,
        peers: Peers,
        facts: ClusterFacts,
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._identity = identity
        self._address = str(coordinator)
        self._name = coordinator_name
        self._peers = peers
        self._facts = facts
        self._clock = clock
        self._events = events
        self.lease_id = ""
        self._version = 0
        self._nodes: list[registry.Node] = []
        self.link = Standing.JOINING
        self.since_s = clock.monotonic_s()
        self.error = ""
        self._heard_s = self.since_s
        self._doubted = asyncio.Event()

    def doubt(self) -> None:
        """Makes the node report at once, because its lease or its list of nodes may be outdated.

        The node joins again if the coordinator refuses the report.
        """
        self._doubted.set()

    def nodes(self) -> list[registry.Node]:
        """Returns the coordinator's latest list, corrected for this node and the coordinator."""
        found = [node for node in self._nodes if not node.coordinator]
        ours = registry.Node(self._identity, registry.NodeState.JOINED, self.since_s)
        if self.link in (Standing.JOINING, Standing.REFUSED):
            joins = self.link is Standing.JOINING
            ours.state = registry.NodeState.ABSENT if joins else registry.NodeState.REFUSED
            ours.why = self.error
        found = [ours if node.identity.node == self._identity.node else node for node in found]
        if ours not in found:
            found.append(ours)
        return [self._coordinator(), *sorted(found, key=lambda node: node.identity.node)]

    def _coordinator(self) -> registry.Node:
        told = next((node for node in self._nodes if node.coordinator), None)
        identity = told.identity if told is not None else NodeIdentity(self._name)
        reachable = self.link in (Standing.JOINED, Standing.REFUSED)
        return registry.Node(
            dataclasses.replace(identity, address=self._address),
            registry.NodeState.JOINED if reachable else registry.NodeState.UNREACHABLE,
            told.since_s if told is not None and reachable else self._heard_s,
            coordinator=True,
        )

    async def run(self) -> None:
        """Joins and reports until cancelled."""
        pause_s = limits.NODE_RETRY_FIRST_S
        while True:
            try:
                await self._join()
                pause_s = limits.NODE_RETRY_FIRST_S
                await self._report()
                continue
            except RuntimeUnavailableError as error:
                # LOST is only for a node that had joined.
                self._stand(
                    Standing.JOINING if self.link is Standing.JOINING else Standing.LOST, str(error)
                )
                wait_s, pause_s = pause_s, min(2 * pause_s, limits.NODE_RETRY_MOST_S)
            except EpRuntimeError as error:
                self._stand(Standing.REFUSED, str(error))
                wait_s, pause_s = limits.NODE_REFUSED_RETRY_S, limits.NODE_RETRY_FIRST_S
            # Wait a random time, so that not all nodes of a lost coordinator rejoin at once.
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))

    async def _join(self) -> None:
        request = pb.JoinClusterRequest(
            identity=registry.identity_to_proto(self._identity), epoch=self._facts.epoch
        )
        answer: pb.JoinClusterResponse = await self._ask("JoinCluster", request)
        self._facts.heard(answer.epoch, answer.cluster_id)
        self.lease_id = answer.lease_id
        self._version = answer.nodes_version
        self._heard(answer.nodes)
        self._stand(Standing.JOINED, "")

    async def _report(self) -> None:
        """Renews the lease until the coordinator no longer knows it, as after a restart."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.NODE_REPORT_INTERVAL_S):
                    await self._doubted.wait()
            self._doubted.clear()
            request = pb.ReportNodeRequest(
                node=self._identity.node, lease_id=self.lease_id, nodes_version=self._version
            )
            try:
                answer: pb.ReportNodeResponse = await self._ask("ReportNode", request)
            except StaleHandleError:
                return
            self._facts.heard(answer.epoch)
            known, self._version = self._version, answer.nodes_version
            if known and known == answer.nodes_version:
                self._heard_s = self._clock.monotonic_s()
            else:
                self._heard(answer.nodes)

    async def _ask(self, method: str, request: Any, within_s: float = limits.NODE_RPC_S) -> Any:
        return await self._peers.ask(self._name, self._address, method, request, within_s=within_s)

    def _heard(self, nodes: Iterable[pb.NodeInfo]) -> None:
        now = self._clock.monotonic_s()
        self._heard_s = now
        self._nodes = [registry.node_from_proto(message, now) for message in nodes]

    def _stand(self, link: Standing, error: str) -> None:
        """Sets the link's state, and adds an event if it changed."""
        before, self.error = self.link, error
        if link is before:
            return
        self.link, self.since_s = link, self._clock.monotonic_s()
        kind, level, text = {
            Standing.JOINED: ("cluster.joined", logging.INFO, "joined"),
            Standing.LOST: ("cluster.coordinator_lost", logging.WARNING, "lost"),
            Standing.REFUSED: ("cluster.refused", logging.ERROR, "is refused by"),
        }[link]
        self._events.add(
            kind,
            f"node {self._identity.node!r} {text} the coordinator at {self._address}"
            + (f": {error}" if error else ""),
            level=level,
            node=self._identity.node,
            coordinator=self._address,
        )

    async def leave(self) -> None:
        """Leaves the cluster within NODE_LEAVE_S."""
        if self.link is Standing.JOINED:
            request = pb.LeaveClusterRequest(node=self._identity.node, lease_id=self.lease_id)
            try:
                await self._ask("LeaveCluster", request, limits.NODE_LEAVE_S)
            except EpRuntimeError as error:  # the lease will expire
                logging.getLogger(__name__).info("no goodbye: %s", error)
