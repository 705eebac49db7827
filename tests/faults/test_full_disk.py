"""A disk that is full: what runs goes on, nothing new is admitted, and it heals by itself."""

from __future__ import annotations

import pytest
from harness import eventually
from raw_client import make_spec
from raw_jobs import SPEC, come_back, ready_pair

from ep_runtime import errors, layer_specs

# Every attempt to get space fails, as often as the case says; the daemon tries every second.
FULL_AFTER_START = "failpoint:journal.before_write=enospc:1"


def test_a_failed_write_refuses_what_is_new_and_is_made_good(daemon_process):
    daemon = daemon_process("--testing", FULL_AFTER_START)
    with pytest.raises(errors.PoolExhaustedError, match="journal"):
        daemon.client(process=True)
    assert "No space left" in daemon.status().journal.error
    eventually(lambda: daemon.status().journal.error == "", within_s=3.0)
    client = daemon.client(process=True)
    client.fetch(client.create(make_spec(ranks=1)).group)
    kinds = daemon.event_kinds()
    assert kinds.index("journal.failed") < kinds.index("journal.written")


@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_disk_that_is_full_from_the_restart_on_disturbs_no_job(daemon_process, restarted, fault):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    again = restarted(daemon, "--testing", f"failpoint:journal.reserve={fault}")
    answer = come_back(clients, group, layers)
    assert answer.group.state == group.state
    clients[0].beat()
    assert clients[1].attached(group).generation == group.generation
    for refused in (
        lambda: clients[0].register(group, [layer_specs.LayerSpec("new", top_k=1)]),
        lambda: clients[0].create(make_spec("other", ranks=1)),
        lambda: again.client(),
    ):
        with pytest.raises(errors.PoolExhaustedError, match="journal"):
            refused()
    assert again.status().journal.error
    clients[1].process.kill()  # what ends is noticed all the same
    eventually(lambda: again.group_states() == {"moe": "BROKEN"})
    assert clients[0].process.do("board")[2:] == ("PEER_LOST", 1)
    third = restarted(again)
    assert not third.status().journal.error
    clients[0].resume()
    assert clients[0].restore(group, [0], layers).group.generation == group.generation
    assert third.group_states() == {"moe": "BROKEN"}


def test_generations_do_not_come_back_after_a_full_disk(daemon_process, restarted):
    daemon = daemon_process()
    first = daemon.client(process=True)
    generation = first.create(make_spec("a", ranks=1)).group.generation
    daemon.kill()
    full = restarted(daemon, "--testing", "failpoint:journal.reserve=enospc")
    first.resume()
    with pytest.raises(errors.PoolExhaustedError):
        first.create(make_spec("b", ranks=1))
    again = restarted(full)
    client = again.client(process=True)
    assert client.create(make_spec("c", ranks=1)).group.generation > generation


def test_nothing_is_promised_that_a_restarted_daemon_would_not_know(daemon_process, restarted):
    """Registered, but not written: the answer is an error, and the retry is answered alike."""
    daemon = daemon_process("--testing", "failpoint:journal.before_write=eio:1")
    with pytest.raises(errors.PoolExhaustedError):
        daemon.client(process=True, job=None).open("job")
    eventually(lambda: daemon.status().journal.error == "", within_s=3.0)
    clients, group, layers = ready_pair(daemon, SPEC)
    restarted(daemon)
    assert come_back(clients, group, layers).group.generation == group.generation
