"""Orders to reclaim, fence and end: the memory of a live process is never given away."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket

import pytest
from harness import Watcher, eventually
from raw_client import close_fds, make_spec
from raw_jobs import attached_pair

from ep_runtime import board, board_abi, errors, layer_specs
from ep_runtime.v1 import session_service_pb2, types_pb2


class TestReclaim:
    def test_of_a_live_group_poisons_it_and_waits_for_its_process(self, daemon):
        client = daemon.client(process=True)
        group = client.ready(make_spec())
        watcher = Watcher(client)
        answer = daemon.ask("Reclaim", name="moe")
        assert (list(answer.groups), answer.freed_bytes) == (["moe"], 0)
        assert answer.quarantined_bytes == daemon.used_bytes > 0
        eventually(lambda: watcher.kinds() == ["group"])
        assert watcher.events[0].group.state == types_pb2.GROUP_STATE_CLOSED
        who = f"by uid {os.getuid()} (pid {os.getpid()}) with ep-runtime reclaim"
        who += f" on host {socket.gethostname()}"
        assert watcher.events[0].group.reason == f"was reclaimed {who}"
        (told,) = [item for item in daemon.ask("ListEvents").events if item.kind == "group.closed"]
        assert who in told.message
        fields = json.loads(told.fields_json)
        assert (fields["by_pid"], fields["command"]) == (os.getpid(), "ep-runtime reclaim")
        with pytest.raises(errors.StaleHandleError):
            client.register(group, [layer_specs.LayerSpec("a", top_k=1)])
        client.process.kill()
        eventually(lambda: daemon.used_bytes == 0)

    def test_poisons_the_board_that_the_client_maps(self, daemon):
        client = daemon.client()
        group = client.create(make_spec()).group
        found = client.fetch(group)
        with mmap.mmap(found[0][1], found[0][0].bytes) as mapped:
            daemon.ask("Reclaim", name="moe", job="job", uid=os.getuid())
            header = board.read_header(mapped)
            assert header.poison_generation == header.generation == group.generation
            assert header.poison_reason is board_abi.PoisonReason.RECLAIMED
            note = f" on host {socket.gethostname()}"
            assert header.poison_by == board.By(os.getuid(), os.getpid(), note)
        close_fds(found)

    def test_of_retained_groups_frees_at_once(self, daemon):
        client = daemon.client(process=True)
        client.ready(make_spec(retain_s=60.0))
        daemon.client().ready(make_spec("live"))
        client.process.kill()
        eventually(lambda: daemon.group_states().get("moe") == "RETAINED")
        answer = daemon.ask("Reclaim", all_retained=True)
        assert (list(answer.groups), answer.quarantined_bytes) == (["moe"], 0)
        assert answer.freed_bytes > 0
        assert daemon.group_states() == {"live": "READY"}
        assert list(daemon.ask("Reclaim", all_retained=True).groups) == []

    def test_needs_exactly_one_group(self, daemon):
        daemon.client().create(make_spec())
        daemon.client(job="other").create(make_spec())
        with pytest.raises(errors.InvalidArgumentError, match="2 groups are named 'moe'; give job"):
            daemon.ask("Reclaim", name="moe")
        with pytest.raises(errors.InvalidArgumentError, match="0 groups"):
            daemon.ask("Reclaim", name="none")
        with pytest.raises(errors.InvalidArgumentError, match="not both"):
            daemon.ask("Reclaim")


def test_every_order_is_in_the_audit_file_also_one_that_was_refused(daemon):
    client = daemon.client()
    client.ready(make_spec())
    with pytest.raises(errors.InvalidArgumentError):
        daemon.ask("Reclaim", name="none")
    daemon.ask("Fence", session_id=client.session_id, reason="drill\n")
    daemon.ask("Drain")
    file = daemon.directory / "audit"
    eventually(lambda: file.exists() and file.read_text().count("\n") == 3)
    reclaim, fence, drain = map(json.loads, file.read_text().splitlines())
    assert (drain["shutdown"], "deadline_s" in drain) == (False, False)  # no session ends then
    assert file.stat().st_mode & 0o777 == 0o600
    assert (reclaim["command"], reclaim["group"]) == ("ep-runtime reclaim", "none")
    assert (fence["command"], fence["session"]) == ("ep-runtime fence", client.session_id)
    assert fence["reason"].startswith("drill")
    by = ("by_uid", "by_pid", "by_host")
    assert {tuple(one[key] for key in by) for one in (reclaim, fence)} == {
        (os.getuid(), os.getpid(), socket.gethostname())
    }


def test_a_note_is_cut_to_whole_characters_of_what_a_board_holds():
    buf = bytearray(board.board_bytes(make_spec()))
    board.format_board(buf, board.board_layout(make_spec()), 1)
    board.poison(
        buf, 1, board_abi.PoisonReason.FENCED, by=board.By(1, 2, " on host a: " + "é" * 60)
    )
    note = board.read_header(buf).poison_by.note
    assert note.startswith(" on host a: éé")
    assert note.endswith("é...")
    assert len(note.encode()) <= 79


def test_quarantine_ends_with_the_last_of_several_processes(daemon):
    first, second = daemon.client(process=True), daemon.client(process=True)
    attached_pair([first, second], make_spec())
    quarantined = daemon.ask("Reclaim", name="moe").quarantined_bytes
    first.process.kill()
    eventually(lambda: daemon.session_state(first.session_id) == "DEAD")
    assert daemon.status().pools[0].quarantined_bytes == quarantined > 0
    second.process.kill()
    eventually(lambda: daemon.used_bytes == 0)


def test_memory_that_a_fenced_process_maps_is_not_used_again(daemon):
    spec = make_spec(retain_s=60.0)
    first, fenced, third = (daemon.client(process=True) for _ in range(3))
    attached_pair([first, fenced], spec)
    daemon.ask("Fence", session_id=fenced.session_id)
    assert daemon.group_states() == {"moe": "BROKEN"}
    (info,) = daemon.ask("ListGroups").groups
    assert info.poison_reason == "FENCED"
    attached_pair([first, third], spec)
    (pool,) = daemon.status().pools
    assert pool.quarantined_bytes == pool.leased_bytes > 0
    fenced.process.kill()
    eventually(lambda: daemon.status().pools[0].quarantined_bytes == 0)
    assert daemon.status().pools[0].leased_bytes > 0


def test_a_fence_quarantines_until_the_process_is_gone(daemon):
    client = daemon.client(process=True)
    client.ready(make_spec(retain_s=60.0))
    daemon.ask("Fence", session_id=client.session_id)
    assert daemon.group_states() == {}
    (pool,) = daemon.status().pools
    assert pool.quarantined_bytes > 0
    (buffer, *_) = daemon.ask("ListBuffers").buffers
    assert list(buffer.mapped_by) == [client.pid]
    client.process.kill()
    eventually(lambda: daemon.used_bytes == 0)


def end(client, session_id):
    request = session_service_pb2.EndPeerRequest(session_id=session_id, reason="it is stuck")
    return client.call(client.sessions.EndPeer, request)


def test_fences_and_kills_a_process_of_the_job(daemon):
    ours, peer = daemon.client(), daemon.client(process=True)
    attached_pair([ours, peer], make_spec())
    answer = end(ours, peer.session_id)
    assert (answer.pid, answer.killed) == (peer.pid, True)
    eventually(lambda: daemon.session_state(peer.session_id) == "DEAD")
    assert daemon.group_states() == {"moe": "BROKEN"}
    (info,) = daemon.ask("ListGroups").groups
    assert info.poison_reason == "FENCED"
    events = daemon.ask("ListEvents").events
    (told,) = [item.message for item in events if item.kind == "session.fenced"]
    assert f"process {peer.pid} was fenced by uid {os.getuid()} (pid {os.getpid()})" in told
    assert told.endswith("with ep.distributed on host " + socket.gethostname() + ": it is stuck")
    assert end(ours, peer.session_id).pid == 0


def test_a_process_that_may_not_be_killed_wakes_up_fenced(daemon, monkeypatch):
    def denied(pidfd, number):
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", denied)
    ours, peer = daemon.client(), daemon.client(process=True)
    attached_pair([ours, peer], make_spec())
    group = peer.create(make_spec(), [1]).group
    peer.fetch(group)
    used = daemon.used_bytes
    os.kill(peer.pid, signal.SIGSTOP)
    try:
        answer = end(ours, peer.session_id)
        assert (answer.pid, answer.killed) == (peer.pid, False)
    finally:
        os.kill(peer.pid, signal.SIGCONT)
    with pytest.raises(errors.SessionFencedError, match="was fenced"):
        peer.beat()
    assert peer.process.do("board")[1] != 0  # its calls end
    assert daemon.used_bytes == used  # and no other process gets memory that it may still map


def test_is_for_sessions_of_the_job_alone(daemon):
    ours, other = daemon.client(), daemon.client(process=True, job="other")
    with pytest.raises(errors.PermissionDeniedError, match="is not of job 'job'"):
        end(ours, other.session_id)
    for own in (ours, daemon.client()):
        with pytest.raises(errors.InvalidArgumentError, match="cannot end its own process"):
            end(ours, own.session_id)
    assert end(ours, "s-none").pid == 0
    assert daemon.session_state(other.session_id) == "ACTIVE"
