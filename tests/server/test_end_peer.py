"""One process of a job fences and kills another that is stuck."""

from __future__ import annotations

import os
import signal
import socket

import pytest
from harness import eventually
from raw_client import make_spec
from raw_jobs import attached_pair

from ep_runtime import errors
from ep_runtime.v1 import session_service_pb2


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
    assert daemon.used_bytes == used  # and nobody else gets what it may still map


def test_is_for_sessions_of_the_job_alone(daemon):
    ours, other = daemon.client(), daemon.client(process=True, job="other")
    with pytest.raises(errors.PermissionDeniedError, match="is not of job 'job'"):
        end(ours, other.session_id)
    with pytest.raises(errors.InvalidArgumentError, match="cannot end itself"):
        end(ours, ours.session_id)
    assert end(ours, "s-none").pid == 0
    assert daemon.session_state(other.session_id) == "ACTIVE"
