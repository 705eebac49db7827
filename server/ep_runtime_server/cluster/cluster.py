"""This daemon in a cluster: its node service, its role, and its list of other nodes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc

import ep_runtime
from ep_runtime import services, wire
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    RuntimeUnavailableError,
    StaleHandleError,
)
from ep_runtime.files import boot_id
from ep_runtime.v1 import admin_service_pb2, node_service_pb2
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.base.supervision import Supervisor
from ep_runtime_server.cluster.assembly import Assemblies
from ep_runtime_server.cluster.coordination import (
    Coordination,
    OwnCoordination,
    RemoteCoordination,
    ViewIds,
)
from ep_runtime_server.cluster.node_servicer import NodeServicer
from ep_runtime_server.cluster.relay import Relay
from ep_runtime_server.cluster.spanning import Spanning
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.journal.file import Journal
from ep_runtime_server.nodes import registry
from ep_runtime_server.nodes.certificates import Certificates
from ep_runtime_server.nodes.config import ClusterConfig, Endpoint, local_address_towards
from ep_runtime_server.nodes.facts import ClusterFacts, NodeIdentity
from ep_runtime_server.nodes.membership import Membership, Standing
from ep_runtime_server.nodes.peers import Peers
from ep_runtime_server.nodes.registry import Node, Nodes, NodeState
from ep_runtime_server.nodes.seal import Seal


class Cluster:
    """A daemon's part in its cluster. For the event loop's thread only."""

    def __init__(
        self,
        settings: ClusterConfig,
        journal: Path,
        incarnation: str,
        clock: Clock,
        events: EventLog,
        failpoints: Failpoints,
    ) -> None:
        """Opens the cluster's journal. Raises PoolExhaustedError if it cannot be written."""
        self.settings = settings
        self._incarnation = incarnation
        self._clock = clock
        self._events = events
        self.facts = ClusterFacts(Journal(journal, failpoints, name="cluster", synced=True))
        if self.facts.unreadable:
            events.add(
                "cluster.unreadable",
                f"what {journal} says of {self.facts.unreadable[:8]} is none of a daemon's; left "
                "out",
                level=logging.WARNING,
            )
        self.seal = Seal(settings.secret) if settings.secret else None
        tls = settings.tls
        self.certificates = Certificates(tls, clock, events) if tls is not None else None
        self._renewing: asyncio.Future[None] | None = None
        self.peers = Peers(self.certificates, clock, self.seal, self.facts.durable)
        self.assemblies = Assemblies(self.facts, clock, events)
        self.view_ids = ViewIds(self.assemblies, events)
        self.relay = Relay(settings.node, self._tell_node, events)
        self.coordination: Coordination | None = None
        self.spanning: Spanning | None = None
        self._num_answered = 0
        self.nodes: Nodes | None = None
        self.membership: Membership | None = None
        self._started_s = clock.monotonic_s()
        self.address = ""  # HOST:PORT at which other nodes reach us, after `listen`

    def listen(self, server: grpc.aio.Server) -> None:
        """Binds the address of the configuration.

        Raises:
            InvalidArgumentError: the address cannot be bound, or the certificate is invalid.
        """
        wanted, certificates = self.settings.listen, self.certificates
        try:
            if certificates is None:
                port = server.add_insecure_port(str(wanted))
            else:
                port = server.add_secure_port(str(wanted), _credentials(certificates))
        except (RuntimeError, ValueError) as error:
            port = 0
            reason = str(error).split(";")[0]
        else:
            reason = "the address is another program's, or none of this host's"
        if not port:
            raise InvalidArgumentError(f"cannot listen on {wanted}: {reason}", argument="--listen")
        host = wanted.host
        if wanted.is_any and self.settings.coordinator is not None:
            host = local_address_towards(self.settings.coordinator)
        elif wanted.is_any:
            host = socket.gethostname()
        self.address = str(Endpoint(host, port))

    def start(
        self, server: grpc.aio.Server, groups: Groups, restored: Iterable[GroupRecord] = ()
    ) -> None:
        """Starts to coordinate the cluster, or prepares to join it.

        Args:
            server: the server that listens for other nodes.
            restored: groups of the journal, including groups that have ended since.

        Raises:
            PoolExhaustedError: the journal cannot be written.
        """
        settings, facts = self.settings, self.facts
        self.coordination = self._take_part()
        self.spanning = Spanning(
            settings.node, self.coordination, groups, self._tell_node, facts, self._events
        )
        servicer = NodeServicer(
            self.nodes,
            self.assemblies,
            self.view_ids,
            self.relay,
            self.spanning,
            facts,
            self._clock,
            lambda: self._known()[0].identity,
        )
        services.add_to_server(server, node_service_pb2.DESCRIPTOR, servicer)
        self._listen_to(groups, self.spanning)
        self.spanning.ends.tell_owed()
        for group in restored:
            self.spanning.ends.restored(group)
        self._events.add(
            "cluster.serving",
            f"node {settings.node!r} {'coordinates' if self.nodes else 'serves'} at {self.address}"
            + (" over PLAIN TCP" if settings.tls is None else ""),
            node=settings.node,
            address=self.address,
            insecure=settings.tls is None,
            epoch=facts.epoch,
        )

    def _take_part(self) -> Coordination:
        """Sets up this daemon as the coordinator, or as a node that joins a coordinator."""
        settings, facts, identity = self.settings, self.facts, self._identity()
        if settings.coordinator is None:
            facts.found()
            facts.heard(settings.epoch_at_least)
            facts.next_epoch()  # skip an epoch, so that none is used twice
            self.nodes = Nodes(
                identity,
                settings.expected,
                facts,
                self._clock,
                self._events,
                self.assemblies.node_gone,
            )
            return OwnCoordination(
                settings.node, self.assemblies, self.view_ids, self.relay, facts.durable
            )
        self.membership = Membership(
            identity,
            settings.coordinator,
            settings.coordinator_name,
            self.peers,
            facts,
            self._clock,
            self._events,
        )
        return RemoteCoordination(settings.node, self.membership, self._ask_coordinator)

    @staticmethod
    def _listen_to(groups: Groups, spanning: Spanning) -> None:
        """Calls `spanning` after the journal's listener, so that the journal has changes first."""
        before = groups.on_change

        def both(group: GroupRecord) -> None:
            before(group)
            spanning.changed(group)

        groups.on_change = both
        for group in groups.all():
            group.on_change = both

    async def _ask_coordinator(self, method: str, request: Any, within_s: float) -> Any:
        try:
            return await self.peers.ask(
                self.settings.coordinator_name,
                self.coordinator_address,
                method,
                request,
                within_s=within_s,
            )
        except StaleHandleError:
            assert self.membership is not None
            self.membership.doubt()
            raise

    async def _tell_node(self, node: str, request: node_service_pb2.TellGroupRequest) -> bool:
        known = (found.identity for found in self._known() if found.identity.node == node)
        address = next((identity.address for identity in known), None)
        if not address:
            if self.membership is not None:
                self.membership.doubt()  # the node may have joined after our last report
            raise RuntimeUnavailableError(f"node {node!r} is not in the cluster now", node=node)
        answer: node_service_pb2.TellGroupResponse = await self.peers.ask(
            node, address, "TellGroup", request, within_s=limits.NODE_RPC_S
        )
        return answer.told

    def begin(self, supervisor: Supervisor) -> None:
        """Starts to join the coordinator; call this once our server answers."""
        if self.membership is not None:
            supervisor.keep("membership", self.membership.run)

    def _identity(self) -> NodeIdentity:
        return NodeIdentity(
            node=self.settings.node,
            node_id=self.facts.node_id,
            incarnation=self._incarnation,
            boot_id=boot_id(),
            host_name=socket.gethostname(),
            uid=os.geteuid(),
            pid=os.getpid(),
            address=self.address,
            server_version=ep_runtime.__version__,
            api_versions=(wire.API_VERSION,),
        )

    @property
    def coordinator_address(self) -> str:
        return str(self.settings.coordinator or self.address)

    def view(self) -> list[Node]:
        """Lists all nodes, the coordinator first; nodes that we cannot reach are UNREACHABLE."""
        return [self._seen(node) for node in self._known()]

    def _known(self) -> list[Node]:
        if self.nodes is not None:
            return self.nodes.all()
        assert self.membership is not None
        return self.membership.nodes()

    def _seen(self, node: Node) -> Node:
        silent_since_s = self.peers.silent_since_s(node.identity.address, node.heard_s)
        if silent_since_s is None or node.state is not NodeState.JOINED:
            return node
        return dataclasses.replace(node, state=NodeState.UNREACHABLE, since_s=silent_since_s)

    async def answering(self, method: str) -> None:
        """Waits until our facts are on disk, before we answer another daemon's RPC.

        Raises PoolExhaustedError if they cannot be written.
        """
        await self.facts.durable()
        self._num_answered += 1

    @property
    def link(self) -> Standing:
        """Returns the state of the link to the coordinator."""
        return Standing.COORDINATOR if self.membership is None else self.membership.link

    def status(self) -> admin_service_pb2.ClusterStatus:
        now = self._clock.monotonic_s()
        member = self.membership
        since_s = self._started_s if member is None else member.since_s
        return admin_service_pb2.ClusterStatus(
            node=self.settings.node,
            coordinator=self.coordinator_address,
            link=f"CLUSTER_LINK_{self.link.value}",
            since=wire.duration(max(0.0, now - since_s)),
            error="" if member is None else member.error,
            cluster_id=self.facts.cluster_id,
            epoch=self.facts.epoch,
            insecure=self.settings.tls is None,
            num_answered=self._num_answered,
            nodes=[registry.node_to_proto(node, now) for node in self.view()],
            certificates=[
                admin_service_pb2.CertificateStatus(path=path, left=wire.duration(left_s))
                for path, left_s in (self.certificates.left() if self.certificates else ())
            ],
            certificates_error=self.certificates.error if self.certificates else "",
        )

    async def ask_node(self, name: str, method: str, request: Any, left_s: float) -> bytes:
        """Returns another node's answer to a read-only RPC of AdminService, as bytes.

        Does not parse the answer, because the client has to check it anyway.

        Raises:
            InvalidArgumentError: the cluster has no such node.
            RuntimeUnavailableError: the node does not answer; the error says since when.
            EpRuntimeError: the node raised it, or its answer is too long; the error names the node.
        """
        view = self.view()
        node = next((node for node in view if node.identity.node == name), None)
        if node is None:
            raise InvalidArgumentError(
                f"no node {name!r} in the cluster, which has "
                + ", ".join(node.identity.node for node in view),
                argument="node",
            )
        address = node.identity.address
        if node.state is NodeState.ABSENT:
            raise RuntimeUnavailableError(
                f"node {name!r} at {address} has not joined", node=name, address=address
            )
        await self.peers.drop({node.identity.address for node in view} | {self.coordinator_address})
        own = type(request)()
        own.CopyFrom(request)
        own.ClearField("node")
        within_s = max(0.05, min(limits.NODE_READ_S, 0.8 * left_s))
        try:
            answer = await self.peers.ask_on(name, address, method, own, within_s=within_s)
        except EpRuntimeError as error:
            if isinstance(error, RuntimeUnavailableError) and error.fields.get("node") == name:
                raise  # the error already names the node
            raise type(error)(f"node {name!r} at {address}: {error}", node=name) from error
        if len(answer) > limits.NODE_READ_BYTES:
            raise EpRuntimeError(
                f"node {name!r} at {address} answers {method} with {len(answer)} bytes, and a page "
                f"is at most {limits.NODE_READ_BYTES}",
                node=name,
            )
        return answer

    def tick(self) -> None:
        """Does periodic work: renews certificates, and checks leases and claims."""
        if self.certificates is not None and self.certificates.look():
            self._renewing = asyncio.ensure_future(self.peers.renew())
        if self.nodes is not None:
            self.nodes.tick()
            self.assemblies.tick()

    async def stop(self) -> None:
        """Leaves the cluster when the daemon ends; does not close groups that have ranks here."""
        if self.spanning is not None:
            await self.spanning.tasks.stop()
        await self.relay.tasks.stop()
        await self.view_ids.watches.stop()
        if self.membership is not None:
            await self.membership.leave()
        await self.peers.close()
        await self.facts.end()


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Makes server credentials from which gRPC reads current certificates per connection.

    gRPC calls `changed` on its own threads.
    """
    given = certificates.tls

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(given.key, given.certificate)], root_certificates=given.authority
        )

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # Return certificates only if they have changed: gRPC replaces the ones that concurrent
        # handshakes use, and may free them twice.
        nonlocal given
        latest = certificates.tls
        if latest == given:
            return None
        given = latest
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        changed,  # type: ignore[arg-type]  # the stubs do not allow None
        require_client_authentication=True,
    )
