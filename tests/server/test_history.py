"""Lists of the past look like those of the present, within bounds; tallies hold
what ranks wrote.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest
from file_driver import FileDriver
from harness import FakeClock
from raw_client import WAIT_S, make_spec
from tally_writer import Tally
from written_group import Group

from ep_runtime import layer_specs, wire
from ep_runtime.board_abi import MAX_LOADS, OpCode
from ep_runtime_server.groups import history
from ep_runtime_server.memory.cuda_device import Gpus


@pytest.fixture
def gpus(start_daemon, monkeypatch):
    """A daemon with files as GPU memory, which copies boards when a test asks for it."""
    monkeypatch.setattr(history, "SAMPLE_EVERY_S", 3600.0)
    driver = FileDriver(gpu_bytes=1 << 30)
    return start_daemon(gpus=Gpus(load=lambda: driver), clock=FakeClock())


class Job:
    """A group on two GPUs; a test writes its numbers."""

    def __init__(self, daemon, name: str = "moe", layers: int = 2) -> None:
        self._daemon = daemon
        self._names = [layer_specs.LayerSpec(f"layer{i}", top_k=2) for i in range(layers)]
        self.spec = make_spec(name, transport="nvlink")
        self.client = daemon.client()
        self.group = Group(self.client, self.spec, layers=self._names)

    def write(self, steps: int) -> None:
        for index in range(len(self._names)):
            self.group.handle(index, calls=steps, rounds=steps)
            for rank in range(2):
                self.group.rows(rank, index, 10 * steps, dropped_rows=steps)
                tally = Tally(self.group.map, self.spec, rank)
                load, rows = tally.load(index)
                load.tokens, rows[1] = 8 * steps, (1 + rank) * steps
                tally.op(OpCode.COMBINE).calls = steps
        for rank in range(2):
            self.group.rank(rank, calls=steps, rows=10 * steps)

    def at(self, age_s: float | None):
        """Returns the lists of rank 1 and of the first handle from that long ago."""
        age = {"age": wire.duration(age_s)} if age_s is not None else {}
        ranks = self._daemon.ask("ListTallies", group=self.spec.name, **age).ranks
        handles = self._daemon.ask("ListHandles", group=self.spec.name, **age).handles
        return (ranks[1], handles[0]) if ranks else None


def look(daemon) -> None:
    made = daemon._daemon.runtime.history.copy_boards()
    asyncio.run_coroutine_threadsafe(made, daemon._loop).result(WAIT_S)


def kept(daemon) -> list[list[history.BoardCopy]]:
    return [*daemon._daemon.runtime.history._samples.values()]


def test_what_was_is_told_as_what_is(gpus) -> None:
    job = Job(gpus)
    assert job.at(100.0) is None
    for steps in (1, 2, 3):
        job.write(steps)
        look(gpus)
        gpus.clock.now_s += 10
    job.write(9)
    for age_s, steps, seconds_ago in [
        (None, 9, 0),
        (10.0, 3, 10),
        (15.0, 2, 20),
        (20.0, 2, 20),
        (30.0, 1, 30),
        (4000.0, 1, 30),
    ]:
        rank, handle = job.at(age_s)
        assert (rank.calls, rank.rows) == (steps, 10 * steps)
        assert wire.seconds(rank.read) == pytest.approx(gpus.clock.now_s - seconds_ago)
        assert [op.calls for op in rank.ops] == [steps]
        assert [layer.layer for layer in rank.layers] == ["layer0", "layer1"]
        assert [*rank.layers[1].rows][1] == 2 * steps
        assert (handle.calls, handle.rounds) == (steps, steps)
        assert (handle.rows, handle.dropped_rows) == (20 * steps, 2 * steps)


def test_a_board_that_stands_still_is_copied_once(gpus) -> None:
    job = Job(gpus)
    job.write(1)
    for _ in range(100):
        look(gpus)
        gpus.clock.now_s += 10
    (samples,) = kept(gpus)
    assert len(samples) == 1
    rank, _ = job.at(500.0)
    assert wire.seconds(rank.read) == pytest.approx(gpus.clock.now_s - 500)


def test_old_ones_are_fewer_and_then_gone(gpus) -> None:
    job, started_s = Job(gpus), gpus.clock.now_s
    for steps in range(1, 1000):
        job.write(steps)
        look(gpus)
        gpus.clock.now_s += 10
    (samples,) = kept(gpus)
    ages = [gpus.clock.now_s - sample.taken_s for sample in samples]
    assert len([age for age in ages if age <= 120]) in (11, 12)
    assert max(ages) == pytest.approx(7200, abs=70)
    gaps = {round(a - b) for a, b in zip(ages, ages[1:], strict=False)}
    assert gaps <= {10, 20, 30, 40, 50, 60}
    assert len(samples) < 140
    for age_s in (50, 1000, 5000):
        rank, _ = job.at(age_s)
        told_s = wire.seconds(rank.read)
        assert -1e-6 <= gpus.clock.now_s - age_s - told_s <= 60
        assert rank.calls == round((told_s - started_s) / 10) + 1


def test_who_has_most_loses_his_oldest(gpus, monkeypatch) -> None:
    small, large = Job(gpus, "small", layers=1), Job(gpus, "large", layers=40)
    for job in (small, large):
        job.write(1)
    look(gpus)
    monkeypatch.setattr(history, "MOST_BYTES", 3 * gpus._daemon.runtime.history.size_bytes)
    for steps in range(2, 12):
        gpus.clock.now_s += 10
        for job in (small, large):
            job.write(steps)
        look(gpus)
        assert gpus._daemon.runtime.history.size_bytes <= history.MOST_BYTES
    assert small.at(10.0)[0].calls == large.at(10.0)[0].calls == 10
    assert large.at(1000.0)[0].calls > 1


def test_another_generation_begins_anew(gpus) -> None:
    job = Job(gpus)
    job.write(5)
    look(gpus)
    runtime = gpus._daemon.runtime
    (group,) = runtime.groups.all()
    assert runtime.history.back(0.0)(group) is not None
    group.generation += 1
    try:
        assert runtime.history.back(0.0)(group) is None
    finally:
        group.generation -= 1
    job.group.close()
    look(gpus)
    assert kept(gpus) == []


def test_a_board_that_a_client_wrecked_is_copied_and_told(gpus) -> None:
    job = Job(gpus)
    for byte in (b"\xff", os.urandom(1)):
        job.group.map[:] = byte * len(job.group.map)
        look(gpus)
        gpus.clock.now_s += 10
    assert job.at(10.0) is not None
    assert "task.failed" not in gpus.event_kinds()


def test_a_board_that_would_hold_the_loop_is_not_copied(gpus, monkeypatch) -> None:
    job = Job(gpus)
    monkeypatch.setattr(history, "MOST_RAW_BYTES", 1000)
    look(gpus)
    assert job.at(0.0) is None


def test_a_copy_of_a_large_group_is_small_and_quick(gpus) -> None:
    """64 ranks and 60 layers with 256 experts: time of the loop's thread, and memory."""
    axes = {"mesh_axes": (("dp", 2), ("ep", 32)), "outer_axes": "dp"}
    spec = make_spec("large", num_experts=256, transport="nvlink", **axes)
    stack = wire.LayerStackSpec(layer_specs.LayerSpec("s", top_k=2), 60)
    group = Group(gpus.client(), spec, stacks=[stack])
    for rank in range(64):
        tally = Tally(group.map, spec, rank)
        for layer in range(60):
            load, rows = tally.load(layer)
            load.calls, load.time_ns, load.wait_ns, load.tokens = 10**6, 10**12, 10**10, 10**9
            rows[:] = [int.from_bytes(os.urandom(4), "little") for _ in rows]
    look(gpus)
    runtime = gpus._daemon.runtime
    assert runtime.history.size_bytes < 400_000
    (record,) = runtime.groups.all()
    started_s = time.thread_time()
    raw = b"".join(record.windows.board[p] for p in history.parts(record.windows.layout, 60))
    took_s = time.thread_time() - started_s
    assert took_s < 0.04
    sys.stdout.write(
        f"\n{len(raw)} bytes of a board copied in {1000 * took_s:.2f} ms, kept as "
        f"{runtime.history.size_bytes}\n"
    )


def test_tallies_say_what_ranks_wrote(daemon):
    client = daemon.client()
    spec = make_spec(ranks=4, num_experts=8)
    layers = [layer_specs.LayerSpec("a", top_k=1, in_flight=2)]
    stacks = [wire.LayerStackSpec(layer_specs.LayerSpec("s", top_k=1), MAX_LOADS)]
    tally = Tally(Group(client, spec, layers=layers, stacks=stacks).map, spec, 2)
    op = tally.op(OpCode.COMBINE)
    op.calls, op.time_ns, op.wait_ns = 3, 700, 200
    peer = tally.peer(OpCode.COMBINE, 1)
    peer.arrival_ns, peer.wait_ns = 150, 120
    for index in (0, 1, 2, MAX_LOADS - 1):  # the last two layers of the stack are beyond that
        load, rows = tally.load(index)
        load.calls, load.time_ns, load.wait_ns, load.tokens = 1, 20, 10, 5
        rows[1] = 7
    found = daemon.ask("ListTallies").ranks
    assert [rank.world_rank for rank in found] == [0, 1, 2, 3]
    assert not any(rank.ops or rank.layers for rank in found if rank.world_rank != 2)
    rank = found[2]
    assert (rank.device, rank.first_expert, rank.now.world_rank) == ("host", 4, 2)
    assert rank.row_bytes == spec.hidden_size * 2
    (combine,) = rank.ops
    assert (combine.op, combine.calls, combine.time_ns, combine.wait_ns) == ("COMBINE", 3, 700, 200)
    assert [(p.world_rank, p.arrival_ns, p.wait_ns) for p in combine.peers] == [
        (0, 0, 0),
        (1, 150, 120),
        (2, 0, 0),
        (3, 0, 0),
    ]
    a, first, last = rank.layers
    assert (a.layer, a.calls, a.time_ns, a.wait_ns, a.tokens) == ("a", 2, 40, 20, 10)
    assert (first.layer, first.calls, [*first.rows]) == ("s[0]", 1, [0, 7])
    assert (last.layer, last.tokens) == (f"s[{MAX_LOADS - 3}]", 5)
    assert [*a.rows] == [0, 14]
    assert rank.read.ToSeconds() > 0


def test_an_idle_rank_is_in_no_op_whatever_it_did_last(start_daemon):
    driver = FileDriver(gpu_bytes=1 << 30)
    daemon = start_daemon(gpus=Gpus(load=lambda: driver))
    client, layer = daemon.client(), layer_specs.LayerSpec("a", top_k=1)
    group = Group(client, make_spec(transport="nvlink"), layers=[layer])
    (registered,), _ = client.register(group.made, [layer])
    group.rank(1, op=OpCode.COMBINE, layer_id=registered.base_id, progress_ns=1)
    try:
        for rank in daemon.ask("ListRanks").ranks:
            assert (rank.state, rank.op, rank.layer, rank.handle) == ("IDLE", "", "", -1)
            assert not rank.HasField("since")
    finally:
        group.close()


def test_a_group_without_a_board_has_no_tallies(daemon):
    client = daemon.client()
    client.create(make_spec("plain", transport="xla"))
    assert not daemon.ask("ListTallies", group="plain").ranks
