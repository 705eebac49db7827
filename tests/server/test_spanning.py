"""Groups of one job on several nodes: one view for all, ends told, the coordinator's deaths."""

from __future__ import annotations

import concurrent.futures
import random
import signal
import time

import pytest
from cluster_places import place
from harness import FakeClock, Watcher, eventually
from raw_client import WAIT_S, make_spec
from test_cluster import cluster_of, coordinates, identity, joined, joins, link

from ep_runtime import errors, wire
from ep_runtime.v1 import node_service_pb2
from ep_runtime.v1.node_service_pb2_grpc import NodeServiceStub
from ep_runtime_server import config, view_wire
from ep_runtime_server.assembly import NodeClaim
from ep_runtime_server.windows import Owner

# What a dead process's peers on other nodes may wait for the word, and forming anew may take.
TOLD_S = 2.0


def spec_of(ranks: int = 2, **more):
    return make_spec(ranks=ranks, **{"transport": "xla", **more})


@pytest.fixture
def pool():
    """Calls that wait for each other."""
    with concurrent.futures.ThreadPoolExecutor(8) as found:
        yield found


@pytest.fixture
def nodes(start_daemon):
    """Two daemons, a coordinates."""
    address = place()
    a = start_daemon(cluster=coordinates(address))
    b = start_daemon(cluster=joins(address))
    joined(b)
    return a, b


def all_ready(pool, spec, *claims):
    """Groups of clients that claim [(client, ranks)] at the same time."""
    futures = [pool.submit(client.ready, spec, ranks=ranks) for client, ranks in claims]
    return [future.result(WAIT_S) for future in futures]


def members(group) -> list[tuple[int, int, str]]:
    """(world rank, pid, session) of every rank, the same on every node."""
    return [(m.world_rank, m.pid, m.session_id) for m in group.members]


def group_of(daemon, name: str = "moe"):
    (found,) = daemon.ask("ListGroups", name=name).groups
    return found.group


def state(daemon) -> str:
    return daemon.group_states().get("moe", "GONE")


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


def test_windows_do_not_span_nodes(nodes, pool):
    a, b = nodes
    futures = [
        pool.submit(client.create, make_spec(ranks=2), ranks=[rank], wait_s=0.5)
        for rank, client in enumerate((a.client(), b.client()))
    ]
    for rank, future in enumerate(futures):
        with pytest.raises(errors.GroupNotReadyError) as caught:
            future.result(WAIT_S)
        assert caught.value.fields["missing_ranks"] == [1 - rank]


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


def test_a_rank_that_two_nodes_claim_is_refused_to_the_second(nodes, pool):
    a, b = nodes
    first = a.client()
    waiting = pool.submit(first.create, spec_of(), ranks=[0])
    eventually(lambda: state(a) == "FORMING")
    with pytest.raises(errors.GroupBusyError, match=r"rank 0 .* on node 'a', which lives"):
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
        with pytest.raises(errors.GroupBusyError, match=f"on node '{node}', which lives"):
            late.create(spec_of(), ranks=[rank])
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
    group = waiting.result(WAIT_S)  # nobody had to create it again on a
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
    assert state(a) == "READY"
    again = all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    assert again[0].epoch > groups[0].epoch


def test_a_group_taken_away_on_one_node_breaks_on_the_others(nodes, pool):
    a, b = nodes
    all_ready(pool, spec_of(), (a.client(), [0]), (b.client(), [1]))
    b.ask("Reclaim", name="moe")
    eventually(lambda: state(a) == "BROKEN", within_s=TOLD_S)


def test_another_node_speaks_for_its_own_ranks_only(nodes, pool, call_node):
    a, b = nodes
    (group, _) = all_ready(pool, spec_of(), (a.client(), [0]), (b.client(), [1]))
    key = node_service_pb2.GroupKey(uid=group.uid, job=group.job, name="moe")
    fields = {"key": key, "epoch": group.epoch}
    address = cluster_of(a).coordinator
    for node, ranks in (("c", [1]), ("b", [0])):
        request = node_service_pb2.TellGroupRequest(node=node, lost_ranks=ranks, **fields)
        with pytest.raises(errors.PermissionDeniedError, match=f"is not of node '{node}'"):
            call_node(address, NodeServiceStub, "TellGroup", request)
    old = node_service_pb2.TellGroupRequest(
        node="b", lost_ranks=[1], key=key, epoch=group.epoch - 1
    )
    call_node(address, NodeServiceStub, "TellGroup", old)
    assert state(a) == "READY"


def test_a_node_that_is_unreachable_while_a_group_forms_ends_the_attempt(
    start_daemon, pool, call_node
):
    address = place()
    a = start_daemon(clock=FakeClock(), cluster=coordinates(address))
    join = node_service_pb2.JoinClusterRequest(identity=identity("x"))
    lease = call_node(address, NodeServiceStub, "JoinCluster", join).lease_id
    client = a.client()
    waiting = pool.submit(client.create, spec_of(), ranks=[0])
    eventually(lambda: state(a) == "FORMING")
    owner = Owner(group_of(a).uid, "job", "moe")
    request = node_service_pb2.JoinGroupRequest(
        node="x",
        lease_id=lease,
        key=view_wire.key_to_proto(owner),
        spec=wire.group_spec_to_proto(spec_of()),
        claims=view_wire.claims_to_proto([NodeClaim("s", 7, (1,))]),
        wait=wire.duration(WAIT_S),
    )
    view = call_node(address, NodeServiceStub, "JoinGroup", request).view
    group = waiting.result(WAIT_S).group
    assert (group.epoch, group.members[1].node) == (view.epoch, "x")
    attached = pool.submit(client.attached, group, wait_s=0.5)
    a.clock.advance(config.NODE_LEASE_S + 1)
    eventually(lambda: group_of(a).epoch == 0, within_s=TOLD_S)
    with pytest.raises(errors.GroupNotReadyError, match=r"ranks \[1\]"):
        attached.result(WAIT_S)


@pytest.fixture
def three(daemon_process):
    """three(*switches): a coordinates and has no ranks; b and c join."""

    def start(*switches: str):
        address = place()
        flags = ["--coordinator", address, "--insecure", "--node", "a"]
        testing = [word for switch in switches for word in ("--testing", switch)]
        a = daemon_process(*flags, *testing)
        others = [
            daemon_process("--join", address, "--insecure", "--node", name) for name in ("b", "c")
        ]
        for other in others:
            joined(other)
        return a, flags, others

    return start


# What the coordinator writes: its two ids, its first epoch, two nodes, then the view's epoch and
# the decision.
_VIEW, _DECISION = 6, 7


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("before_write", _VIEW),
        ("after_write", _VIEW),
        ("before_write", _DECISION),
        ("after_write", _DECISION),
    ],
)
@pytest.mark.slow
def test_a_coordinator_that_dies_while_a_group_forms_is_waited_for(
    three, restarted, pool, point, count
):
    a, flags, (b, c) = three(f"failpoint:cluster.{point}=kill:{count}")
    first, second = b.client(), c.client()
    futures = [
        pool.submit(client.ready, spec_of(), ranks=[rank])
        for rank, client in enumerate((first, second))
    ]
    assert a.ended(within_s=5.0)[0] == -9
    assert not any(future.done() for future in futures)
    a = restarted(a, *flags)
    groups = [future.result(WAIT_S) for future in futures]
    assert {group.state for group in groups} == {2}
    assert len({group.epoch for group in groups}) == 1
    assert members(groups[0]) == members(groups[1])
    assert groups[0].epoch <= cluster_of(a).epoch


def test_a_process_that_dies_while_nobody_knows_the_decision_is_not_forgotten(
    three, restarted, pool
):
    a, flags, (b, c) = three(f"failpoint:cluster.after_write=kill:{_DECISION}")
    dying = c.client(process=True)
    futures = [
        pool.submit(client.ready, spec_of(), ranks=[rank])
        for rank, client in enumerate((b.client(), dying))
    ]
    assert a.ended(within_s=5.0)[0] == -9  # the view is committed, and it told nobody
    dying.process.kill()
    eventually(lambda: state(c) != "FORMING", within_s=TOLD_S)
    eventually(lambda: list(group_of(b).members)[1].node == "c")
    restarted(a, *flags)
    with pytest.raises(errors.PeerLostError, match="rank 1 is gone"):
        futures[0].result(WAIT_S)
    assert state(b) == "BROKEN"
    assert futures[1].exception(WAIT_S) is not None


def test_a_running_group_does_not_need_the_coordinator(three, restarted, pool):
    a, flags, (b, c) = three()
    first, dying = b.client(), c.client(process=True)
    groups = all_ready(pool, spec_of(), (first, [0]), (dying, [1]))
    a.kill()
    assert (state(b), state(c)) == ("READY", "READY")
    dying.process.kill()
    eventually(lambda: state(b) == "BROKEN", within_s=TOLD_S)  # from node to node
    waiting = [
        pool.submit(client.ready, spec_of(), ranks=[rank])
        for rank, client in ((0, first), (1, c.client()))
    ]
    a = restarted(a, *flags)
    again = [future.result(WAIT_S) for future in waiting]
    assert again[0].epoch == again[1].epoch > groups[0].epoch


@pytest.mark.slow
def test_a_daemon_that_starts_again_goes_on_with_the_groups_view(three, restarted, pool):
    _, flags, (b, c) = three()
    first, second = b.client(), c.client(process=True)
    groups = all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    flags = ("--join", flags[1], "--insecure", "--node", "c")
    c = restarted(c, *flags)
    assert state(b) == "READY"
    found = group_of(c)
    assert (found.epoch, members(found)) == (groups[0].epoch, members(groups[0]))
    joined(c)
    second.process.kill()
    eventually(lambda: state(b) == "BROKEN", within_s=TOLD_S)


class Job:
    """Two ranks on b, two on c; each is a process that creates the group until it has it."""

    def __init__(self, pool, daemons) -> None:
        self._pool = pool
        self._homes = [daemons[rank // 2] for rank in range(4)]
        self.clients = [home.client(process=True) for home in self._homes]
        self._dead: set = set()

    def _form(self, rank: int):
        """A process that lost a peer while it formed asks again, as a job's does."""
        client = self.clients[rank]
        for _ in range(20):
            try:
                return client.ready(spec_of(4), ranks=[rank])
            except errors.EpRuntimeError as error:
                if client in self._dead or not isinstance(error, _FORMS_AGAIN):
                    return error
        raise AssertionError(f"rank {rank} never had the group")

    def start(self):
        return [self.form(rank) for rank in range(4)]

    def form(self, rank: int):
        return self._pool.submit(self._form, rank)

    def formed(self, forming) -> list:
        """The groups of all ranks under one epoch. Who had it before another died asks again."""
        found: list = []

        def whole() -> bool:
            found[:] = []
            for rank, future in enumerate(forming):
                if not future.done():
                    continue
                group, home = future.result(), self._homes[rank]
                assert not isinstance(group, Exception), group
                if state(home) == "READY" and group_of(home).epoch == group.epoch:
                    found.append(group)
                elif state(home) != "FORMING" or group_of(home).epoch != group.epoch:
                    forming[rank] = self.form(rank)
            return len(found) == 4 and len({group.epoch for group in found}) == 1

        eventually(whole, within_s=3 * WAIT_S)
        return found

    def kill(self, rank: int) -> None:
        self._dead.add(self.clients[rank])
        self.clients[rank].process.kill()

    def replace(self, rank: int) -> None:
        self.clients[rank] = self._homes[rank].client(process=True)


_FORMS_AGAIN = (errors.PeerLostError, errors.StaleHandleError, errors.GroupNotReadyError)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_epoch_has_two_views_whatever_dies_while_a_group_forms(three, restarted, pool, seed):
    """Processes and the coordinator die at any moment; whoever is left forms the group."""
    chance = random.Random(seed)
    a, flags, daemons = three()
    job = Job(pool, daemons)
    views: dict[int, list] = {}

    def note(group) -> None:
        if group.epoch:
            assert views.setdefault(group.epoch, members(group)) == members(group)

    for _ in range(8):
        forming = job.start()
        victims = chance.sample(range(4), chance.randrange(3))
        end = time.monotonic() + chance.uniform(0.0, 0.4)
        while time.monotonic() < end:
            for daemon in daemons:
                for item in daemon.ask("ListGroups").groups:
                    note(item.group)
        if chance.random() < 0.5:
            a = restarted(a, *flags)
        for rank in victims:
            job.kill(rank)
        for rank in victims:
            forming[rank].exception(WAIT_S)
            job.replace(rank)
            forming[rank] = job.form(rank)
        for group in job.formed(forming):
            note(group)
        for rank in range(4):  # the next round forms anew
            job.kill(rank)
        for daemon in daemons:
            eventually(lambda daemon=daemon: state(daemon) == "GONE", within_s=TOLD_S)
        for rank in range(4):
            job.replace(rank)
    assert len(views) >= 8


@pytest.fixture
def two(daemon_process):
    """a, which coordinates, and b; each with its flags, for a restart."""
    address = place()
    flags = {
        "a": ["--coordinator", address, "--insecure", "--node", "a"],
        "b": ["--join", address, "--insecure", "--node", "b"],
    }
    daemons = {name: daemon_process(*words) for name, words in flags.items()}
    joined(daemons["b"])
    return daemons, flags


def resumed(client, group, rank: int) -> None:
    """What the client library does after its daemon started again."""
    assert client.resume()
    client.restore(group, ranks=[rank])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_daemon_killed_under_a_view_forms_the_group_all_the_same(two, restarted, pool, name):
    daemons, flags = two
    clients = {node: daemon.client() for node, daemon in daemons.items()}
    made = [
        pool.submit(client.create, spec_of(), ranks=[rank])
        for rank, client in enumerate(clients.values())
    ]
    groups = dict(zip("ab", (future.result(WAIT_S).group for future in made), strict=True))
    other = "b" if name == "a" else "a"
    waiting = pool.submit(clients[other].attached, groups[other])
    eventually(lambda: group_of(daemons[other]).members["ab".index(other)].attached)
    daemons[name] = restarted(daemons[name], *flags[name])
    resumed(clients[name], groups[name], "ab".index(name))
    found = clients[name].attached(groups[name]), waiting.result(WAIT_S)
    assert {group.state for group in found} == {2}
    assert found[0].epoch == found[1].epoch > groups["a"].epoch
    assert members(found[0]) == members(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_daemon_killed_under_a_ready_group_still_tells_of_its_processes(
    two, restarted, pool, name
):
    daemons, flags = two
    clients = {node: daemon.client(process=True) for node, daemon in daemons.items()}
    claims = [(client, [rank]) for rank, client in enumerate(clients.values())]
    groups = all_ready(pool, spec_of(), *claims)
    other = "b" if name == "a" else "a"
    daemons[name] = restarted(daemons[name], *flags[name])
    resumed(clients[name], groups["ab".index(name)], "ab".index(name))
    joined(daemons["b"])
    found = group_of(daemons[name])
    assert (found.state, found.epoch) == (2, groups[0].epoch)
    assert members(found) == members(groups[0])
    clients[name].process.kill()
    eventually(lambda: state(daemons[other]) == "BROKEN", within_s=TOLD_S)


@pytest.mark.slow
def test_a_coordinator_that_hangs_is_as_good_as_away_until_it_goes_on(three, pool):
    a, _, (b, c) = three()
    first, second = b.client(), c.client()
    groups = all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    a.popen.send_signal(signal.SIGSTOP)
    try:
        lost_s = config.NODE_REPORT_INTERVAL_S + config.NODE_RPC_S + 1.0
        eventually(lambda: (link(b), link(c)) == ("LOST", "LOST"), within_s=lost_s)
        assert (state(b), state(c)) == ("READY", "READY")
        waiting = [
            pool.submit(client.ready, spec_of(name="later"), ranks=[rank])
            for rank, client in enumerate((first, second))
        ]
        eventually(lambda: b.group_states().get("later") == "FORMING")
    finally:
        a.popen.send_signal(signal.SIGCONT)
    later = [future.result(2 * WAIT_S) for future in waiting]
    assert later[0].epoch == later[1].epoch > groups[0].epoch
    for daemon in (b, c):
        joined(daemon, within_s=10.0)
