"""Limits of one user, and what other users learn of them."""

from __future__ import annotations

import os

import pytest
from harness import as_uid, eventually
from raw_client import WAIT_S, close_fds, connect, make_spec

from ep_runtime import board, errors
from ep_runtime.layer_specs import LayerSpec
from ep_runtime.text import iec
from ep_runtime.v1 import session_service_pb2
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.addresses import SocketDirectory
from ep_runtime_server import main
from ep_runtime_server.callers import quotas

OTHER_UID = 4242
SPEC = make_spec()
SIZE = board.board_bytes(SPEC) + 2 * board.window_bytes(SPEC)


@pytest.fixture
def start(start_daemon, tmp_path):
    """start(**limits): a daemon with these limits per user; `start.peer_uid` is the
    connecting uid.
    """

    def make(settings=None, **limits):
        return start_daemon(
            directory=tmp_path / "d",
            peer_of=as_uid(lambda: make.peer_uid),
            per_user=quotas.UserLimits(**limits),
            allow_uids=frozenset({OTHER_UID}),
            **settings or {},
        )

    make.peer_uid = os.geteuid()
    return make


def usage_of(daemon, uid):
    return next((user for user in daemon.status().users if user.uid == uid), None)


def over(call, *args, **more):
    with pytest.raises(errors.PoolExhaustedError) as caught:
        call(*args, **more)
    fields = caught.value.fields
    return fields["resource"], fields["asked"], fields["held"], fields["limit"]


def test_groups_of_one_user_are_limited_and_leave_room_for_others(start):
    daemon = start(groups=2)
    client = daemon.client()
    first = client.create(make_spec("one")).group
    client.create(make_spec("two"))
    client.create(make_spec("two"))  # already exists
    assert over(client.create, make_spec("three")) == ("groups", 1, 2, 2)
    start.peer_uid = OTHER_UID
    other = daemon.client()
    other.create(make_spec("one"))
    assert [(user.uid, user.num_groups) for user in daemon.status().users][-1] == (OTHER_UID, 1)
    client.close_group(first)
    client.create(make_spec("three"))


def test_bytes_of_one_user_are_limited_until_they_are_free(start):
    daemon = start(host_bytes=SIZE)
    client = daemon.client()
    group = client.create(SPEC).group
    assert over(client.create, make_spec("more")) == ("host_bytes", SIZE, SIZE, SIZE)
    start.peer_uid = OTHER_UID
    daemon.client().create(SPEC)
    client.close_group(group)
    client.create(make_spec("more"))  # waits for memory that is being freed
    assert usage_of(daemon, OTHER_UID).host_bytes == SIZE


def test_descriptors_of_one_user_are_limited(start):
    daemon = start(fds=quotas.SESSION_FDS + 4 + 1)
    client = daemon.client()
    client.create(SPEC)  # a board, its mapping, two windows
    assert usage_of(daemon, daemon.status().users[0].uid).num_fds == 9
    assert over(client.create, make_spec("more")) == ("fds", 4, 9, 10)
    assert over(daemon.client) == ("fds", 5, 9, 10)
    assert "fd.denied" in daemon.event_kinds()


def test_what_a_session_is_counted_for_is_what_it_costs(daemon_process):
    daemon = daemon_process()
    daemon.status()
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    client = daemon.client()
    client.beat()
    with connect(daemon.directory):
        eventually(
            lambda: (
                len(os.listdir(f"/proc/{daemon.pid}/fd")) - before
                == quotas.SESSION_FDS
                == daemon.status().users[0].num_fds
            )
        )


def test_who_has_just_enough_for_a_session_gets_one_after_the_other(start):
    daemon = start(fds=quotas.SESSION_FDS)
    place = SocketDirectory(daemon.directory, None)
    for _ in range(20):
        token = transport.hello(place, WAIT_S).session_token
        control = transport.ControlChannel(place, token)
        control.call(control.sessions.CloseSession, session_service_pb2.CloseSessionRequest())
        control.close()


def test_descriptors_of_windows_that_a_process_says_it_has_are_counted(start):
    daemon = start(fds=quotas.SESSION_FDS + 4)
    client = daemon.client()
    group = client.create(SPEC).group
    group.spec.name = "before"
    assert over(client.restore, group) == ("fds", 4, 9, 9)


def test_layers_of_one_user_are_limited_over_all_groups(start):
    daemon = start(layers=3)
    client = daemon.client()
    one, two = (client.create(make_spec(name)).group for name in ("one", "two"))
    layers = [LayerSpec(name, top_k=1) for name in "abc"]
    client.register(one, layers[:2])
    client.register(one, layers[:2])  # already exist
    assert over(client.register, two, layers[:2]) == ("layers", 2, 2, 3)
    client.register(two, layers[:1])
    assert over(client.register, one, layers) == ("layers", 1, 3, 3)
    assert daemon.status().num_layers == 3


def test_records_of_one_user_are_limited(start):
    daemon = start(journal_bytes=50_000)
    client = daemon.client()
    group = client.create(SPEC).group
    layers = [LayerSpec(f"layers/{number}", top_k=1) for number in range(300)]
    client.register(group, layers[:100])
    (user,) = daemon.status().users
    assert 10_000 < user.journal_bytes < 20_000
    assert over(client.register, group, [LayerSpec("x" * 100, top_k=1)] * 100)[0] == "journal_bytes"
    client.close_group(group)
    eventually(lambda: usage_of(daemon, user.uid).journal_bytes < 2000)
    client.goodbye()
    client.close()
    eventually(lambda: not daemon.status().users)


def test_what_is_counted_of_records_is_what_a_new_file_holds(start):
    daemon = start()
    client = daemon.client()
    group = client.create(SPEC).group
    client.register(group, [LayerSpec(f"layers/{number}", top_k=1) for number in range(300)])
    client.register(group, [LayerSpec("one-more", top_k=1)])
    journal = daemon._daemon.runtime.journal
    (user,) = daemon.status().users

    def written_anew():
        daemon._daemon.runtime.recorder.compact()
        return journal.size_bytes

    daemon._loop.call_soon_threadsafe(written_anew)
    eventually(lambda: 0 < journal.size_bytes - user.journal_bytes < 1000)
    assert usage_of(daemon, user.uid).journal_bytes == user.journal_bytes


def test_a_group_is_kept_for_a_day_at_most(daemon):
    client = daemon.client()
    with pytest.raises(errors.InvalidArgumentError, match="retain_s must be at most 86400"):
        client.create(make_spec(retain_s=9500 * 365 * 86400.0))
    client.create(make_spec(retain_s=86400.0))


def test_an_exhausted_pool_tells_nothing_of_other_users_but_a_sum(start):
    daemon = start({"max_host_bytes": 2 * SIZE})
    client = daemon.client(job="secret-job")
    close_fds(client.fetch(client.create(make_spec("secret-name")).group))
    start.peer_uid = OTHER_UID
    other = daemon.client(job="theirs")
    other.create(make_spec("own"))
    with pytest.raises(errors.PoolExhaustedError) as caught:
        other.create(make_spec("more"))
    own, rest = caught.value.fields["holders"]
    assert own.startswith(f"own (uid {OTHER_UID}, job theirs)")
    assert rest == f"1 groups of other users: {iec(SIZE)}"
    assert "secret" not in str(caught.value) + str(caught.value.fields)


def limits(*words: str) -> quotas.UserLimits:
    return main.make_config(main.build_parser().parse_args(["--dir", "/tmp/x", *words])).per_user


def test_a_user_gets_half_where_others_are_served():
    alone = limits("--max-host-bytes", "1G")
    shared = limits("--max-host-bytes", "1G", "--allow-uid", "7")
    assert (alone.host_bytes, shared.host_bytes) == (1 << 30, 1 << 29)
    assert shared.fds < alone.fds
    assert alone.sessions == shared.sessions == 1024
    assert (alone.on_gpu(1 << 30), shared.on_gpu(1 << 30)) == (1 << 30, 1 << 29)
    own = limits("--max-groups-per-uid", "3", "--max-journal-bytes-per-uid", "1M")
    assert (own.groups, own.journal_bytes, own.retain_s) == (3, 1 << 20, 86400.0)
    assert limits("--allow-uid", "7", "--max-gpu-bytes-per-uid", "3G").on_gpu(1 << 30) == 3 << 30


@pytest.mark.parametrize("words", [("--max-groups-per-uid", "0"), ("--max-layers-per-uid", "-1")])
def test_limits_below_one_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        limits(*words)
    assert "from 1 on" in capsys.readouterr().err
