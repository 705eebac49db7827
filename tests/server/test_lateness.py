"""Finds the ranks that others wait for, from the boards."""

from __future__ import annotations

import random
import time

import pytest
from harness import eventually
from raw_client import make_spec
from written_group import Group

from ep_runtime import board_abi, layer_specs
from ep_runtime_server.groups import lateness


class Board(Group):
    def waits(self, rank: int, waiting_for: int, *, for_s: float, layer_id: int = 0) -> None:
        """Writes that the rank has waited that long; below 0 it is idle."""
        state = board_abi.RankState.IDLE if waiting_for < 0 else board_abi.RankState.WAITING
        # A machine that booted recently has no such time: then since its boot.
        since_ns = max(1, time.monotonic_ns() - int(for_s * 1e9))
        waits = {"state": state, "waiting_for": waiting_for, "since_ns": since_ns}
        self.rank(rank, op=board_abi.OpCode.COMBINE, layer_id=layer_id, handle=1, **waits)


@pytest.fixture
def job(daemon):
    """(client, board of four ranks, id of the layer "moe/0")."""
    client, layer = daemon.client(), layer_specs.LayerSpec("moe/0", top_k=2)
    shown = Board(client, make_spec(ranks=4), layers=[layer])
    yield client, shown, layer_specs.layer_id("moe", "moe/0")
    shown.close()


def late(daemon):
    return [(x.world_rank, list(x.waiting_ranks)) for x in daemon.status().late_ranks]


def test_a_rank_that_others_wait_for_is_named_with_layer_op_and_time(daemon, job):
    client, shown, layer_id = job
    shown.waits(0, 2, for_s=11.0, layer_id=layer_id)
    shown.waits(1, 2, for_s=30.0, layer_id=layer_id)
    shown.waits(3, 2, for_s=1.0, layer_id=layer_id)
    (found,) = daemon.status().late_ranks
    assert (found.world_rank, list(found.waiting_ranks)) == (2, [0, 1, 3])
    assert (found.layer, found.op, found.handle) == ("moe/0", "COMBINE", 1)
    assert (found.group, found.job, found.pid) == ("moe", "job", client.pid)
    assert 30 <= found.since.seconds <= 40
    assert "wait for rank 2" in found.message
    assert "combine of layer 'moe/0'" in found.message
    (group,) = daemon.ask("ListGroups").groups
    assert [x.world_rank for x in group.late_ranks] == [2]


def test_ten_seconds_are_not_late(daemon, job):
    _, shown, _ = job
    shown.waits(0, 2, for_s=8.0)
    assert late(daemon) == []


def test_a_chain_of_waits_ends_at_the_rank_that_nobody_holds_up(daemon, job):
    _, shown, _ = job
    shown.waits(0, 1, for_s=20.0)
    shown.waits(1, 3, for_s=20.0)
    shown.waits(2, 3, for_s=20.0)
    assert late(daemon) == [(3, [0, 1, 2])]


def test_ranks_that_wait_for_each_other_are_both_shown(daemon, job):
    _, shown, _ = job
    shown.waits(0, 1, for_s=20.0)
    shown.waits(1, 0, for_s=20.0)
    assert sorted(late(daemon)) == [(0, [1]), (1, [0])]


def test_becoming_late_and_arriving_are_events(daemon, job):
    _, shown, _ = job
    shown.waits(0, 1, for_s=20.0)
    eventually(lambda: "rank.late" in daemon.event_kinds(), within_s=3.0)
    shown.waits(0, -1, for_s=0.0)
    eventually(lambda: "rank.arrived" in daemon.event_kinds(), within_s=3.0)
    assert daemon.event_kinds().count("rank.late") == 1


@pytest.mark.parametrize("waiting_for", [-7, 0, 4, 1 << 30])
def test_a_record_that_cannot_be_is_not_believed(daemon, job, waiting_for):
    _, shown, _ = job
    shown.waits(0, waiting_for, for_s=20.0)
    assert late(daemon) == []


def test_a_state_that_nobody_knows_does_not_hide_the_daemon(daemon, job):
    _, shown, _ = job
    shown.waits(0, 1, for_s=20.0)
    shown.rank(0, op=77)
    assert late(daemon) == []
    assert len(daemon.ask("ListRanks").ranks) == 4


def slow_ends(waits_for):
    """Like `_ends`, but one rank after another."""
    found = {}
    for rank, first in waits_for.items():
        seen, current = {rank}, first
        while current in waits_for and current not in seen:
            seen.add(current)
            current = waits_for[current]
        found[rank] = first if current in waits_for else current
    return found


def test_ends_of_chains_are_those_of_every_rank_by_itself():
    numbers = random.Random(5)
    for size in range(1, 60):
        waits_for = {
            rank: other
            for rank in range(size)
            if numbers.random() < 0.8 and (other := numbers.randrange(size)) != rank
        }
        assert lateness._ends(waits_for) == slow_ends(waits_for)


def test_the_longest_chain_is_walked_once():
    steps = []

    class Counted(dict):
        def __getitem__(self, key):
            steps.append(key)
            return super().__getitem__(key)

    size = board_abi.MAX_WORLD_RANKS
    ends = lateness._ends(Counted({rank: rank + 1 for rank in range(size)}))
    assert set(ends.values()) == {size}
    assert len(steps) <= 2 * size
