"""NCCL unique ids: one set per generation of a group, on one node and over two, until used."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from harness import eventually
from nccl_builds import fake_library
from raw_client import WAIT_S, Client, make_spec
from spanning import group_of, spec_of

from ep_runtime import services, wire
from ep_runtime.errors import (
    EpRuntimeError,
    PermissionDeniedError,
    PoolExhaustedError,
    RuntimeUnavailableError,
    StaleHandleError,
)
from ep_runtime.v1 import admin_service_pb2, nccl_service_pb2, node_service_pb2
from ep_runtime_server.nccl import unique_ids


@pytest.fixture
def nccl_library(monkeypatch):
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", str(fake_library()))


@pytest.fixture
def client(nccl_library, daemon):
    made = Client(daemon.directory)
    yield made
    made.close()


def ask(client, group):
    stub = services.stub(client.channel, nccl_service_pb2.DESCRIPTOR)
    request = nccl_service_pb2.GetUniqueIdsRequest(
        name=group.spec.name, generation=group.generation
    )
    return client.call(stub.GetUniqueIds, request)


def report(client, group, error=""):
    stub = services.stub(client.channel, nccl_service_pb2.DESCRIPTOR)
    request = nccl_service_pb2.ReportCommunicatorsRequest(
        name=group.spec.name, generation=group.generation, nccl_version="2.28.9", error=error
    )
    return client.call(stub.ReportCommunicators, request)


def row(client):
    found = client.call(client.admin.ListGroups, admin_service_pb2.ListGroupsRequest())
    return found.groups[0]


def is_alive(pid: int, parent: int | None = None) -> bool:
    """Whether the pid makes unique ids, and is a child of `parent` if given."""
    try:
        state, ppid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
    return state != "Z" and "unique_id_child" in command and parent in (None, int(ppid))


def children(parent: int | None = None) -> list[int]:
    """Returns children of ours, or of `parent`, that make unique ids."""
    found = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in found if is_alive(pid, parent or os.getpid())]


def test_every_process_gets_the_same_ids_one_per_ep_domain(client):
    spec = make_spec(ranks=2, mesh_axes=(("dp", 3), ("ep", 2)), transport="xla")
    group = client.ready(spec)
    first, second = ask(client, group), ask(client, group)
    assert first.unique_ids == second.unique_ids
    assert [len(unique_id) for unique_id in first.unique_ids] == [128] * 3
    assert len(set(first.unique_ids)) == 3
    assert first.nccl_version == "2.28.9"
    assert len(children()) == 1


def test_their_process_ends_when_all_ranks_joined(client):
    group = client.ready(make_spec(transport="xla"))
    ask(client, group)
    assert row(client).nccl_state == "forming, 0 of 2 ranks"
    report(client, group)
    assert row(client).nccl_state == "ready, 2 ranks"
    assert row(client).nccl_version == "2.28.9"
    eventually(lambda: not children(), within_s=WAIT_S)


def test_a_failed_process_voids_the_ids_of_its_generation(client):
    group = client.ready(make_spec(transport="xla"))
    ask(client, group)
    report(client, group, "NCCL: init: no socket")
    with pytest.raises(StaleHandleError, match="no socket.*create it again"):
        ask(client, group)
    assert row(client).nccl_state == "none: rank 0: NCCL: init: no socket"
    eventually(lambda: not children(), within_s=WAIT_S)


def test_a_new_generation_gets_new_ids(client):
    spec = make_spec(transport="xla")
    group = client.ready(spec)
    before = ask(client, group).unique_ids
    client.close_group(group)
    again = client.ready(spec)
    assert set(ask(client, again).unique_ids).isdisjoint(before)
    with pytest.raises(StaleHandleError):
        ask(client, group)
    eventually(lambda: len(children()) == 1, within_s=WAIT_S)


def test_processes_of_one_user_are_limited(client, daemon, monkeypatch):
    monkeypatch.setattr(unique_ids, "MAX_PROCESSES_PER_USER", 1)
    first, second = (client.ready(make_spec(name)) for name in ("one", "two"))
    held = daemon.status().users[0].num_fds
    ask(client, first)
    assert daemon.status().users[0].num_fds == held + unique_ids.PROCESS_FDS
    with pytest.raises(PoolExhaustedError, match="has 1 groups that make NCCL"):
        ask(client, second)
    client.close_group(first)
    eventually(lambda: daemon.status().users[0].num_fds < held, within_s=WAIT_S)
    ask(client, second)


def test_their_process_ends_after_a_while(nccl_library, clocked):
    client = Client(clocked.directory)
    group = client.ready(make_spec(transport="xla"))
    ask(client, group)
    assert len(children()) == 1
    clocked.clock.advance(601)
    eventually(lambda: not children(), within_s=WAIT_S)
    client.close()


def test_their_process_ends_with_a_daemon_that_is_killed(nccl_library, daemon_process):
    running = daemon_process()
    client = Client(running.directory)
    ask(client, client.ready(make_spec(transport="xla")))
    (child,) = children(running.popen.pid)
    client.close()
    running.kill()
    eventually(lambda: not is_alive(child), within_s=WAIT_S)


def test_a_stranger_gets_none(client, daemon):
    group = client.create(make_spec(transport="xla")).group
    stranger = Client(daemon.directory)
    with pytest.raises(PermissionDeniedError):
        ask(stranger, group)
    stranger.close()
    nobody = Client(daemon.directory, job=None)
    with pytest.raises(EpRuntimeError, match="OpenSession first"):
        ask(nobody, group)
    nobody.close()


def test_a_daemon_without_nccl_says_so(monkeypatch, daemon):
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    client = Client(daemon.directory)
    group = client.ready(make_spec(transport="xla"))
    with pytest.raises(RuntimeUnavailableError, match="no libnccl: /nowhere"):
        ask(client, group)
    report(client, group, "no libnccl")
    assert row(client).nccl_state.startswith("none: the daemon makes no NCCL unique ids")
    client.close()


def test_ids_are_in_no_listing_and_no_file(client, daemon):
    group = client.ready(make_spec(transport="xla"))
    secret = ask(client, group).unique_ids[0][8:24]
    listed = [
        row(client).SerializeToString(),
        client.call(
            client.admin.ListEvents, admin_service_pb2.ListEventsRequest()
        ).SerializeToString(),
    ]
    files = [path.read_bytes() for path in daemon.directory.iterdir() if path.is_file()]
    assert files
    assert not any(secret in text or secret.hex().encode() in text for text in listed + files)
    assert wire.ADMIN_SOCKET in {path.name for path in daemon.directory.iterdir()}


def test_a_process_that_cannot_be_started_is_said_to_everybody(client, daemon, monkeypatch):
    async def full(*arguments, **options):
        raise OSError(24, "Too many open files")

    group = client.ready(make_spec(ranks=2, transport="xla"))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    with pytest.raises(RuntimeUnavailableError, match="unique ids cannot be started: .*open files"):
        ask(client, group)
    assert "Too many open files" in row(client).nccl_state
    with pytest.raises(StaleHandleError, match="Too many open files; create it again"):
        ask(client, group)


def test_a_fault_while_ids_are_made_is_said_to_everybody(client, daemon, monkeypatch):
    async def fails(*arguments):
        raise ZeroDivisionError

    group = client.ready(make_spec(ranks=2, transport="xla"))
    monkeypatch.setattr(unique_ids.IdProcess, "make", fails)
    with pytest.raises(EpRuntimeError, match="failed inside the daemon"):
        ask(client, group)
    assert "a fault of the daemon" in row(client).nccl_state
    assert "task.failed" in daemon.event_kinds()


def created(pool, clients, spec):
    """Returns groups that every rank's process has created and none has reported."""
    futures = [pool.submit(client.create, spec, [rank]) for rank, client in enumerate(clients)]
    return [future.result(WAIT_S).group for future in futures]


def test_both_nodes_give_the_coordinators_ids_until_the_view_is_decided(nccl_library, nodes, pool):
    a, b = nodes
    clients = [a.client(), b.client()]
    groups = created(pool, clients, spec_of())
    found = [ask(client, group) for client, group in zip(clients, groups, strict=True)]
    assert found[0].unique_ids == found[1].unique_ids
    assert len(children()) == 1  # of both daemons, which share this process
    attached = [pool.submit(c.attached, g) for c, g in zip(clients, groups, strict=True)]
    for future in attached:
        future.result(WAIT_S)
    eventually(lambda: not children())


def test_a_view_that_is_given_up_takes_its_ids_along(nccl_library, nodes, pool):
    a, b = nodes
    clients = [a.client(), b.client()]
    groups = created(pool, clients, spec_of())
    before = ask(clients[0], groups[0]).unique_ids
    clients[1].goodbye()
    eventually(lambda: not children())
    again = b.client()
    joined = pool.submit(again.create, spec_of(), [1])
    after = ask(again, joined.result(WAIT_S).group).unique_ids
    assert set(after).isdisjoint(before)


def test_who_is_not_in_the_cluster_gets_none(nccl_library, nodes, pool, call_node):
    a, b = nodes
    created(pool, [a.client(), b.client()], spec_of())
    request = node_service_pb2.GetViewIdsRequest(
        node="stranger",
        lease_id="made up",
        key=node_service_pb2.GroupKey(uid=os.geteuid(), job="job", name="moe"),
        epoch=group_of(a).epoch,
        num_domains=1,
    )
    address = next(node.identity.address for node in a.status().cluster.nodes if node.coordinator)
    with pytest.raises(StaleHandleError):
        call_node(address, node_service_pb2, "GetViewIds", request)
    assert not children()
