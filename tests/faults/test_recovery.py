"""A daemon that is killed and restarted continues with the state it had."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from harness import Watcher, eventually, memfds_of
from raw_client import make_spec
from raw_jobs import LAYERS, SPEC, come_back, created, ready_pair

from ep_runtime import errors, layer_specs
from ep_runtime.v1 import session_service_pb2
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.journal.file import Journal


def test_groups_layers_handles_and_memory_come_back_as_they_were(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    inodes, before = memfds_of(daemon.pid), daemon.status()
    again = restarted(daemon)
    assert again.status().incarnation != before.incarnation
    answer = come_back(clients, group, layers)
    assert list(answer.wanted_ranks) == []
    assert answer.group.generation == group.generation
    assert answer.group.state == group.state
    assert [m.pid for m in answer.group.members] == [c.pid for c in clients]
    assert memfds_of(again.pid) == inodes
    status = again.status()
    assert (status.num_layers, status.num_handles) == (before.num_layers, before.num_handles)
    assert status.pools[0].leased_bytes == before.pools[0].leased_bytes
    assert status.recovery.adopted_bytes == before.pools[0].leased_bytes
    assert (status.recovery.under_way, status.recovery.lost_bytes) == (False, 0)
    found, _ = clients[1].register(group, LAYERS)
    assert [layer.already_registered for layer in found] == [True] * 3
    assert [layer.handle_base for layer in found] == [layer.handle_base for layer in layers[:3]]
    (more,), _ = clients[0].register(group, [layer_specs.LayerSpec("later", top_k=1)])
    assert more.handle_base == max(layer.handle_base + layer.num_handles for layer in layers)


def test_leaving_a_group_without_memory_leaves_that_of_others(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    without = make_spec("bare", ranks=1, transport="xla")
    for client in clients:
        client.close_group(client.create(without).group)
    again = restarted(daemon)
    assert again.status().recovery.lost_bytes == 0
    answer = come_back(clients, group, layers)
    assert (list(answer.wanted_ranks), answer.group.state) == ([], group.state)


def test_a_generation_is_not_given_twice_though_its_group_is_gone(daemon_process, restarted):
    daemon = daemon_process()
    client = daemon.client(process=True)
    group = client.create(make_spec(ranks=1)).group
    client.close_group(group)
    again = restarted(restarted(daemon))  # the second daemon reads what the first rewrote
    newer = again.client(process=True).create(make_spec(ranks=1)).group
    assert newer.generation > group.generation


def test_a_long_journal_is_written_anew_and_knows_the_same(daemon_process, restarted):
    daemon = daemon_process("--log-level", "error")  # nobody reads the pipe of its log
    clients, group, layers = ready_pair(daemon)
    labels = {str(number): "x" * 250 for number in range(32)}
    sizes = [daemon.status().journal.bytes]

    def grown() -> int:
        short = daemon.client(job=None)
        short.open("job", labels=labels)
        short.goodbye()
        sizes.append(daemon.status().journal.bytes)
        return sizes[-1]

    # At any time: sessions that connect afterwards make the journal grow again.
    eventually(lambda: grown() < sizes[-2], within_s=60.0, what="it is written anew")
    assert sizes[-1] < sizes[-2] / 2
    again = restarted(daemon)
    come_back(clients, group, layers)
    assert (again.status().num_layers, again.status().num_handles) == (7, 10)


def test_registering_one_by_one_does_not_write_all_of_it_again(daemon_process):
    daemon = daemon_process()
    client = daemon.client(process=True)
    group = client.create(make_spec(ranks=1)).group
    sizes = []
    for number in range(60):
        client.register(group, [layer_specs.LayerSpec(f"moe/{number}", top_k=1)])
        sizes.append(daemon.status().journal.bytes)
    first, last = sizes[10] - sizes[9], sizes[59] - sizes[58]
    assert last < 1.1 * first


def test_windows_keep_their_contents(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    assert clients[0].process.do("map") == 3
    written = clients[0].process.do("window_bytes")
    restarted(daemon)
    come_back(clients, group, layers)
    assert clients[0].process.do("window_bytes") == written == [7, 7]
    assert clients[1].process.do("board")[:2] == (group.generation, 0)


def test_a_session_is_suspect_until_its_process_says_something(daemon_process, restarted):
    daemon = daemon_process()
    client = daemon.client(process=True)
    again = restarted(daemon)
    assert again.session_state(client.session_id) == "SUSPECT"
    beat = client.beat()
    assert beat.incarnation == again.status().incarnation
    assert again.session_state(client.session_id) == "ACTIVE"
    assert client.resume()


def test_a_peer_that_died_meanwhile_poisons_the_board_that_comes_back(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    daemon.kill()
    clients[1].process.kill()
    again = restarted(daemon)
    assert clients[0].resume()
    assert clients[0].restore(group, [0], layers).group.state != group.state
    clients[0].give_back(group)
    assert clients[0].process.do("board") == (
        group.generation,
        group.generation,
        "PEER_LOST",
        1,
    )
    assert again.group_states() == {"moe": "BROKEN"}


def test_survivor_and_newcomer_form_again_with_the_same_windows(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    inodes = memfds_of(daemon.pid)
    again = restarted(daemon)
    come_back(clients, group, layers)
    clients[1].process.kill()
    eventually(lambda: again.group_states() == {"moe": "BROKEN"})
    newcomer = again.client(process=True)
    answers = created([clients[0], newcomer])
    assert [answer.reattached for answer in answers] == [True, True]
    assert answers[0].group.generation > group.generation
    assert memfds_of(again.pid) == inodes


def test_memory_that_nobody_holds_is_lost_and_its_group_starts_anew(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, _ = ready_pair(daemon)
    daemon.kill()
    for client in clients:
        client.process.kill()
    again = restarted(daemon)
    eventually(lambda: again.used_bytes == 0)
    status = again.status()
    assert status.recovery.lost_bytes == group.board_bytes + 2 * group.window_bytes
    assert not status.recovery.under_way
    assert status.num_layers == 7  # the group is retained; its memory is not
    client = again.client()
    answer = client.create(SPEC)
    assert not answer.reattached
    assert answer.group.generation > group.generation


def test_bytes_of_a_silent_process_are_not_given_to_others(daemon_process, restarted):
    daemon = daemon_process("--max-host-bytes", str(64 << 20))
    clients, group, _ = ready_pair(daemon)
    held = daemon.used_bytes
    again = restarted(daemon, "--max-host-bytes", str(held + 4096), "--recovery-s", "0.3")
    eventually(lambda: not again.status().recovery.under_way, what="the window ends")
    assert again.used_bytes == held
    other = again.client()
    with pytest.raises(errors.PoolExhaustedError):
        other.create(make_spec("other", ranks=1))
    with pytest.raises(errors.GroupBusyError):
        other.create(SPEC)
    assert clients[0].resume()  # late, but its memory is still there
    clients[0].restore(group, [0])
    assert clients[0].give_back(group)[1] == []
    clients[0].process.kill()
    clients[1].process.kill()
    eventually(lambda: again.status().num_sessions == 1)
    assert again.status().pools[0].quarantined_bytes == 0


@pytest.mark.parametrize("stopped_s", [0.0, pytest.param(12.0, marks=pytest.mark.slow)])
def test_a_stopped_process_finds_its_memory_when_it_goes_on(daemon_process, restarted, stopped_s):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    os.kill(clients[0].pid, signal.SIGSTOP)
    try:
        again = restarted(daemon, "--recovery-s", "0.2")
        clients[1].resume()
        clients[1].restore(group, [1], layers)
        eventually(lambda: not again.status().recovery.under_way)
        threading.Event().wait(stopped_s)
        assert again.session_state(clients[0].session_id) == "SUSPECT"
        assert again.group_states() == {"moe": "READY"}
        with pytest.raises(errors.GroupBusyError):
            again.client().create(SPEC)
    finally:
        os.kill(clients[0].pid, signal.SIGCONT)
    assert come_back(clients, group, layers).group.generation == group.generation
    assert again.session_state(clients[0].session_id) == "ACTIVE"


def test_a_lower_limit_takes_nothing_from_who_has_it(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    held = daemon.used_bytes
    again = restarted(daemon, "--max-host-bytes", str(held // 2))
    assert come_back(clients, group, layers).group.state == group.state
    assert again.used_bytes == held


def test_claims_wait_while_the_daemon_recovers_and_reading_does_not(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    again = restarted(daemon)
    status = again.status()
    assert status.state == session_service_pb2.SERVER_STATE_RECOVERING
    assert status.recovery.num_awaited == 2
    assert not again.healthy()
    other = again.client()
    with pytest.raises(errors.RuntimeUnavailableError, match="started again"):
        other.create(make_spec("other", ranks=1), wait_s=0.1)
    (listed,) = again.ask("ListGroups").groups
    assert list(listed.wanted_ranks) == [-1, 0, 1]
    waiting = other.groups.CreateGroup.future(
        other.create_request(make_spec("other", ranks=1)), **other.how()
    )
    come_back(clients, group, layers)
    assert waiting.result().group.generation > group.generation
    eventually(again.healthy)


def test_survivors_hear_who_was_lost(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    restarted(daemon)
    come_back(clients, group, layers)
    watcher = Watcher(clients[0])
    started = time.monotonic()
    clients[1].process.kill()
    eventually(lambda: "group" in watcher.kinds(), within_s=1.0)
    assert time.monotonic() - started < 1.0
    (event,) = [e.group for e in watcher.events if e.WhichOneof("event") == "group"]
    assert [(m.world_rank, m.pid) for m in event.lost_members] == [(1, clients[1].pid)]
    assert clients[0].process.do("board")[1:] == (group.generation, "PEER_LOST", 1)


@pytest.mark.doses(ci=2, full=50)
def test_a_daemon_that_is_replaced_in_good_order_costs_no_more_than_a_kill(
    daemon_process, restarted, dose
):
    daemon = daemon_process("--drain-s", "0")
    clients, group, layers = ready_pair(daemon)
    used, memory = daemon.used_bytes, memfds_of(daemon.pid)
    for _ in range(dose):
        daemon.popen.terminate()
        assert daemon.ended()[0] == 0
        daemon = restarted(daemon, "--drain-s", "0")
        assert come_back(clients, group, layers).group.generation == group.generation
        assert daemon.group_states() == {"moe": "READY"}
        assert (daemon.used_bytes, memfds_of(daemon.pid)) == (used, memory)
        assert clients[0].process.do("board")[1] == 0


@pytest.mark.parametrize("kind", ["session/", "windows/", "group/", "layers/"])
def test_facts_that_cannot_be_read_do_not_stop_the_daemon(daemon_process, restarted, kind):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    held = daemon.used_bytes
    daemon.kill()
    journal = Journal(daemon.directory / "journal", Failpoints())
    facts = journal.take_facts()
    assert any(key.startswith(kind) for key in facts)
    journal.compact({k: {"new": 1} if k.startswith(kind) else v for k, v in facts.items()})
    journal.close()
    again = restarted(daemon)
    assert "journal.unreadable" in again.event_kinds()
    for rank, client in enumerate(clients):  # processes report what the daemon does not know
        client.resume()
        if client.restore(group, [rank], layers).wanted_ranks:
            client.give_back(group)
    assert again.group_states() == {"moe": "READY"}
    assert again.status().num_handles == 10
    eventually(lambda: again.used_bytes == held)


def test_a_fenced_session_stays_fenced(daemon_process, restarted):
    daemon = daemon_process()
    client = daemon.client(process=True)
    client.fetch(client.create(make_spec(ranks=1)).group)
    daemon.ask("Fence", session_id=client.session_id)
    restarted(daemon)
    with pytest.raises(errors.SessionFencedError):
        client.resume()


def test_a_token_is_no_use_to_another_process(daemon_process, restarted):
    daemon = daemon_process()
    client = daemon.client(process=True)
    again = restarted(daemon)
    thief = again.process()
    with pytest.raises(errors.PermissionDeniedError):
        thief.do("resume", again.directory, client.token)


def test_the_journal_holds_no_token_and_is_ours_alone(daemon_process):
    daemon = daemon_process()
    client = daemon.client()
    path = daemon.directory / "journal"
    assert client.session_id.encode() in path.read_bytes()
    assert client.token.encode() not in path.read_bytes()
    assert os.stat(path).st_mode & 0o777 == 0o600
