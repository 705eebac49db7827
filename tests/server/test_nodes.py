"""The coordinator's list: names, leases, versions, and the facts it stores."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import threading

import pytest
from harness import FakeClock

from ep_runtime.errors import (
    GroupBusyError,
    InvalidArgumentError,
    PermissionDeniedError,
    PoolExhaustedError,
    StaleHandleError,
    VersionSkewError,
)
from ep_runtime_server.base import limits
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.cluster.node_servicer import check_certificate
from ep_runtime_server.journal import file as journal_file
from ep_runtime_server.nodes.config import Endpoint
from ep_runtime_server.nodes.facts import MAX_EPOCH, MAX_EPOCHS_AHEAD, ClusterFacts, NodeIdentity
from ep_runtime_server.nodes.registry import Nodes, NodeState


def identity(node: str, **more) -> NodeIdentity:
    made = NodeIdentity(
        node=node,
        node_id=f"id-{node}",
        incarnation="1",
        boot_id="boot",
        host_name=f"host-{node}",
        pid=7,
        address=f"{node}:1",
        server_version="1.2.3",
        api_versions=("v1",),
    )
    return dataclasses.replace(made, **more)


class Coordinator:
    """The list on a journal; `restart` opens it again from the same journal."""

    def __init__(self, path, expected=None, *switches: str) -> None:
        self.clock = FakeClock()
        self.path = path
        self.expected = expected or {}
        self.start(*switches)

    def start(self, *switches: str) -> None:
        journal = journal_file.Journal(self.path, Failpoints(switches), name="cluster", synced=True)
        self.facts = ClusterFacts(journal)
        self.events = EventLog(self.clock)
        self.nodes = Nodes(identity("a"), self.expected, self.facts, self.clock, self.events)

    def restart(self, *switches: str) -> None:
        self.facts.close()
        self.start(*switches)

    def states(self) -> dict[str, str]:
        return {node.identity.node: node.state.value for node in self.nodes.all()}

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.after(0)]


@pytest.fixture
def coordinator(tmp_path):
    made = Coordinator(tmp_path / "cluster")
    yield made
    made.facts.close()


def test_a_node_that_reports_keeps_its_lease(coordinator):
    lease = coordinator.nodes.join(identity("b")).lease_id
    for _ in range(5):
        coordinator.clock.advance(limits.NODE_LEASE_S - 1)
        coordinator.nodes.report("b", lease)
        coordinator.nodes.tick()
    assert coordinator.states() == {"a": "JOINED", "b": "JOINED"}


def test_a_node_that_never_comes_back_is_forgotten(coordinator):
    coordinator.nodes.join(identity("b"))
    for _ in range(2):
        coordinator.clock.advance(limits.NODE_FORGOTTEN_S)
        coordinator.nodes.tick()
    assert coordinator.states() == {"a": "JOINED"}
    coordinator.restart()
    assert coordinator.states() == {"a": "JOINED"}


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_name_that_a_living_daemon_has_is_refused(coordinator, name):
    coordinator.nodes.join(identity("b"))
    other = identity(name, node_id="another", host_name="elsewhere", address="e:2")
    with pytest.raises(GroupBusyError, match=f"node name '{name}' is taken") as caught:
        coordinator.nodes.join(other)
    assert caught.value.fields["host"] == f"host-{name}"
    assert "elsewhere" in str(caught.value)
    assert coordinator.states() == {"a": "JOINED", "b": "JOINED"}


def test_a_copy_of_a_daemons_directory_on_another_host_is_another_daemon(coordinator):
    coordinator.nodes.join(identity("b"))
    with pytest.raises(GroupBusyError):
        coordinator.nodes.join(identity("b", boot_id="other"))


def test_a_daemon_that_starts_again_takes_its_own_place(coordinator):
    first = coordinator.nodes.join(identity("b")).lease_id
    coordinator.clock.advance(3)
    second = coordinator.nodes.join(identity("b", incarnation="2", pid=8, address="b:2"))
    assert (second.identity.pid, second.since_s) == (8, coordinator.clock.now_s)
    with pytest.raises(StaleHandleError, match="join again"):
        coordinator.nodes.report("b", first)


def test_a_name_is_free_once_its_lease_is_over(coordinator):
    first = coordinator.nodes.join(identity("b")).lease_id
    coordinator.clock.advance(limits.NODE_LEASE_S)
    coordinator.nodes.tick()
    coordinator.nodes.join(identity("b", node_id="another"))
    with pytest.raises(StaleHandleError):
        coordinator.nodes.report("b", first)
    with pytest.raises(GroupBusyError):
        coordinator.nodes.join(identity("b"))


def test_a_node_that_leaves_frees_its_name_at_once(coordinator):
    lease = coordinator.nodes.join(identity("b")).lease_id
    coordinator.nodes.leave("b", "not its lease")
    assert "b" in coordinator.states()
    coordinator.nodes.leave("b", lease)
    coordinator.nodes.leave("b", lease)
    coordinator.nodes.join(identity("b", node_id="another"))


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [
        ("server_version", "1.4.0", "1.2.3"),
        ("server_version", "2.2.3", "1.2.3"),
        ("server_version", "new", "1.2.3"),
        ("api_versions", ("v2",), ["v1"]),
    ],
)
def test_versions_that_do_not_fit_name_node_field_and_both_values(coordinator, field, theirs, ours):
    with pytest.raises(VersionSkewError) as caught:
        coordinator.nodes.join(identity("b", **{field: theirs}))
    shown = list(theirs) if isinstance(theirs, tuple) else theirs
    assert caught.value.fields == {"node": "b", "field": field, "theirs": shown, "ours": ours}
    for part in ("node 'b'", f"{field}={shown}", f"{field}={ours}"):
        assert part in str(caught.value)


def test_bugfix_and_neighbouring_minor_releases_and_more_protocols_fit(coordinator):
    coordinator.nodes.join(identity("b", server_version="1.2.9", api_versions=("v2", "v1")))
    coordinator.nodes.join(identity("c", server_version="1.1.0"))
    coordinator.nodes.join(identity("d", server_version="1.3.0rc1"))


def test_a_node_that_is_refused_is_listed_so_and_gone_when_it_asks_no_more(coordinator):
    nodes = coordinator.nodes
    nodes.join(identity("b"))
    for _ in range(2):  # it asks repeatedly
        coordinator.clock.advance(0.9 * limits.NODE_LEASE_S)
        nodes.refused(identity("b", incarnation="2", server_version="1.9.0"), "too new")
        nodes.tick()
    (b,) = nodes.all()[1:]
    assert (b.state, b.why, b.identity.server_version) == (NodeState.REFUSED, "too new", "1.9.0")
    assert b.since_s == coordinator.clock.now_s - 0.9 * limits.NODE_LEASE_S
    assert coordinator.kinds() == ["cluster.node_joined", "cluster.node_refused"]
    coordinator.clock.advance(limits.NODE_LEASE_S)
    nodes.tick()
    assert coordinator.states() == {"a": "JOINED"}


def test_a_stranger_that_is_refused_does_not_take_the_place_of_a_node(coordinator):
    coordinator.nodes.join(identity("b"))
    coordinator.nodes.refused(identity("b", node_id="another", server_version="1.9.0"), "too new")
    assert coordinator.states() == {"a": "JOINED", "b": "JOINED"}


def test_with_a_file_its_nodes_are_there_from_the_start_and_no_others_join(tmp_path):
    names = {name: Endpoint(name, 1) for name in ("a", "b", "c")}
    coordinator = Coordinator(tmp_path / "cluster", names)
    assert coordinator.states() == {"a": "JOINED", "b": "ABSENT", "c": "ABSENT"}
    lease = coordinator.nodes.join(identity("b")).lease_id
    with pytest.raises(InvalidArgumentError, match="node must be in the coordinator's .*, got 'x'"):
        coordinator.nodes.join(identity("x"))
    assert coordinator.states() == {"a": "JOINED", "b": "JOINED", "c": "ABSENT"}
    coordinator.nodes.leave("b", lease)
    assert coordinator.states() == {"a": "JOINED", "b": "ABSENT", "c": "ABSENT"}
    coordinator.facts.close()


def test_the_number_of_nodes_is_bounded(coordinator, monkeypatch):
    monkeypatch.setattr(limits, "MAX_NODES", 3)
    for name in ("b", "c", "b"):
        coordinator.nodes.join(identity(name))
    with pytest.raises(PoolExhaustedError, match="at most 3 nodes"):
        coordinator.nodes.join(identity("d"))


def test_a_coordinator_that_starts_again_awaits_its_nodes_a_whole_lease(coordinator):
    lease = coordinator.nodes.join(identity("b")).lease_id
    coordinator.clock.advance(limits.NODE_LEASE_S - 1)
    coordinator.restart()
    assert coordinator.states() == {"a": "JOINED", "b": "JOINED"}
    with pytest.raises(GroupBusyError):
        coordinator.nodes.join(identity("b", node_id="another"))
    with pytest.raises(StaleHandleError):
        coordinator.nodes.report("b", lease)
    before = coordinator.nodes.all()[1].since_s
    coordinator.clock.advance(1)
    assert coordinator.nodes.join(identity("b")).since_s == before  # it was joined all the time
    coordinator.clock.advance(limits.NODE_LEASE_S)
    coordinator.nodes.tick()
    assert coordinator.states()["b"] == "UNREACHABLE"


def test_no_epoch_is_given_twice_and_ids_stay(coordinator):
    facts = coordinator.facts
    facts.found()
    node_id, cluster_id = facts.node_id, facts.cluster_id
    given = [facts.next_epoch(), facts.next_epoch()]
    coordinator.restart()
    facts = coordinator.facts
    assert (facts.node_id, facts.cluster_id) == (node_id, cluster_id)
    facts.found()
    given.append(facts.next_epoch())
    facts.heard(57)  # a node's, after its coordinator lost the file
    facts.heard(3)
    given.append(facts.next_epoch())
    assert given == [1, 2, 3, 58]


def test_what_is_not_on_the_disk_is_not_said(tmp_path):
    coordinator = Coordinator(tmp_path / "cluster")
    coordinator.facts.next_epoch()
    coordinator.restart("failpoint:cluster.before_write=enospc")
    with pytest.raises(PoolExhaustedError, match="epoch"):
        coordinator.facts.next_epoch()
    assert coordinator.facts.epoch == 1
    with pytest.raises(PoolExhaustedError):
        coordinator.nodes.join(identity("b"))
    assert coordinator.states() == {"a": "JOINED"}
    coordinator.restart()
    assert coordinator.facts.next_epoch() == 2
    coordinator.facts.close()


def test_a_disk_that_was_full_for_a_moment_is_forgiven(tmp_path):
    coordinator = Coordinator(tmp_path / "cluster")
    coordinator.restart("failpoint:cluster.before_write=enospc:1")
    with pytest.raises(PoolExhaustedError):
        coordinator.facts.next_epoch()
    assert coordinator.facts.next_epoch() == 1
    coordinator.restart()
    assert coordinator.facts.epoch == 1
    coordinator.facts.close()


async def test_a_slow_disk_holds_who_asks_and_not_the_loop(coordinator, monkeypatch):
    facts, taken = coordinator.facts, threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda fd: taken.wait(10.0))
    epoch = facts.next_epoch()  # known here
    telling = [asyncio.ensure_future(facts.durable()) for _ in range(3)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert not any(done.done() for done in telling)  # and sent to no node
    assert facts.next_epoch() == epoch + 1
    taken.set()
    await asyncio.gather(*telling)
    await facts.durable()


def test_nor_does_one_on_which_the_file_is_written_anew(coordinator, monkeypatch):
    facts, asked, taken = coordinator.facts, threading.Event(), threading.Event()
    coordinator.nodes.join(identity("b"))
    before, sync = facts.next_epoch(), os.fsync

    def slow(fd: int) -> None:
        asked.set()
        assert taken.wait(10.0)
        sync(fd)

    monkeypatch.setattr(journal_file, "COMPACT_AT_BYTES", 0)
    monkeypatch.setattr(os, "fsync", slow)

    async def scene() -> int:
        facts.next_epoch()
        assert await asyncio.to_thread(asked.wait, 10.0)
        epoch = facts.next_epoch()  # known here
        facts.commit("1/job/moe", epoch)
        facts.forget("b")
        telling = asyncio.ensure_future(facts.durable())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not telling.done()  # and sent to no node
        taken.set()
        await telling
        return epoch

    assert asyncio.run(scene()) == before + 2
    coordinator.restart()
    facts = coordinator.facts
    assert (facts.epoch, facts.committed_epoch("1/job/moe")) == (before + 2, before + 2)
    assert "b" not in facts.nodes


def test_what_a_disk_does_not_keep_is_written_anew_or_not_said(coordinator, monkeypatch):
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    facts = coordinator.facts
    facts.next_epoch()
    monkeypatch.setattr(os, "fdatasync", broken)
    asyncio.run(facts.durable())  # in a new file
    facts.next_epoch()
    monkeypatch.setattr(os, "fsync", broken)
    for _ in range(2):
        with pytest.raises(PoolExhaustedError, match="facts of the cluster: broken; retry"):
            asyncio.run(facts.durable())
    monkeypatch.undo()
    asyncio.run(facts.durable())
    coordinator.restart()
    assert coordinator.facts.epoch == 2


def test_an_epoch_that_nobody_can_know_of_is_not_believed(coordinator):
    facts = coordinator.facts
    facts.next_epoch()
    for epoch in (2**64 - 1, MAX_EPOCH + 1, 2 + MAX_EPOCHS_AHEAD):
        with pytest.raises(InvalidArgumentError, match="start it once with --epoch-at-least"):
            facts.check_claim("b", epoch)
    facts.check_claim("b", 1 + MAX_EPOCHS_AHEAD)  # of a coordinator that lost its file
    with pytest.raises(InvalidArgumentError, match="at most"):
        facts.heard(2**64 - 1)
    coordinator.restart()
    assert coordinator.facts.next_epoch() == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epoch", 2**64 - 1),
        ("epoch", "many"),
        ("epoch", True),
        ("epoch", -1),
        ("node_id", 7),
        ("cluster_id", []),
        ("node/b", {"uid": "root"}),
        ("node/b", []),
        ("node/b", {"api_versions": [1]}),
        ("committed/1/job/moe", 1e300),
        ("another", 1),
    ],
)
def test_what_no_daemon_writes_is_left_out_of_the_file(coordinator, key, value):
    coordinator.facts.found()
    coordinator.facts.commit("1/job/other", 5)
    coordinator.facts.heard(5)
    coordinator.facts._put(key, value)
    coordinator.restart()
    assert coordinator.facts.unreadable == [key]
    assert coordinator.facts.next_epoch() == 6
    assert coordinator.states() == {"a": "JOINED"}
    coordinator.restart()
    assert coordinator.facts.epoch == 6


class Caller:
    """A gRPC context of a connection with this certificate."""

    def __init__(self, **about) -> None:
        self._about = {"transport_security_type": [b"ssl"], **about}

    def auth_context(self):
        return self._about


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"x509_subject_alternative_name": [b"b"], "peer_uri": [b"b"]},
        {"x509_subject_alternative_name": [b"b"], "peer_email": [b"b"]},
        {"x509_subject_alternative_name": [b"c"], "peer_dns": [b"c"]},
        {"x509_common_name": [b"b"]},
    ],
    ids=["no names", "a URI", "an address", "another", "a common name"],
)
def test_only_a_dns_name_of_the_certificate_is_a_nodes_name(about):
    with pytest.raises(PermissionDeniedError, match="--node must be a DNS name .*, got 'b'"):
        check_certificate(Caller(**about), "b")


def test_the_dns_name_of_the_certificate_is_the_nodes_name():
    check_certificate(Caller(peer_dns=[b"x", b"b"]), "b")
