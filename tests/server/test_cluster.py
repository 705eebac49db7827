"""Daemons of several nodes on one host: joining, reading each other, losing the coordinator."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from cluster_places import loopback, make_certificates, place, plain_tcp, tls_flags
from harness import FakeClock, eventually
from raw_client import WAIT_S, make_spec

import ep_runtime
from ep_runtime import errors, wire
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime.v1 import node_service_pb2, session_service_pb2
from ep_runtime_server import daemon as daemon_module
from ep_runtime_server.base import limits
from ep_runtime_server.nodes.certificates import read_tls
from ep_runtime_server.nodes.config import ClusterConfig, parse_endpoint
from ep_runtime_server.rpc.admin_servicer import ReadingServicer

# A node that lost its coordinator tries again every second at the latest.
BACK_S = 5.0


def coordinates(address: str, node: str = "a", **more) -> ClusterConfig:
    return ClusterConfig(node, parse_endpoint(address, "listen"), **more)


def joins(address: str, node: str = "b", **more) -> ClusterConfig:
    target = parse_endpoint(address, "join")
    return ClusterConfig(node, parse_endpoint(place(), "listen"), target, **more)


def cluster_of(daemon, **request) -> pb.ClusterStatus:
    return daemon.ask("GetStatus", **request).cluster


def link(daemon) -> str:
    return pb.ClusterLink.Name(cluster_of(daemon).link).removeprefix("CLUSTER_LINK_")


def states(daemon) -> dict[str, str]:
    return {
        node.identity.node: node_service_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_")
        for node in cluster_of(daemon).nodes
    }


def joined(daemon, within_s: float = BACK_S) -> None:
    eventually(lambda: link(daemon) == "JOINED", within_s=within_s, what=cluster_of(daemon).error)


def identity(node: str, **more) -> node_service_pb2.NodeIdentity:
    fields = {
        "node_id": "1",
        "incarnation": "1",
        "boot_id": "1",
        "host_name": "h",
        "address": "h:1",
        "server_version": "0.2.0",
        "api_versions": ["v1"],
        **more,
    }
    return node_service_pb2.NodeIdentity(node=node, **fields)


@pytest.fixture
def join(call_node):
    """join(address, identity): asks the coordinator at the address, as a daemon would."""

    def asked(address: str, who: node_service_pb2.NodeIdentity, epoch: int = 0, **how):
        request = node_service_pb2.JoinClusterRequest(identity=who, epoch=epoch)
        return call_node(address, node_service_pb2, "JoinCluster", request, **how)

    return asked


def features(daemon) -> list[str]:
    client = daemon.client()
    request = session_service_pb2.GetServerInfoRequest()
    return list(client.call(client.sessions.GetServerInfo, request).features)


def test_a_daemon_alone_has_no_cluster(daemon):
    assert not daemon.status().HasField("cluster")
    assert wire.CLUSTER not in features(daemon)
    with pytest.raises(errors.InvalidArgumentError, match="belongs to no cluster"):
        daemon.ask("ListGroups", node="b")


def test_a_node_that_joins_is_seen_from_both(nodes):
    a, b = nodes
    assert link(a) == "COORDINATOR"
    assert states(a) == states(b) == {"a": "JOINED", "b": "JOINED"}
    ours, theirs = cluster_of(a), cluster_of(b)
    assert (ours.cluster_id, ours.epoch) == (theirs.cluster_id, theirs.epoch)
    assert (ours.node, theirs.node) == ("a", "b")
    assert theirs.coordinator == theirs.nodes[0].identity.address
    assert [node.coordinator for node in theirs.nodes] == [True, False]
    assert wire.CLUSTER in features(a)
    assert wire.CLUSTER in features(b)


def test_every_reading_call_goes_to_the_node_that_it_names(nodes):
    a, b = nodes
    client = b.client()
    client.ready(make_spec())
    for here, there in ((a, "b"), (b, "b")):
        assert here.ask("GetStatus", node=there).directory == str(b.directory)
        (group,) = here.ask("ListGroups", node=there).groups
        assert group.group.spec.name == "moe"
        sessions = here.ask("ListSessions", node=there).sessions
        assert client.session_id in [session.session_id for session in sessions]
        assert here.ask("ListBuffers", node=there).buffers
        assert here.ask("ListRanks", node=there).ranks
        for method in ("ListLayers", "ListHandles", "ListEvents"):
            here.ask(method, node=there)
    assert not a.ask("ListGroups").groups
    assert not b.ask("ListGroups", node="a").groups
    with pytest.raises(errors.InvalidArgumentError, match="no node 'x' in the cluster"):
        a.ask("ListGroups", node="x")


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (RuntimeError("a bug"), r"node 'b' at \S+: .*ListGroups failed inside the daemon: Run"),
        (errors.PoolExhaustedError("full"), r"node 'b' at \S+: full"),
        (b"\n" * (limits.NODE_READ_BYTES + 1), r"node 'b' at \S+ answers ListGroups with 4194305"),
        (b"\0" * (wire.MAX_MESSAGE_BYTES + 1), r"node 'b' at \S+: .*message larger than max"),
        (b"\xff no message", "Exception deserializing response"),
        (None, "node 'b' at .* does not answer: no answer in time"),
    ],
    ids=["a bug", "an error", "a long answer", "one over gRPC's limit", "no message", "nothing"],
)
def test_a_node_that_answers_anything_is_named_and_waited_for_within_bounds(
    request, monkeypatch, answer, match
):
    async def anything(self, request, context):
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(limits, "NODE_READ_S", 0.3)
    monkeypatch.setattr(ReadingServicer, "ListGroups", anything)
    sends = ("grpc.max_send_message_length", -1)  # a daemon that keeps no limit
    monkeypatch.setattr(
        daemon_module, "SERVER_OPTIONS", [*daemon_module.SERVER_OPTIONS[:-4], sends]
    )
    a, b = request.getfixturevalue("nodes")
    with pytest.raises(errors.EpRuntimeError, match=match):
        a.ask("ListGroups", node="b")
    assert a.ask("GetStatus", node="b").directory == str(b.directory)


def test_other_nodes_order_nothing_and_ask_nothing_on(start_daemon, call_node):
    address = place()
    a = start_daemon(cluster=coordinates(address))
    client = a.client()
    client.ready(make_spec())
    orders = [
        ("Drain", pb.DrainRequest()),
        ("Fence", pb.FenceRequest(session_id=client.session_id)),
        ("Reclaim", pb.ReclaimRequest(name="moe")),
    ]
    for method, request in orders:
        with pytest.raises(
            errors.PermissionDeniedError, match=f"{method} is an order, .*admin.sock"
        ):
            call_node(address, pb, method, request)
    assert a.group_states() == {"moe": "READY"}
    with pytest.raises(errors.InvalidArgumentError, match="this is node 'a', asked of node 'b'"):
        call_node(address, pb, "ListGroups", pb.ListGroupsRequest(node="b"))


def test_a_second_daemon_of_a_name_is_refused_and_says_who_has_it(nodes, start_daemon):
    a, b = nodes
    address = cluster_of(b).coordinator
    other = start_daemon(cluster=joins(address))
    eventually(lambda: link(other) == "REFUSED")
    status = cluster_of(other)
    first = cluster_of(b).nodes[1].identity
    assert f"'b' is taken by the daemon {first.pid}" in status.error
    assert first.address in status.error
    assert states(a) == {"a": "JOINED", "b": "JOINED"}
    assert link(b) == "JOINED"
    assert other.event_kinds().count("cluster.refused") == 1
    other.client().ready(make_spec())  # it still serves its own node


def test_a_node_that_ends_well_leaves_at_once(nodes):
    a, b = nodes
    b.close()
    eventually(lambda: states(a) == {"a": "JOINED"})
    b.close = lambda: None


def test_a_report_is_answered_with_the_nodes_only_where_one_changed(start_daemon, call_node, join):
    address = place()
    start_daemon(cluster=coordinates(address))

    def report(version):
        request = node_service_pb2.ReportNodeRequest(
            node="x", lease_id=joined_as.lease_id, nodes_version=version
        )
        return call_node(address, node_service_pb2, "ReportNode", request)

    def names(answer):
        return [node.identity.node for node in answer.nodes]

    joined_as = join(address, identity("x", address=place()))
    assert names(joined_as) == names(report(0)) == ["a", "x"]
    same = report(joined_as.nodes_version)
    assert (names(same), same.nodes_version) == ([], joined_as.nodes_version)
    join(address, identity("y", address=place()))
    assert names(report(same.nodes_version)) == ["a", "x", "y"]


def test_a_silent_node_is_shown_with_the_time_since_it_was_heard(start_daemon, call_node, join):
    address = place()
    a = start_daemon(clock=FakeClock(), cluster=coordinates(address))
    lease = join(address, identity("x", address=place())).lease_id
    a.clock.advance(limits.NODE_LEASE_S + 4)
    eventually(lambda: states(a) == {"a": "JOINED", "x": "UNREACHABLE"})
    assert cluster_of(a).nodes[1].since.ToSeconds() == limits.NODE_LEASE_S + 4
    with pytest.raises(errors.RuntimeUnavailableError, match="node 'x' at .* does not answer"):
        a.ask("ListGroups", node="x")
    report = node_service_pb2.ReportNodeRequest(node="x", lease_id=lease)
    call_node(address, node_service_pb2, "ReportNode", report)
    a.clock.advance(3)
    with pytest.raises(errors.RuntimeUnavailableError) as caught:
        a.ask("ListGroups", node="x")
    assert caught.value.fields["since_s"] == 3.0
    # The coordinator receives its calls but cannot reach it.
    assert states(a) == {"a": "JOINED", "x": "UNREACHABLE"}


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"server_version": "0.9.0"}, errors.VersionSkewError, "server_version=0.9.0"),
        ({"api_versions": ["v9"]}, errors.VersionSkewError, "api_versions="),
        ({"node": "A B"}, errors.InvalidArgumentError, "node must be"),
        ({"address": "nowhere"}, errors.InvalidArgumentError, "address must be"),
        ({"host_name": ""}, errors.InvalidArgumentError, "host_name must be"),
        ({"boot_id": "x" * 300}, errors.InvalidArgumentError, "boot_id must be"),
        ({"api_versions": ["v1"] * 99}, errors.InvalidArgumentError, "at most 16"),
    ],
)
def test_what_no_daemon_of_ours_says_is_refused(start_daemon, join, fields, error, match):
    address = place()
    a = start_daemon(cluster=coordinates(address))
    with pytest.raises(error, match=match):
        join(address, identity(**{"node": "x", **fields}))
    refused = {"x": "REFUSED"} if error is errors.VersionSkewError else {}
    assert states(a) == {"a": "JOINED", **refused}


def test_a_node_of_another_version_is_refused_on_every_screen_and_still_read(
    start_daemon, monkeypatch
):
    address = place()
    a = start_daemon(cluster=coordinates(address))
    c = start_daemon(cluster=joins(address, "c"))
    joined(c)
    monkeypatch.setattr(ep_runtime, "__version__", "9.0.0")
    b = start_daemon(cluster=joins(address))
    eventually(lambda: link(b) == "REFUSED", within_s=BACK_S)
    assert "server_version=9.0.0" in cluster_of(b).error
    assert states(b)["b"] == "REFUSED"
    eventually(lambda: "b" in states(c), within_s=limits.NODE_REPORT_INTERVAL_S + 1)
    for daemon in (a, c):
        assert states(daemon) == {"a": "JOINED", "b": "REFUSED", "c": "JOINED"}
        (why,) = [node.why for node in cluster_of(daemon).nodes if node.identity.node == "b"]
        assert why == cluster_of(b).error
        assert daemon.ask("GetStatus", node="b").cluster.node == "b"
        numbers = daemon.metrics("cluster_nodes")
        assert numbers == {"JOINED": 2, "UNREACHABLE": 0, "ABSENT": 0, "REFUSED": 1}
    assert [name for name, now in b.metrics("cluster_link").items() if now] == ["REFUSED"]


def test_a_node_hears_nothing_that_is_not_on_the_disk(start_daemon, join, monkeypatch):
    address, taken, asked = place(), threading.Event(), threading.Event()
    a = start_daemon(cluster=coordinates(address))

    def sync(fd: int) -> None:
        asked.set()
        assert taken.wait(WAIT_S)

    monkeypatch.setattr(os, "fdatasync", sync)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, address, identity("x", address=place()))
        assert asked.wait(WAIT_S)
        assert a.status().cluster.nodes  # others are answered
        assert not joining.done()
        taken.set()
        assert joining.result(WAIT_S).lease_id


def test_an_epoch_of_a_node_that_lies_spoils_nothing(start_daemon, join):
    address = place()
    a = start_daemon(cluster=coordinates(address))
    before = cluster_of(a).epoch
    for epoch in (2**64 - 1, before + (1 << 30)):
        with pytest.raises(errors.InvalidArgumentError, match="at most .* ahead of"):
            join(address, identity("x", address=place()), epoch)
    assert cluster_of(a).epoch == before
    assert states(a) == {"a": "JOINED", "x": "REFUSED"}
    joined(start_daemon(cluster=joins(address)))


def test_a_coordinator_that_lost_its_file_counts_on_from_what_the_operator_says(start_daemon):
    address = place()
    settings = dataclasses.replace(coordinates(address), epoch_at_least=1 << 40)
    a = start_daemon(cluster=settings)
    assert cluster_of(a).epoch == (1 << 40) + 1
    joined(start_daemon(cluster=joins(address)))


@pytest.mark.slow
def test_a_node_whose_lease_is_not_known_joins_again(nodes, join):
    a, b = nodes
    address = cluster_of(b).coordinator
    own = cluster_of(b).nodes[1].identity  # a node named b replaces b: plain TCP permits it
    join(address, own)
    eventually(
        lambda: a.event_kinds().count("cluster.node_joined") == 3,
        within_s=limits.NODE_REPORT_INTERVAL_S + 1,
    )
    assert link(b) == "JOINED"
    assert "cluster.coordinator_lost" not in b.event_kinds()


def test_a_node_that_does_not_coordinate_says_who_does(nodes, join):
    b, address = nodes[1], cluster_of(nodes[1]).coordinator
    with pytest.raises(errors.StaleHandleError, match=f"the coordinator is at {address}"):
        join(cluster_of(b).nodes[1].identity.address, identity("x"))


@pytest.mark.slow
def test_one_address_has_one_daemon(daemon_process):
    address = place()
    first = daemon_process("--coordinator", address, *plain_tcp(), "--node", "a")
    assert first.ready["cluster"] == address
    second = daemon_process("--coordinator", address, *plain_tcp(), "--node", "b")
    code, text = second.ended(within_s=5.0)
    assert code == 2
    assert f"cannot listen on {address}" in text
    assert "Traceback" not in text


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Certificates of a and b under one authority, and of a and b under another."""
    base = tmp_path_factory.mktemp("pki")
    hosts = {"a": loopback(), "b": ""}
    make_certificates(base / "ours", **hosts)
    make_certificates(base / "theirs", **hosts)
    return base, f"{hosts['a']}:7700"


def credentials(directory, name: str) -> grpc.ChannelCredentials:
    certificate, key, authority = (
        (directory / file).read_bytes() for file in (f"{name}.pem", f"{name}.key", "ca.pem")
    )
    return grpc.ssl_channel_credentials(authority, key, certificate)


def test_with_certificates_nobody_else_joins_or_reads(daemon_process, pki, call_node, join):
    base, address = pki
    ours = base / "ours"
    a = daemon_process("--coordinator", address, "--node", "a", *tls_flags(ours, "a"))
    b = daemon_process("--join", address, "--node", "b", *tls_flags(ours, "b"))
    joined(b)
    assert a.ask("GetStatus", node="b").pid == b.pid
    assert b.ask("GetStatus", node="a").pid == a.pid
    assert not cluster_of(a).insecure

    trusting_us = grpc.ssl_channel_credentials((ours / "ca.pem").read_bytes())
    for stranger in (None, trusting_us, credentials(base / "theirs", "b")):
        with pytest.raises(errors.RuntimeUnavailableError):
            call_node(
                address, pb, "GetStatus", pb.GetStatusRequest(), credentials=stranger, name="a"
            )
    with pytest.raises(errors.PermissionDeniedError, match=r"got 'c' with a certificate for .*'b'"):
        join(address, identity("c"), credentials=credentials(ours, "b"), name="a")
    assert states(a) == {"a": "JOINED", "b": "JOINED"}


@pytest.mark.slow
def test_a_node_does_not_trust_a_coordinator_of_another_authority(daemon_process, pki):
    base, address = pki
    daemon_process("--coordinator", address, "--node", "a", *tls_flags(base / "theirs", "a"))
    b = daemon_process("--join", address, "--node", "b", *tls_flags(base / "ours", "b"))
    eventually(lambda: cluster_of(b).error)
    assert link(b) == "JOINING"
    assert [node.state for node in cluster_of(b).nodes if node.coordinator] == [
        node_service_pb2.NODE_STATE_UNREACHABLE
    ]


def test_a_certificate_that_ended_is_named_and_a_new_one_is_read_without_a_restart(
    start_daemon, tmp_path
):
    pki, host = tmp_path / "pki", loopback()
    address = f"{host}:7700"
    make_certificates(pki, a=host, c="")
    make_certificates(pki, ago=9, b="")
    tls = {name: read_tls(*tls_flags(pki, name)[1::2]) for name in "abc"}
    a = start_daemon(cluster=coordinates(address, tls=tls["a"]))
    b = start_daemon(cluster=joins(address, tls=tls["b"]))
    own = f"our own certificate {pki}/b.pem has ended"
    eventually(lambda: own in cluster_of(b).error, within_s=BACK_S)
    assert b.metrics("certificate_seconds")[f"{pki}/b.pem"] < -6 * 86400
    make_certificates(pki, b="")
    joined(b)
    assert b.event_kinds().count("cluster.certificate_read") == 1
    make_certificates(pki, ago=9, a=host)
    eventually(lambda: cluster_of(a).certificates[0].left.seconds < 0, within_s=BACK_S)
    assert link(b) == "JOINED"  # an open connection continues
    c = start_daemon(cluster=joins(address, "c", tls=tls["c"]))
    eventually(lambda: "its certificate has ended" in cluster_of(c).error, within_s=BACK_S)
    make_certificates(pki, a=host)
    joined(c)


def test_the_coordinators_death_stops_nothing_and_its_return_is_noticed(daemon_process, restarted):
    address = place()
    flags = ("--coordinator", address, *plain_tcp(), "--node", "a")
    a = daemon_process(*flags)
    b = daemon_process("--join", address, *plain_tcp(), "--node", "b")
    joined(b)
    before = cluster_of(a)
    client = b.client()
    client.ready(make_spec())
    a.kill()
    eventually(lambda: link(b) == "LOST", within_s=limits.NODE_REPORT_INTERVAL_S + 1)
    assert b.group_states() == {"moe": "READY"}
    assert b.healthy()
    assert states(b) == {"a": "UNREACHABLE", "b": "JOINED"}
    with pytest.raises(errors.RuntimeUnavailableError, match="node 'a' at"):
        b.ask("ListGroups", node="a")
    client.create(make_spec(name="another"))  # groups of this node alone continue
    a = restarted(a, *flags)
    assert states(a) == {"a": "JOINED", "b": "JOINED"}  # it knows which nodes to wait for
    joined(b)
    after = cluster_of(a)
    assert after.cluster_id == before.cluster_id
    assert after.epoch > before.epoch
    eventually(lambda: cluster_of(b).epoch == after.epoch)
    kinds = b.event_kinds()
    assert [kind for kind in kinds if kind.startswith("cluster.")] == [
        "cluster.serving",
        "cluster.joined",
        "cluster.coordinator_lost",
        "cluster.joined",
    ]
    assert a.ask("ListGroups", node="b").groups


@pytest.mark.parametrize("point", ["before_write", "torn_write", "after_write"])
@pytest.mark.slow
def test_no_epoch_comes_twice_wherever_the_coordinator_dies(daemon_process, point):
    address = place()
    flags = ("--coordinator", address, *plain_tcp(), "--node", "a")
    seen = []
    a = daemon_process(*flags)
    for _ in range(5):
        seen.append(cluster_of(a).epoch)
        a.kill()
        dying = daemon_process(
            *flags, "--testing", f"failpoint:cluster.{point}=kill", directory=a.directory
        )
        assert dying.ended(within_s=5.0)[0] == -9
        a = daemon_process(*flags, directory=a.directory)
    assert seen == sorted(set(seen))
