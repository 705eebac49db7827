"""A node's place in the cluster: joins the coordinator, reports, and joins again after a loss.

Nothing here can end the daemon: a node whose coordinator is away serves its own jobs.
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
from ep_runtime_server.nodes import messages
from ep_runtime_server.nodes.config import Endpoint
from ep_runtime_server.nodes.facts import ClusterFacts
from ep_runtime_server.nodes.identity import NodeIdentity
from ep_runtime_server.nodes.peers import Peers
from ep_runtime_server.nodes.registry import Node, NodeState


class Standing(enum.Enum):
    """How a daemon stands with its coordinator. Values are the names on the wire."""

    COORDINATOR = "COORDINATOR"
    JOINING = "JOINING"
    JOINED = "JOINED"
    LOST = "LOST"
    REFUSED = "REFUSED"


class Membership:
    """Attributes:
    link, since_s, error: how we stand with the coordinator, since when, and why.
    lease_id: of the last join; empty before.
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
        self._nodes: list[Node] = []
        self.link = Standing.JOINING
        self.since_s = clock.monotonic_s()
        self.error = ""
        self._heard_s = self.since_s
        self._doubted = asyncio.Event()

    def doubt(self) -> None:
        """Makes the node report now, because its list is old: its lease is unknown, or a node is
        not in the list. It joins again if the report is refused."""
        self._doubted.set()

    def nodes(self) -> list[Node]:
        """As the coordinator told lately; of itself and of us we know better."""
        found = [node for node in self._nodes if not node.coordinator]
        ours = Node(self._identity, NodeState.JOINED, self.since_s)
        if self.link in (Standing.JOINING, Standing.REFUSED):
            joins = self.link is Standing.JOINING
            ours.state = NodeState.ABSENT if joins else NodeState.REFUSED
            ours.why = self.error
        found = [ours if node.identity.node == self._identity.node else node for node in found]
        if ours not in found:
            found.append(ours)
        return [self._coordinator(), *sorted(found, key=lambda node: node.identity.node)]

    def _coordinator(self) -> Node:
        told = next((node for node in self._nodes if node.coordinator), None)
        identity = told.identity if told is not None else NodeIdentity(self._name)
        reachable = self.link in (Standing.JOINED, Standing.REFUSED)
        return Node(
            dataclasses.replace(identity, address=self._address),
            NodeState.JOINED if reachable else NodeState.UNREACHABLE,
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
                # A node that never joined loses nothing.
                self._stand(
                    Standing.JOINING if self.link is Standing.JOINING else Standing.LOST, str(error)
                )
                wait_s, pause_s = pause_s, min(2 * pause_s, limits.NODE_RETRY_MOST_S)
            except EpRuntimeError as error:
                self._stand(Standing.REFUSED, str(error))
                wait_s, pause_s = limits.NODE_REFUSED_RETRY_S, limits.NODE_RETRY_FIRST_S
            # Nodes that lost the same coordinator must not come back in one moment.
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))

    async def _join(self) -> None:
        request = pb.JoinClusterRequest(
            identity=messages.identity_to_proto(self._identity), epoch=self._facts.epoch
        )
        answer: pb.JoinClusterResponse = await self._ask("JoinCluster", request)
        self._facts.heard(answer.epoch, answer.cluster_id)
        self.lease_id = answer.lease_id
        self._version = answer.nodes_version
        self._heard(answer.nodes)
        self._stand(Standing.JOINED, "")

    async def _report(self) -> None:
        """Renews the lease; returns if the coordinator restarted and no longer knows it."""
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

    async def _ask(self, method: str, request: Any) -> Any:
        return await self._peers.ask(
            self._name, self._address, method, request, within_s=limits.NODE_RPC_S
        )

    def _heard(self, nodes: Iterable[pb.NodeInfo]) -> None:
        now = self._clock.monotonic_s()
        self._heard_s = now
        self._nodes = [messages.node_from_proto(message, now) for message in nodes]

    def _stand(self, link: Standing, error: str) -> None:
        """Adds one event when the standing changes."""
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
        """Leaves the cluster, within a short time limit."""
        if self.link is Standing.JOINED:
            request = pb.LeaveClusterRequest(node=self._identity.node, lease_id=self.lease_id)
            try:
                await self._peers.ask(
                    self._name,
                    self._address,
                    "LeaveCluster",
                    request,
                    within_s=limits.NODE_LEAVE_S,
                )
            except EpRuntimeError as error:  # the lease ends by itself
                logging.getLogger(__name__).info("no goodbye: %s", error)
