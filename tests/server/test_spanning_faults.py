"""Daemons and processes that die while a group forms over nodes, or after."""

from __future__ import annotations

import random
import time

import pytest
from cluster_places import place, plain_tcp
from harness import eventually
from raw_client import WAIT_S
from spanning import TOLD_S, all_ready, group_of, members, one_each, spec_of, state
from test_cluster import joined

from ep_runtime import errors


@pytest.fixture
def three(daemon_process):
    """three(*switches): a coordinates and has no ranks; b and c join."""

    def start(*switches: str):
        address = place()
        flags = ["--coordinator", address, *plain_tcp(), "--node", "a"]
        testing = [word for switch in switches for word in ("--testing", switch)]
        a = daemon_process(*flags, *testing)
        others = [
            daemon_process("--join", address, *plain_tcp(), "--node", name) for name in ("b", "c")
        ]
        for other in others:
            joined(other)
        return a, flags, others

    return start


# Records that the coordinator writes: its two ids, its first epoch, two nodes, then the view's
# epoch and the decision.
_DECISION = 7


def test_a_process_that_dies_while_nobody_knows_the_decision_is_not_forgotten(
    three, restarted, pool
):
    a, flags, (b, c) = three(f"failpoint:cluster.after_write=kill:{_DECISION}")
    dying = c.client(process=True)
    futures = one_each(pool, b.client(), dying)
    assert a.ended(within_s=5.0)[0] == -9  # the view is committed, but no node knows it
    dying.process.kill()
    eventually(lambda: state(c) != "FORMING", within_s=TOLD_S)
    eventually(lambda: list(group_of(b).members)[1].node == "c")
    restarted(a, *flags)
    with pytest.raises(errors.PeerLostError, match="rank 1 is gone"):
        futures[0].result(WAIT_S)
    assert state(b) == "BROKEN"
    assert futures[1].exception(WAIT_S) is not None


def test_a_daemon_that_ends_before_it_hears_the_decision_tells_the_others_when_it_is_back(
    three, restarted, pool
):
    a, flags, (b, c) = three(f"failpoint:cluster.after_write=kill:{_DECISION}")
    futures = one_each(pool, b.client(), c.client(process=True))
    assert a.ended(within_s=5.0)[0] == -9  # the view is committed, but no node knows it
    c.kill()
    assert futures[1].exception(WAIT_S) is not None
    restarted(c, "--join", flags[1], *plain_tcp(), "--node", "c")
    restarted(a, *flags)
    futures[0].exception(WAIT_S)  # it may be READY for a moment
    eventually(lambda: state(b) == "BROKEN", within_s=WAIT_S)


def test_a_running_group_does_not_need_the_coordinator(three, restarted, pool):
    a, flags, (b, c) = three()
    first, dying = b.client(), c.client(process=True)
    groups = all_ready(pool, spec_of(), (first, [0]), (dying, [1]))
    a.kill()
    assert (state(b), state(c)) == ("READY", "READY")
    dying.process.kill()
    eventually(lambda: state(b) == "BROKEN", within_s=TOLD_S)  # from node to node
    waiting = one_each(pool, first, c.client())
    a = restarted(a, *flags)
    again = [future.result(WAIT_S) for future in waiting]
    assert again[0].epoch == again[1].epoch > groups[0].epoch


@pytest.mark.parametrize("retain_s", [0.0, 60.0])
def test_a_process_that_dies_while_its_daemon_is_away_is_told_by_the_next(
    three, restarted, pool, retain_s
):
    _, flags, (b, c) = three()
    dying = c.client(process=True)
    all_ready(pool, spec_of(retain_s=retain_s), (b.client(), [0]), (dying, [1]))
    c.kill()
    dying.process.kill()
    assert state(b) == "READY"
    restarted(c, "--join", flags[1], *plain_tcp(), "--node", "c")
    eventually(lambda: state(b) == "BROKEN", within_s=WAIT_S)


def test_an_end_that_nobody_was_there_to_hear_is_told_by_the_next_daemon(three, restarted, pool):
    _, flags, (b, c) = three()
    dying = c.client(process=True)
    all_ready(pool, spec_of(), (b.client(), [0]), (dying, [1]))
    b.kill()
    dying.process.kill()
    eventually(lambda: state(c) == "GONE")  # so nothing of it is in c's journal
    c.kill()
    joins = ("--join", flags[1], *plain_tcp(), "--node")
    b = restarted(b, *joins, "b")
    assert state(b) == "READY"
    restarted(c, *joins, "c")
    eventually(lambda: state(b) == "BROKEN", within_s=WAIT_S)


class Job:
    """Two ranks on b, two on c; each is a process that creates the group until it has it."""

    def __init__(self, pool, daemons, spec) -> None:
        self._pool = pool
        self._spec = spec
        self._homes = [daemons[rank // 2] for rank in range(4)]
        self.clients = [home.client(process=True) for home in self._homes]
        self._dead: set = set()

    def _form(self, rank: int):
        """A process that loses a peer while it forms the group retries, as a job's does."""
        client = self.clients[rank]
        for _ in range(20):
            try:
                return client.ready(self._spec, ranks=[rank])
            except errors.EpRuntimeError as error:
                if client in self._dead or not isinstance(error, _FORMS_AGAIN):
                    return error
        raise AssertionError(f"rank {rank} never had the group")

    def start(self):
        return [self.form(rank) for rank in range(4)]

    def form(self, rank: int):
        return self._pool.submit(self._form, rank)

    def formed(self, forming) -> list:
        """Returns the groups of all ranks, under one epoch. A rank whose peer died
        later retries.
        """
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
@pytest.mark.parametrize(
    ("seed", "transport"), [(0, "xla"), (1, "xla"), (2, "xla"), (3, "memfd"), (4, "memfd")]
)
@pytest.mark.doses(ci=0, full=100)
def test_no_epoch_has_two_views_whatever_dies_while_a_group_forms(
    three, restarted, pool, seed, transport, dose
):
    """Processes and the coordinator die at any moment; the survivors form the group."""
    chance = random.Random(seed)
    a, flags, daemons = three()
    job = Job(pool, daemons, spec_of(4, transport=transport))
    views: dict[int, list] = {}

    def note(group) -> None:
        if group.epoch:
            assert views.setdefault(group.epoch, members(group)) == members(group)

    for _ in range(dose):
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
        for rank in range(4):  # the next round forms the group again
            job.kill(rank)
        for daemon in daemons:
            eventually(lambda daemon=daemon: state(daemon) == "GONE", within_s=TOLD_S)
        for rank in range(4):
            job.replace(rank)
    assert len(views) >= dose


def test_a_fault_of_ours_while_nodes_join_ends_the_wait_of_everybody(nodes, pool, monkeypatch):
    a, _ = nodes

    async def fails(*arguments):
        raise OverflowError("as protobuf has it")

    monkeypatch.setattr(a._daemon.runtime.cluster.coordination, "join", fails)
    with pytest.raises(errors.EpRuntimeError, match="could not form group moe"):
        a.client().create(spec_of(2), ranks=[0], wait_s=WAIT_S)
    assert "task.failed" in a.event_kinds()
    assert a.group_states() == {}
