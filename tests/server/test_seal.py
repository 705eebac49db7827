"""Plain TCP: who does not have the cluster's secret changes and reads nothing."""

from __future__ import annotations

import os

import grpc
import pytest
from cluster_places import place
from harness import eventually
from raw_client import WAIT_S, make_spec

from ep_runtime import errors, wire
from ep_runtime.v1 import admin_service_pb2, node_service_pb2
from ep_runtime_server.cluster import messages as cluster_messages
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.config import ClusterConfig, parse_endpoint
from ep_runtime_server.nodes.seal import Seal

SECRET, OTHER = b"a secret of this cluster", b"a secret of another one"
NODE, ADMIN = "/ep_runtime.v1.NodeService/", "/ep_runtime.v1.AdminService/"


def coordinates(address, secret=SECRET):
    return ClusterConfig("a", parse_endpoint(address, "listen"), secret=secret)


def joins(address, secret=SECRET):
    listen, target = (parse_endpoint(text, "address") for text in (place(), address))
    return ClusterConfig("b", listen, target, secret=secret)


def send(address, path, data, metadata=()):
    with grpc.insecure_channel(address, options=wire.channel_options()) as channel:
        try:
            return channel.unary_unary(path)(data, timeout=WAIT_S, metadata=metadata)
        except grpc.RpcError as error:
            raise wire.error_from_rpc(error) from None


def link(daemon):
    return admin_service_pb2.ClusterLink.Name(daemon.status().cluster.link).rpartition("LINK_")[2]


def test_daemons_of_one_secret_join_and_ask_each_other(start_daemon):
    address = place()
    a, b = start_daemon(cluster=coordinates(address)), start_daemon(cluster=joins(address))
    eventually(lambda: link(b) == "JOINED")
    assert a.ask("GetStatus", node="b").directory == str(b.directory)


def test_a_daemon_of_another_secret_is_refused_and_told(start_daemon):
    address = place()
    start_daemon(cluster=coordinates(address))
    b = start_daemon(cluster=joins(address, OTHER))
    eventually(lambda: link(b) == "REFUSED")
    assert "--secret FILE" in str(b.ask("ListEvents"))


TELL = node_service_pb2.TellGroupRequest(node="b", epoch=1, lost_ranks=[0]).SerializeToString()


@pytest.mark.parametrize("secret", [None, OTHER])
@pytest.mark.parametrize(
    ("path", "data"),
    [(f"{NODE}TellGroup", TELL), (f"{NODE}JoinCluster", b""), (f"{ADMIN}ListSessions", b"")],
)
def test_who_has_none_breaks_no_group_and_reads_nothing(start_daemon, secret, path, data):
    address = place()
    daemon = start_daemon(cluster=coordinates(address))
    daemon.client().ready(make_spec())
    metadata = Seal(secret).of(path, data) if secret is not None else ()
    with pytest.raises(errors.PermissionDeniedError, match="does not have this cluster's secret"):
        send(address, path, data, metadata)
    assert daemon.group_states() == {"moe": "READY"}


def test_a_seal_is_worth_one_request(start_daemon):
    address, path = place(), f"{ADMIN}ListSessions"
    start_daemon(cluster=coordinates(address))
    seal = Seal(SECRET)
    request = admin_service_pb2.ListSessionsRequest(page_size=1).SerializeToString()
    metadata = seal.of(path, request)
    send(address, path, request, metadata)
    for changed_path, data, sealed in (
        (path, request, metadata),  # once more
        (path, b"", seal.of(path, request)),
        (f"{ADMIN}ListGroups", request, seal.of(path, request)),
        (path, request, ((metadata[0][0], "\xe9.x.y".encode().decode("latin-1")),)),
        (path, request, ((metadata[0][0], "a.b"),)),
    ):
        with pytest.raises((errors.PermissionDeniedError, errors.EpRuntimeError)):
            send(address, changed_path, data, sealed)


def test_a_daemon_that_starts_again_answers_a_request_of_before_once(
    daemon_process, restarted, tmp_path
):
    """What was said is remembered in memory alone; epochs make it say nothing that is not so."""
    secret, address = tmp_path / "secret", place()
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    flags = ("--coordinator", address, "--node", "a", "--insecure", "--secret", str(secret))
    first = daemon_process(*flags)
    path = f"{NODE}TellGroup"
    key = cluster_messages.key_to_proto(Owner(os.geteuid(), "job", "moe"))
    tell = node_service_pb2.TellGroupRequest(node="b", key=key, epoch=1, lost_ranks=[0])
    data = tell.SerializeToString()
    metadata = Seal(SECRET).of(path, data)
    send(address, path, data, metadata)
    second = restarted(first, *flags)
    second.client().ready(make_spec())
    send(address, path, data, metadata)
    assert second.group_states() == {"moe": "READY"}
    with pytest.raises(errors.PermissionDeniedError):
        send(address, path, data, metadata)
