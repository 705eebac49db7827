"""Groups of one job on several nodes: one view for all, and all learn of its end."""

from __future__ import annotations

import os
import re

import grpc
import pytest
from cluster_places import place
from harness import FakeClock, Watcher, eventually
from raw_client import WAIT_S
from spanning import TOLD_S, all_ready, group_of, members, spec_of, state
from test_cluster import cluster_of, coordinates, identity, joined, joins

from ep_runtime import errors, services, wire
from ep_runtime.v1 import node_service_pb2
from ep_runtime_server.base import limits
from ep_runtime_server.cluster import views
from ep_runtime_server.memory.windows import Owner


def test_a_group_forms_over_two_nodes_under_one_view(nodes, pool):
    a, b = nodes
    before = cluster_of(a).epoch
    first, second, third = a.client(), b.client(), b.client()
    groups = all_ready(pool, spec_of(4), (first, [0, 1]), (second, [2]), (third, [3]))
    assert {group.state for group in groups} == {2}
    assert {(group.epoch, group.attempt) for group in groups} == {(before + 1, 1)}
    assert members(groups[0]) == members(groups[1]) == members(groups[2])
    assert [m.node for m in groups[0].members] == ["", "", "b", "b"]
    assert [m.node for m in groups[1].members] == ["a", "a", "", ""]
    assert [m.session_id for m in groups[1].members] == [
        first.session_id,
        first.session_id,
        second.session_id,
        third.session_id,
    ]
    assert all(m.attached for group in groups for m in group.members)


def test_members_are_listed_as_they_attach(nodes, pool):
    a, b = nodes
    first, second = a.client(), b.client()
    futures = [
        pool.submit(client.create, spec_of(), ranks=[rank])
        for rank, client in enumerate((first, second))
    ]
    groups = [future.result(WAIT_S).group for future in futures]

    def listed() -> list[bool]:
        return [member.attached for member in group_of(a).members]

    assert listed() == [False, False]
    waiting = pool.submit(first.attached, groups[0])
    eventually(lambda: listed() == [True, False])
    second.attached(groups[1])
    waiting.result(WAIT_S)
    assert listed() == [True, True]


def test_several_groups_form_at_once_and_each_has_its_own_epoch(nodes, pool):
    a, b = nodes
    first, second = a.client(), b.client()
    names = ["one", "two", "three"]
    futures = [
        pool.submit(client.ready, spec_of(name=name), ranks=[rank])
        for name in names
        for rank, client in enumerate((first, second))
    ]
    epochs = [future.result(WAIT_S).epoch for future in futures]
    assert epochs[0::2] == epochs[1::2]
    assert len(set(epochs)) == 3


def test_a_group_of_one_node_needs_no_coordinator(nodes, pool):
    a, b = nodes
    a.close()
    a.close = lambda: None
    first, second = b.client(), b.client()
    groups = all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    assert {(group.epoch, group.state) for group in groups} == {(0, 2)}


def test_ranks_that_no_node_has_are_named_at_the_deadline(nodes, pool):
    a, b = nodes
    waiting = pool.submit(a.client().ready, spec_of(4), ranks=[0])
    eventually(lambda: state(a) == "FORMING")
    late = b.client()
    with pytest.raises(errors.GroupNotReadyError, match=r"ranks \[1, 3\] of 4") as caught:
        late.create(spec_of(4), ranks=[2], wait_s=1.0)
    assert caught.value.fields["missing_ranks"] == [1, 3]
    eventually(lambda: state(b) == "GONE")
    group = late.ready(spec_of(4), ranks=[1, 2, 3])
    assert waiting.result(WAIT_S).epoch == group.epoch


@pytest.mark.parametrize("first", ["a", "b"])
def test_another_spec_on_another_node_ends_both_waits_naming_node_field_and_values(
    nodes, pool, first
):
    here, there = nodes if first == "a" else reversed(nodes)
    other = "b" if first == "a" else "a"
    waiting = pool.submit(here.client().create, spec_of(hidden_size=16), ranks=[0])
    eventually(lambda: state(here) == "FORMING")
    refused = pool.submit(there.client().create, spec_of(hidden_size=32), ranks=[1])
    for future, values in ((waiting, (32, other, 16)), (refused, (16, first, 32))):
        with pytest.raises(errors.SpecMismatchError) as caught:
            future.result(WAIT_S)
        fields = caught.value.fields
        assert (fields["theirs"], fields["node"], fields["ours"]) == values
        assert fields["field"] == "hidden_size"
        assert f"on node '{values[1]}'" in str(caught.value)


def test_another_spec_of_a_process_here_ends_the_waits_on_other_nodes_too(nodes, pool):
    a, b = nodes
    waiting = [
        pool.submit(daemon.client().create, spec_of(3), ranks=[rank])
        for rank, daemon in enumerate((a, b))
    ]
    eventually(lambda: {state(a), state(b)} == {"FORMING"})
    with pytest.raises(errors.SpecMismatchError):
        b.client().create(spec_of(3, hidden_size=32), ranks=[2])
    for future in waiting:
        with pytest.raises(errors.SpecMismatchError, match="hidden_size=32"):
            future.result(WAIT_S)
    eventually(lambda: not a.ask("ListGroups").groups)
    again = all_ready(pool, spec_of(2), (a.client(), [0]), (b.client(), [1]))
    assert {group.state for group in again} == {2}


def test_a_rank_that_two_nodes_claim_is_refused_to_the_second(nodes, pool):
    a, b = nodes
    first = a.client()
    waiting = pool.submit(first.create, spec_of(), ranks=[0])
    eventually(lambda: state(a) == "FORMING")
    with pytest.raises(errors.GroupBusyError, match=r"rank 0 .* on node 'a', which is still alive"):
        b.client().create(spec_of(), ranks=[0])
    again = pool.submit(b.client().ready, spec_of(), ranks=[1])
    first.attached(waiting.result(WAIT_S).group)
    assert again.result(WAIT_S).state == 2


def test_a_rank_whose_process_lives_is_not_taken_by_another_node(start_daemon, pool):
    address = place()
    a = start_daemon(cluster=coordinates(address))
    b, c = (start_daemon(cluster=joins(address, name)) for name in ("b", "c"))
    for daemon in (b, c):
        joined(daemon)
    first, second = a.client(), b.client(process=True)
    groups = all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    late = c.client()
    for rank, node in enumerate(("a", "b")):
        with pytest.raises(errors.GroupBusyError, match=f"on node '{node}', which is still alive"):
            late.create(spec_of(), ranks=[rank])
    with pytest.raises(errors.GroupBusyError, match="on node 'b', which is still alive"):
        a.client().create(spec_of(), ranks=[1])
    assert (state(a), state(b)) == ("READY", "READY")
    second.process.kill()
    eventually(lambda: state(a) == "BROKEN", within_s=TOLD_S)
    again = all_ready(pool, spec_of(), (first, [0]), (late, [1]))
    assert again[0].epoch > groups[0].epoch
    assert [m.node for m in again[0].members] == ["", "c"]


def test_a_process_that_dies_before_the_view_is_replaced(nodes, pool):
    a, b = nodes
    waiting = pool.submit(a.client().ready, spec_of(3), ranks=[0])
    dying = b.client(process=True)
    request = dying.create_request(spec_of(3), ranks=[1])
    call = dying.groups.CreateGroup.future(request, **dying.how())  # lives as long as its name
    eventually(lambda: state(b) == "FORMING")
    dying.process.kill()
    group = b.client().ready(spec_of(3), ranks=[1, 2])
    assert waiting.result(WAIT_S).epoch == group.epoch
    assert group.attempt == 1  # no view named the dead process
    assert call.exception(WAIT_S) is not None


def test_a_process_that_dies_under_a_view_leads_to_a_new_attempt_with_a_new_epoch(nodes, pool):
    a, b = nodes
    first, dying = a.client(), b.client(process=True)
    made = [
        pool.submit(client.create, spec_of(), ranks=[rank])
        for rank, client in ((0, first), (1, dying))
    ]
    groups = [future.result(WAIT_S).group for future in made]
    assert groups[0].epoch == groups[1].epoch
    waiting = pool.submit(first.attached, groups[0])
    dying.process.kill()
    eventually(lambda: group_of(a).epoch == 0, within_s=TOLD_S)  # that view is given up
    second = b.client().ready(spec_of(), ranks=[1])
    group = waiting.result(WAIT_S)  # no process on a had to create it again
    assert (group.epoch, group.attempt) == (second.epoch, 2)
    assert second.epoch > groups[0].epoch
    assert members(group) == members(second)


def test_a_dead_process_is_told_to_every_node_and_the_group_forms_anew(nodes, pool):
    a, b = nodes
    first = a.client()
    watcher = Watcher(first)
    dying = b.client(process=True)
    epochs = []
    for _ in range(3):
        groups = all_ready(pool, spec_of(), (first, [0]), (dying, [1]))
        epochs.append(groups[0].epoch)
        watcher.events.clear()
        dying.process.kill()
        eventually(lambda: state(a) == "BROKEN", within_s=TOLD_S)
        eventually(lambda: [e.group for e in watcher.events if e.group.state == 3])
        (event,) = [e.group for e in watcher.events if e.group.state == 3]
        assert list(event.lost_ranks) == [1]
        assert event.lost_members[0].pid == dying.pid
        with pytest.raises((errors.PeerLostError, errors.StaleHandleError)):
            first.attached(groups[0])
        dying = b.client(process=True)
    assert epochs == sorted(set(epochs))


def test_a_process_that_closes_the_group_breaks_nothing(nodes, pool):
    a, b = nodes
    first, second = a.client(), b.client()
    groups = all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    second.close_group(groups[1])
    eventually(lambda: state(b) == "GONE")
    eventually(lambda: not group_of(a).members[1].attached)  # node a knows of it
    assert state(a) == "READY"
    again = all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    assert again[0].epoch > groups[0].epoch


def test_a_node_answers_for_its_processes_of_a_view_that_its_group_left(nodes, pool):
    """Another process of the node closed the group and claims again; this one dies
    in the old view.
    """
    a, b = nodes
    dying, leaving, other = a.client(process=True), a.client(), b.client()
    groups = all_ready(pool, spec_of(3), (dying, [0]), (leaving, [1]), (other, [2]))
    leaving.close_group(groups[1])
    again = pool.submit(leaving.ready, spec_of(3), ranks=[1])
    eventually(lambda: state(a) == "FORMING")
    assert state(b) == "READY"
    dying.process.kill()
    eventually(lambda: state(b) == "BROKEN", within_s=TOLD_S)
    formed = all_ready(pool, spec_of(3), (b.client(), [0]), (other, [2]))  # rank 0 is free
    assert again.result(WAIT_S).epoch == formed[0].epoch > groups[0].epoch


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("Reclaim", r"was reclaimed by uid \d+ \(pid \d+\) with ep-runtime reclaim"),
        ("Fence", r"its session was fenced by uid \d+ \(pid \d+\) with ep-runtime fence"),
    ],
)
def test_a_group_taken_away_on_one_node_breaks_on_the_others_who_hear_by_whom(
    nodes, pool, order, said
):
    a, b = nodes
    first, second = a.client(), b.client()
    watcher = Watcher(first)
    all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    b.ask(order, **({"name": "moe"} if order == "Reclaim" else {"session_id": second.session_id}))
    eventually(lambda: state(a) == "BROKEN", within_s=TOLD_S)
    eventually(lambda: [e.group for e in watcher.events if e.group.state == 3])
    (event,) = [e.group for e in watcher.events if e.group.state == 3]
    assert re.search(r"processes of node b are gone: ranks \[1\]: .*" + said, event.reason)


def test_another_node_speaks_for_its_own_ranks_only(nodes, pool, call_node):
    a, b = nodes
    (group, _) = all_ready(pool, spec_of(), (a.client(), [0]), (b.client(), [1]))
    key = node_service_pb2.GroupKey(uid=group.uid, job=group.job, name="moe")
    fields = {"key": key, "epoch": group.epoch}
    address = cluster_of(a).coordinator
    for node, ranks in (("c", [1]), ("b", [0])):
        request = node_service_pb2.TellGroupRequest(node=node, lost_ranks=ranks, **fields)
        with pytest.raises(errors.PermissionDeniedError, match=f"is not on node '{node}'"):
            call_node(address, node_service_pb2, "TellGroup", request)
    report = node_service_pb2.NodeReport(node="a", lost_ranks=[0])
    passed_on = node_service_pb2.TellGroupRequest(node="c", reports=[report], **fields)
    theirs = next(n for n in cluster_of(a).nodes if n.identity.node == "b").identity.address
    with pytest.raises(errors.PermissionDeniedError, match="'c' does not coordinate"):
        call_node(theirs, node_service_pb2, "TellGroup", passed_on)
    passed_on.node = "a"
    passed_on.reports[0].node = "c"  # the coordinator does not check who holds these ranks
    assert call_node(theirs, node_service_pb2, "TellGroup", passed_on).told
    old = node_service_pb2.TellGroupRequest(
        node="b", lost_ranks=[1], key=key, epoch=group.epoch - 1
    )
    call_node(address, node_service_pb2, "TellGroup", old)
    assert (state(a), state(b)) == ("READY", "READY")


def test_a_report_may_name_as_many_nodes_as_a_cluster_has(nodes, call_node):
    a, _ = nodes
    others = [f"{'n' * 100}{number}" for number in range(limits.MAX_NODES)]
    key = node_service_pb2.GroupKey(uid=os.geteuid(), job="job", name="moe")
    request = node_service_pb2.TellGroupRequest(node="b", key=key, epoch=1, others=others)
    answer = call_node(cluster_of(a).coordinator, node_service_pb2, "TellGroup", request)
    assert answer.told
    assert sorted(answer.unheard) == sorted(others)  # they are not nodes of the cluster
    request.others.append("one-more")
    with pytest.raises(errors.InvalidArgumentError, match="others must be at most"):
        call_node(cluster_of(a).coordinator, node_service_pb2, "TellGroup", request)


def test_a_node_that_is_unreachable_while_a_group_forms_ends_the_attempt(
    start_daemon, pool, call_node
):
    address = place()
    a = start_daemon(clock=FakeClock(), cluster=coordinates(address))
    join = node_service_pb2.JoinClusterRequest(identity=identity("x"))
    lease = call_node(address, node_service_pb2, "JoinCluster", join).lease_id
    client = a.client()
    waiting = pool.submit(client.create, spec_of(), ranks=[0])
    eventually(lambda: state(a) == "FORMING")
    owner = Owner(group_of(a).uid, "job", "moe")
    request = node_service_pb2.JoinGroupRequest(
        node="x",
        lease_id=lease,
        key=views.key_to_proto(owner),
        spec=wire.group_spec_to_proto(spec_of()),
        claims=views.claims_to_proto([views.NodeClaim("s", 7, (1,))]),
        generation=1,
        wait=wire.duration(WAIT_S),
    )
    view = call_node(address, node_service_pb2, "JoinGroup", request).view
    group = waiting.result(WAIT_S).group
    assert (group.epoch, group.members[1].node) == (view.epoch, "x")
    attached = pool.submit(client.attached, group, wait_s=0.5)
    a.clock.advance(limits.NODE_LEASE_S + 1)
    eventually(lambda: group_of(a).epoch == 0, within_s=TOLD_S)
    with pytest.raises(errors.GroupNotReadyError, match=r"ranks \[1\]"):
        attached.result(WAIT_S)


def test_a_node_that_waits_for_a_coordinator_that_ends_hears_so(start_daemon):
    address = place()
    a = start_daemon(cluster=coordinates(address))
    with grpc.insecure_channel(address) as channel:
        stub = services.stub(channel, node_service_pb2.DESCRIPTOR)
        join = node_service_pb2.JoinClusterRequest(identity=identity("x"))
        request = node_service_pb2.JoinGroupRequest(
            node="x",
            lease_id=stub.JoinCluster(join, timeout=WAIT_S).lease_id,
            key=views.key_to_proto(Owner(os.geteuid(), "job", "moe")),
            spec=wire.group_spec_to_proto(spec_of()),
            claims=views.claims_to_proto([views.NodeClaim("s", 7, (1,))]),
            generation=1,
            missing_ranks=[0],
            wait=wire.duration(WAIT_S),
        )
        call = stub.JoinGroup.future(request, timeout=WAIT_S)
        assemblies = a._daemon.runtime.cluster.assemblies
        eventually(lambda: len(assemblies._all) == 1, what="the coordinator hears of the group")
        a.close()
        a.close = lambda: None
        with pytest.raises(grpc.RpcError) as caught:
            call.result(WAIT_S)
    assert caught.value.details() == "the daemon ended before it answered JoinGroup"
