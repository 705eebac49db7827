"""Groups with windows on several nodes: each node has its own ranks' windows."""

from __future__ import annotations

import dataclasses
import mmap
import time

import pytest
from cluster_places import place, plain_tcp
from harness import eventually
from raw_client import WAIT_S, close_fds, make_spec
from spanning import TOLD_S, all_ready, group_of, state
from test_cluster import coordinates, joined, joins

from ep_runtime import board, board_abi, errors
from ep_runtime.v1 import types_pb2


def spec_of(ranks: int = 4, **more):
    return make_spec(ranks=ranks, **{"retain_s": 60.0, **more})


def windows_of(daemon) -> dict[int, str]:
    """Returns the name of each world rank's buffer; -1 is the board."""
    return {buffer.world_rank: buffer.buffer_id for buffer in daemon.ask("ListBuffers").buffers}


def test_every_node_has_the_windows_of_its_own_ranks(nodes, pool):
    a, b = nodes
    first, second, third = a.client(), b.client(), b.client()
    spec = spec_of()
    groups = all_ready(pool, spec, (first, [0, 1]), (second, [2]), (third, [3]))
    assert [group.spec.node_size for group in groups] == [2, 2, 2]
    assert {group.state for group in groups} == {types_pb2.GROUP_STATE_READY}
    assert (sorted(windows_of(a)), sorted(windows_of(b))) == ([-1, 0, 1], [-1, 2, 3])
    for client, group, here in ((first, groups[0], [0, 1]), (third, groups[2], [2, 3])):
        found = client.fetch(group)
        assert [item.world_rank for item, _ in found] == [-1, *here]
        close_fds(found)
    assert [found.world_rank for found in b.ask("ListRanks").ranks] == [2, 3]
    with pytest.raises(errors.InvalidArgumentError, match=r"of \[0, 1\], .* got .2."):
        first.ticket(groups[0], [2])


def test_every_node_has_a_board_of_its_own_ranks(nodes, pool):
    a, b = nodes
    second = b.client()
    groups = all_ready(pool, spec_of(), (a.client(), [0, 1]), (second, [2, 3]))
    where = board.board_layout(dataclasses.replace(spec_of(), node_size=2), [2, 3])
    found = second.fetch(groups[1])
    sizes = [item.bytes for item, _ in found if item.world_rank < 0]
    assert sizes == [groups[1].board_bytes] == [where.board_bytes]
    with mmap.mmap(found[0][1], 0) as mapped:
        record = board_abi.RankRecordStruct.from_buffer(mapped, where.ranks_offset + 128)
        record.state, record.waiting_for, record.rows = board_abi.RankState.WAITING, 0, 7
        record.since_ns = max(1, time.monotonic_ns() - int(30e9))
        del record
        shown = {row.now.world_rank: (row.rows, row.now.waiting_for) for row in tallies(b)}
        assert shown == {2: (0, -1), 3: (7, 0)}
        (late,) = b.status().late_ranks
        assert (late.world_rank, [*late.waiting_ranks]) == (0, [3])
    close_fds(found)


def tallies(daemon):
    return daemon.ask("ListTallies").ranks


@pytest.mark.parametrize(
    ("on_overflow", "wanted"), [("drop", 0), ("error", 2)], ids=["drop", "error"]
)
def test_ep_groups_that_lie_on_one_node_each_keep_to_their_windows(
    nodes, pool, on_overflow, wanted
):
    a, b = nodes
    axes = (("dp", 2), ("ep", 2))
    spec = spec_of(mesh_axes=axes, outer_axes="dp", on_overflow=on_overflow)
    groups = all_ready(pool, spec, (a.client(), [0, 1]), (b.client(), [2, 3]))
    # "error" also ends calls on the other EP group's node.
    assert [group.spec.node_size for group in groups] == [wanted] * 2
    assert (sorted(windows_of(a)), sorted(windows_of(b))) == ([-1, 0, 1], [-1, 2, 3])


def test_device_memory_spans_no_nodes(nodes, pool):
    futures = [
        pool.submit(
            daemon.client().create,
            spec_of(2, transport="nvlink"),
            ranks=[rank],
            uuids=[f"GPU-{rank}"],
        )
        for rank, daemon in enumerate(nodes)
    ]
    wanted = r'nodes \[\'a\', \'b\'\]; choose transport="nccl" or transport="xla"'
    for future in futures:
        with pytest.raises(errors.InvalidArgumentError, match=wanted):
            future.result(WAIT_S)
    assert [state(daemon) for daemon in nodes] == ["GONE", "GONE"]


def test_nobody_but_the_daemons_says_who_shares_windows(nodes):
    with pytest.raises(errors.InvalidArgumentError, match="node_size follows from"):
        nodes[0].client().create(spec_of(node_size=2), ranks=[0])


def test_a_process_that_dies_elsewhere_poisons_the_board_here(nodes, pool):
    a, b = nodes
    first, dying = a.client(process=True), b.client(process=True)
    groups = all_ready(pool, spec_of(2), (first, [0]), (dying, [1]))
    mapped = first.in_parent(groups[0])
    dying.process.kill()
    eventually(lambda: board.read_header(mapped).poison_generation, within_s=TOLD_S)
    header = board.read_header(mapped)
    assert (header.poison_generation, header.poison_rank) == (groups[0].generation, 1)
    assert header.poison_reason is board_abi.PoisonReason.PEER_LOST
    assert state(a) == "BROKEN"


def formed_by(pool, nodes, *ranks: list[int]):
    """Starts processes that claim these ranks of a group of four; returns them and their groups."""
    clients = [daemon.client(process=True) for daemon in nodes]
    return clients, all_ready(pool, spec_of(), *zip(clients, ranks, strict=True))


def test_killed_ranks_form_the_group_again_on_the_same_memory(nodes, pool):
    before: list[list[int]] = []
    epochs = []
    for _ in range(10):
        clients, groups = formed_by(pool, nodes, [0, 1], [2, 3])
        epochs.append(groups[0].epoch)
        files = [client.process.do("inodes") for client in clients]
        assert not before or files == before
        before = files
        clients[len(epochs) % 2].process.kill()
        for daemon in nodes:
            eventually(lambda daemon=daemon: state(daemon) in ("BROKEN", "RETAINED"), within_s=2.0)
        clients[1 - len(epochs) % 2].process.kill()
        for daemon in nodes:
            eventually(lambda daemon=daemon: state(daemon) == "RETAINED", within_s=TOLD_S)
    assert epochs == sorted(set(epochs))
    assert "windows.replaced" not in nodes[0].event_kinds()


@pytest.fixture
def three(start_daemon):
    address = place()
    a = start_daemon(cluster=coordinates(address))
    others = [start_daemon(cluster=joins(address, name)) for name in ("b", "c")]
    for other in others:
        joined(other)
    return a, *others


@pytest.mark.parametrize(
    "again", [([0, 2], [1], [3]), ([0, 1], [2], [3])], ids=["other ranks", "the same ranks"]
)
def test_other_blocks_get_new_memory(three, pool, again):
    a, _, c = three
    clients, _ = formed_by(pool, three[:2], [0, 1], [2, 3])
    files = clients[0].process.do("inodes")
    for client in clients:
        client.process.kill()
    for daemon in three[:2]:
        eventually(lambda daemon=daemon: state(daemon) == "RETAINED", within_s=TOLD_S)
    clients, groups = formed_by(pool, three, *again)
    assert [group.spec.node_size for group in groups] == [1, 1, 1]
    assert not set(clients[0].process.do("inodes")).intersection(files)
    for daemon, ranks in ((a, again[0]), (c, again[2])):  # a thread frees retained memory
        eventually(lambda daemon=daemon, ranks=ranks: set(windows_of(daemon)) == {-1, *ranks})
    (event,) = [e for e in a.ask("ListEvents").events if e.kind == "windows.replaced"]
    assert "or of 2 ranks that share windows, now 1" in event.message


def mapped_by(pool, spec, *claims):
    """Returns groups that every process has mapped but not reported."""
    made = [pool.submit(client.create, spec, ranks=ranks) for client, ranks in claims]
    groups = [future.result(WAIT_S).group for future in made]
    for (client, _), group in zip(claims, groups, strict=True):
        close_fds(client.fetch(group))
    return groups


def test_a_view_given_up_leaves_mapped_windows_alone_where_the_next_has_the_same_blocks(
    nodes, pool
):
    a, b = nodes
    first, dying = a.client(process=True), b.client(process=True)
    groups = mapped_by(pool, spec_of(2), (first, [0]), (dying, [1]))
    waiting = pool.submit(first.attached, groups[0])
    files = first.process.do("inodes")
    dying.process.kill()
    eventually(lambda: group_of(a).epoch == 0, within_s=TOLD_S)
    b.client().ready(spec_of(2), ranks=[1])
    group = waiting.result(WAIT_S)
    assert (group.attempt, group.generation) == (2, groups[0].generation)
    first.fetch(group)
    assert first.process.do("inodes") == files


def test_who_mapped_windows_of_other_blocks_than_the_next_views_creates_again(three, pool):
    a, b, c = three
    first, dying = a.client(), b.client(process=True)
    groups = mapped_by(pool, spec_of(), (first, [0, 1]), (dying, [2, 3]))
    assert groups[0].spec.node_size == 2
    waiting = pool.submit(first.attached, groups[0])
    dying.process.kill()
    eventually(lambda: group_of(a).epoch == 0, within_s=TOLD_S)
    late = [
        pool.submit(daemon.client().create, spec_of(), ranks=[rank])
        for daemon, rank in ((b, 2), (c, 3))
    ]
    with pytest.raises(errors.StaleHandleError, match="create it again"):
        waiting.result(WAIT_S)
    again = pool.submit(first.create, spec_of(), ranks=[0, 1])
    found = [future.result(WAIT_S).group for future in (again, *late)]
    assert [group.spec.node_size for group in found] == [1, 1, 1]
    assert sorted(windows_of(c)) == [-1, 3]


@pytest.fixture
def two(daemon_process):
    """Starts a, the coordinator, and b; returns also b's flags, for a restart."""
    address = place()
    a = daemon_process("--coordinator", address, *plain_tcp(), "--node", "a")
    flags = ["--join", address, *plain_tcp(), "--node", "b"]
    b = daemon_process(*flags)
    joined(b)
    return a, b, flags


@pytest.mark.slow
def test_without_its_journal_a_daemon_keeps_the_memory_for_the_next_time(two, restarted, pool):
    a, b, flags = two
    first, second = a.client(), b.client(process=True)
    groups = all_ready(pool, spec_of(), (first, [0, 1]), (second, [2, 3]))
    files = second.process.do("inodes")
    b.kill()
    (b.directory / "journal").unlink()
    b = restarted(b, *flags, "--recovery-s", "1")
    assert not second.resume()
    answer = second.restore(groups[1], [2, 3], windows=[2, 3])
    assert sorted(answer.wanted_ranks) == [-1, 2, 3]
    assert second.give_back(groups[1]) == (3, [])
    eventually(lambda: state(b) == "BROKEN", within_s=3.0)  # nobody here knows what the others are
    joined(b)
    first.close_group(groups[0])
    again = all_ready(pool, spec_of(), (first, [0, 1]), (second, [2, 3]))
    assert second.process.do("inodes") == files
    assert again[1].spec.node_size == 2
