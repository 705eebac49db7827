"""A daemon restarts without its journal, or with a part of it."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import random

import pytest
from harness import eventually, memfds_of
from raw_client import make_spec
from raw_jobs import SPEC, attached_pair, come_back, ready_pair

from ep_runtime import board_abi, errors, layer_specs
from ep_runtime_server.journal.file import MAGIC
from ep_runtime_server.memory import devices

# A wiped directory looks new: for a while the first daemon on it, and the next, believe processes.
NO_WORD = ("--recovery-s", "0")


def wiped(daemon):
    """Kills the daemon and deletes its journal."""
    daemon.kill()
    (daemon.directory / "journal").unlink()


def test_processes_bring_everything_back_without_a_journal(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    inodes, before = memfds_of(daemon.pid), daemon.status()
    wiped(daemon)
    again = restarted(daemon)
    answers = []
    for rank, client in enumerate(clients):
        assert not client.resume()
        answers.append(client.restore(group, [rank], layers))
        if answers[-1].wanted_ranks:
            client.give_back(group)
    assert [list(answer.wanted_ranks) for answer in answers] == [[-1, 0, 1], []]
    assert again.group_states() == {"moe": "READY"}
    assert memfds_of(again.pid) == inodes
    status = again.status()
    assert (status.num_layers, status.num_handles) == (before.num_layers, before.num_handles)
    newer = again.client().create(make_spec("other", ranks=1)).group.generation
    assert newer > group.generation
    (more,), _ = clients[0].register(group, [layer_specs.LayerSpec("later", top_k=1)])
    assert more.handle_base == max(x.handle_base + x.num_handles for x in layers)
    clients[1].process.kill()
    eventually(lambda: again.group_states() == {"moe": "BROKEN", "other": "FORMING"})
    assert clients[0].process.do("board")[2:] == ("PEER_LOST", 1)


def test_who_does_not_come_back_in_time_is_lost_to_the_others(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    wiped(daemon)
    again = restarted(daemon, "--recovery-s", "3")  # the first process is back in time
    clients[0].resume()
    clients[0].restore(group, [0], layers)
    clients[0].give_back(group)
    assert again.group_states() == {"moe": "FORMING"}
    eventually(lambda: again.group_states() == {"moe": "BROKEN"}, within_s=5.0)
    assert clients[0].process.do("board")[1:] == (group.generation, "PEER_LOST", 1)


def test_a_second_kill_before_everybody_is_back_loses_nobody(daemon_process, restarted):
    daemon = daemon_process()
    jobs = [ready_pair(daemon, make_spec(f"moe{i}")) for i in range(2)]
    wiped(daemon)
    daemon = restarted(daemon)
    clients, group, layers = jobs[0]
    clients[0].resume()
    clients[0].restore(group, [0], layers)
    again = restarted(daemon)
    for clients, group, layers in jobs:
        for rank, client in enumerate(clients):
            client.resume()
            if client.restore(group, [rank], layers).wanted_ranks:
                client.give_back(group)
    assert again.group_states() == {"moe0": "READY", "moe1": "READY"}


def test_a_word_alone_takes_no_memory_from_others(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    held = daemon.used_bytes
    wiped(daemon)
    again = restarted(daemon, "--max-host-bytes", str(held + 4096))
    clients[0].resume()
    clients[0].restore(group, [0], layers)
    assert again.used_bytes == 0
    other = again.client(process=True, job="other")
    other.create(make_spec())
    with pytest.raises(errors.PoolExhaustedError):
        clients[0].give_back(group)
    assert again.used_bytes == held


@pytest.mark.parametrize("change", ["overlap", "id", "outside"])
def test_layers_that_cannot_have_been_registered_so_are_refused(daemon_process, restarted, change):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    wiped(daemon)
    restarted(daemon)
    clients[0].resume()
    first, second = layers[:2]
    changed = {
        "overlap": {"handle_base": first.handle_base + 1},
        "id": {"base_id": second.base_id + 1},
        "outside": {"handle_base": board_abi.MAX_HANDLES - 1},
    }[change]
    with pytest.raises(errors.InvalidArgumentError, match="cannot have been registered"):
        clients[0].restore(group, [0], [first, dataclasses.replace(second, **changed)])
    assert list(clients[0].restore(group, [0], layers).wanted_ranks) == [-1, 0, 1]


def test_after_the_recovery_window_nobodys_word_counts(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    wiped(daemon)
    restarted(daemon, "--recovery-s", "0")
    clients[0].resume()
    with pytest.raises(errors.StaleHandleError, match="create it again"):
        clients[0].restore(group, [0], layers)


def test_with_a_whole_journal_nobodys_word_counts(daemon_process, restarted):
    daemon = daemon_process(*NO_WORD)
    clients, group, layers = ready_pair(daemon)
    again = restarted(daemon)
    stranger = again.client(process=True)
    with pytest.raises(errors.StaleHandleError):
        stranger.restore(group, [0], layers)
    group.spec.name = "unknown"
    with pytest.raises(errors.StaleHandleError):
        clients[0].restore(group, [0], layers)


def test_what_differs_is_said(daemon_process, restarted):
    daemon = daemon_process(*NO_WORD)
    clients, group, layers = ready_pair(daemon)
    restarted(daemon)
    client = clients[0]
    client.resume()
    with pytest.raises(errors.InvalidArgumentError, match="as before"):
        client.restore(group, [1])
    group.generation += 1
    with pytest.raises(errors.StaleHandleError):
        client.restore(group, [0])
    group.generation -= 1
    group.spec.hidden_size *= 2
    with pytest.raises(errors.SpecMismatchError, match="hidden_size"):
        client.restore(group, [0])
    group.spec.hidden_size //= 2
    moved = type(layers[0])(layers[0].spec, 0, layers[0].base_id, layers[0].handle_base + 1)
    with pytest.raises(errors.SpecMismatchError, match="handles from"):
        client.restore(group, [0], [moved])


@pytest.mark.parametrize("cut", [0.5, 0.95, "garbage"])
def test_a_torn_journal_is_read_up_to_the_tear_and_the_rest_brought_back(
    daemon_process, restarted, cut
):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    daemon.kill()
    path = daemon.directory / "journal"
    data = path.read_bytes().rstrip(b"\0")
    if cut == "garbage":
        path.write_bytes(random.Random(7).randbytes(len(data)))
    else:
        path.write_bytes(data[: int(cut * len(data))] + b"\xff")
    again = restarted(daemon)
    for rank, client in enumerate(clients):
        client.resume()
        if client.restore(group, [rank], layers).wanted_ranks:
            client.give_back(group)
    assert again.group_states() == {"moe": "READY"}
    assert again.status().num_handles == 10
    assert again.client().create(make_spec("b", ranks=1)).group.generation > group.generation


def ends_of_records(journal: bytes) -> list[int]:
    """Returns the offsets at which records of windows or of a group end."""
    end, found = len(MAGIC), []
    while any(journal[end : end + 4]):
        text = end + 16  # after length, checksum and number
        end = text + int.from_bytes(journal[end : end + 4], "little")
        if journal[text:end].startswith((b'["windows/', b'["group/')):
            found.append(end)
    return found


def tear_after_each_record(daemon, restarted, clients, group, layers, behind=0):
    """Checks facts in records behind the tear, which stay true; returns how many tears there were.

    Tears are after the first `behind` bytes.
    """
    daemon.kill()
    path = daemon.directory / "journal"
    whole = path.read_bytes()
    ends = [end for end in ends_of_records(whole) if end > behind]
    tokens = [client.token for client in clients]
    for end in ends:
        path.write_bytes(whole[:end] + b"\xff")
        daemon = restarted(daemon, "--log-level", "error")
        for rank, client in enumerate(clients):
            client.token = tokens[rank]  # for the session that the whole journal names
            client.resume()
            answer = client.restore(group, [rank], layers)
            assert answer.group.generation == group.generation
            if answer.wanted_ranks:
                assert client.give_back(group)[1] == [], f"torn at {end} of {whole[:end]!r}"
        assert daemon.group_states() == {"moe": "READY"}, f"torn at {end} of {whole[:end]!r}"
        held = group.board_bytes + 2 * group.window_bytes
        eventually(lambda d=daemon, held=held: d.used_bytes == held, what="strays are freed")
        assert memfds_of(daemon.pid) == {*clients[0].process.do("inodes")}
        assert daemon.status().recovery.lost_bytes == 0
        daemon.kill()
    return len(ends)


def test_no_tear_gives_the_memory_of_living_processes_up(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    assert tear_after_each_record(daemon, restarted, clients, group, layers) > 4


def test_nor_that_of_a_group_that_formed_again(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    clients[1].process.kill()
    eventually(lambda: daemon.group_states() == {"moe": "BROKEN"})
    before = len((daemon.directory / "journal").read_bytes().rstrip(b"\0"))
    clients[0].process.do("close")
    clients[1] = daemon.client(process=True)
    group = attached_pair(clients)
    assert tear_after_each_record(daemon, restarted, clients, group, layers, before) > 4


class TestGivingBack:
    """The daemon takes back the same windows that it gave out."""

    @pytest.fixture
    def away(self, daemon_process, restarted):
        """(client in this process, READY group, its [(descriptor, fd)]) after a restart."""
        daemon = daemon_process()
        client = daemon.client()
        group = client.create(make_spec(ranks=2)).group
        found = client.fetch(group)
        client.attached(group)
        again = restarted(daemon)
        assert client.resume()
        assert list(client.restore(group).wanted_ranks) == [-1, 0, 1]
        yield again, client, group, found
        for _, fd in found:
            os.close(fd)

    def refused(self, away, found, message):
        again, client, group, _ = away
        with pytest.raises(errors.EpRuntimeError, match=message):
            client.return_windows(group, found)
        assert list(client.restore(group).wanted_ranks) == [-1, 0, 1]

    def test_the_whole(self, away):
        again, client, group, found = away
        answer = client.return_windows(group, found)
        assert (answer.num_adopted, list(answer.wanted_ranks)) == (3, [])
        answer = client.return_windows(group, found)
        assert (answer.num_adopted, list(answer.wanted_ranks)) == (0, [])
        assert memfds_of(again.pid) == {os.fstat(fd).st_ino for _, fd in found}

    def test_one_by_one(self, away):
        _, client, group, found = away
        wanted = [list(client.return_windows(group, [item]).wanted_ranks) for item in found]
        assert wanted == [[0, 1], [1], []]

    def test_another_window_in_its_place(self, away):
        (board, board_fd), (first, first_fd), (second, second_fd) = away[3]
        self.refused(away, [(first, second_fd), (second, first_fd)], "another file")

    def test_a_file_that_is_no_memfd(self, away, tmp_path):
        item, _ = away[3][1]
        with open(tmp_path / "file", "wb+") as file:
            file.truncate(item.bytes)
            self.refused(away, [(item, file.fileno())], "not a memfd|seals")

    @pytest.mark.parametrize("kind", ["unsealed", "small", "sparse", "foreign"])
    def test_a_memfd_that_is_not_ours(self, away, kind):
        item, _ = away[3][1]
        fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
        try:
            size = item.bytes - 4096 if kind == "small" else item.bytes
            os.ftruncate(fd, size)
            if kind != "sparse":
                os.posix_fallocate(fd, 0, size)
            if kind != "unsealed":
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, devices.SEALS)
            messages = {"unsealed": "seals", "foreign": "another file"}
            self.refused(away, [(item, fd)], messages.get(kind, "bytes"))
        finally:
            os.close(fd)

    def test_another_generation(self, away):
        item, fd = away[3][0]
        item.generation += 1
        with pytest.raises(errors.StaleHandleError):
            away[1].return_windows(away[2], [(item, fd)])
        item.generation -= 1

    def test_a_rank_that_is_not_there(self, away):
        item, fd = away[3][1]
        item.world_rank = 7
        self.refused(away, [(item, fd)], "world_rank")
        item.world_rank = 0

    def test_more_names_than_descriptors(self, away):
        item, fd = away[3][1]
        with pytest.raises(errors.InvalidArgumentError, match="2 descriptors were named and 1"):
            away[1].return_windows(away[2], [(item, fd), (item, None)])

    def test_by_a_stranger(self, away):
        again, _, group, found = away
        other = again.client(process=True)
        assert other.process.do("hello", again.directory)
        with pytest.raises(errors.PermissionDeniedError):
            other.process.do("give_back_none", again.directory, other.token, group.spec.name, 1)


def test_a_board_of_another_generation_is_not_taken(daemon_process, restarted):
    daemon = daemon_process()
    clients, group, _ = ready_pair(daemon, SPEC)
    clients[0].process.do("spoil_board", 99)
    restarted(daemon)
    clients[0].resume()
    clients[0].restore(group, [0])
    with pytest.raises(errors.InvalidArgumentError, match="generation 99"):
        clients[0].give_back(group)
    clients[0].process.do("spoil_board", group.generation)
    assert clients[0].give_back(group) == (3, [])


def test_a_restart_under_load_gives_every_process_its_own(daemon_process, restarted):
    daemon = daemon_process()
    pairs = [ready_pair(daemon, make_spec(f"moe{i}", retain_s=60.0)) for i in range(4)]
    inodes = memfds_of(daemon.pid)
    again = restarted(daemon)
    for clients, group, layers in reversed(pairs):
        assert come_back(clients, group, layers).group.generation == group.generation
    assert memfds_of(again.pid) == inodes
    assert set(again.group_states().values()) == {"READY"}
