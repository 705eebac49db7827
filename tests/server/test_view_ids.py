"""NCCL unique ids of a group over two nodes: the coordinator's, the same everywhere, per view."""

from __future__ import annotations

import os

import pytest
from harness import eventually
from nccl_builds import fake_library
from raw_client import WAIT_S
from spanning import group_of, spec_of
from test_unique_ids import ask, children

from ep_runtime.errors import StaleHandleError
from ep_runtime.v1 import node_service_pb2


@pytest.fixture(autouse=True)
def _nccl_library(monkeypatch) -> None:
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", str(fake_library()))


def created(pool, clients, spec):
    """Groups that every rank's process has created, and nobody has reported."""
    futures = [pool.submit(client.create, spec, [rank]) for rank, client in enumerate(clients)]
    return [future.result(WAIT_S).group for future in futures]


def test_both_nodes_give_the_coordinators_ids_until_the_view_is_decided(nodes, pool):
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


def test_a_view_that_is_given_up_takes_its_ids_along(nodes, pool):
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


def test_who_is_not_in_the_cluster_gets_none(nodes, pool, call_node):
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
