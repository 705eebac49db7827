"""What a board says of ranks' calls, as ListTallies tells it."""

from __future__ import annotations

import mmap
import os

from file_driver import FileDriver
from raw_client import make_spec
from tally_writer import Tally
from written_group import Group

from ep_runtime import layer_specs, wire
from ep_runtime.board_abi import MAX_LOADS, OpCode
from ep_runtime_server.memory.cuda_device import Gpus


def open_group(client, spec, layers, stacks) -> mmap.mmap:
    """The board of a group that a client made and attached to."""
    group = client.create(spec).group
    (item, fd), *rest = client.fetch(group)
    mapped = mmap.mmap(fd, item.bytes)
    for held in [fd, *(fd for _, fd in rest)]:
        os.close(held)
    client.attached(group)
    client.register(group, layers, stacks)
    return mapped


def test_tallies_say_what_ranks_wrote(daemon):
    client = daemon.client()
    spec = make_spec(ranks=4, num_experts=8)
    layers = [layer_specs.LayerSpec("a", top_k=1, in_flight=2)]
    stacks = [wire.LayerStackSpec(layer_specs.LayerSpec("s", top_k=1), MAX_LOADS)]
    mapped = open_group(client, spec, layers, stacks)
    tally = Tally(mapped, spec, 2)
    op = tally.op(OpCode.COMBINE)
    op.calls, op.time_ns, op.wait_ns = 3, 700, 200
    peer = tally.peer(OpCode.COMBINE, 1)
    peer.arrival_ns, peer.wait_ns = 150, 120
    for index in (0, 1, 2, MAX_LOADS - 1):  # the last two of the stack are beyond that
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
