"""The journal keeps facts, wherever a write is cut off."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from raw_client import make_spec

from ep_runtime import errors
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.journal import file
from ep_runtime_server.journal.file import Journal

NO_FAILPOINTS = Failpoints()


def opened(path, *switches: str) -> Journal:
    return Journal(path, Failpoints(switches) if switches else NO_FAILPOINTS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def facts_of(path) -> dict:
    journal = opened(path)
    try:
        return journal.take_facts()
    finally:
        journal.close()


def write(path, *records) -> None:
    journal = opened(path)
    assert journal.append(records)
    journal.close()


def test_a_new_journal_knows_nothing(path):
    journal = opened(path)
    assert (journal.take_facts(), journal.was_there, journal.cut_bytes) == ({}, False, 0)


def test_the_last_value_of_a_key_counts_and_none_forgets_it(path):
    write(path, ("a", 1), ("b", {"x": [1]}), ("a", 2), ("c", 3))
    write(path, ("c", None))
    assert facts_of(path) == {"b": {"x": [1]}, "a": 2}


@pytest.mark.parametrize("kept", [0, 7, 8, 9, 20, 40, 60])
def test_a_journal_cut_anywhere_gives_whole_records_only(path, kept):
    write(path, *((f"key{i}", i) for i in range(4)))
    os.truncate(path, kept)
    journal = opened(path)
    facts = journal.take_facts()
    assert list(facts.items()) == [(f"key{i}", i) for i in range(len(facts))]
    assert journal.append([("more", 1)])
    journal.close()
    assert facts_of(path) == {**facts, "more": 1}


def test_records_behind_a_cut_never_come_back(path):
    write(path, ("a", 1), ("b", 2), ("c", 3))
    data = bytearray(path.read_bytes())
    data[data.index(b'"b"')] ^= 1
    path.write_bytes(data)
    write(path, ("b", 9))
    assert facts_of(path) == {"a": 1, "b": 9}


def test_a_record_of_another_place_is_none(path):
    write(path, ("a", 1), ("b", 2))
    data = path.read_bytes().rstrip(b"\0")
    record = data[8 : 8 + (len(data) - 8) // 2]
    path.write_bytes(data + record)  # the crc is right, but the sequence is not
    journal = opened(path)
    assert journal.take_facts() == {"a": 1, "b": 2}
    assert journal.cut_bytes > 0


def test_a_record_longer_than_any_is_none(path, monkeypatch):
    write(path, ("a", 1), ("b", "x" * 100))
    monkeypatch.setattr(file, "MAX_RECORD_BYTES", len('["b",""]') + 100)
    assert facts_of(path) == {"a": 1, "b": "x" * 100}
    monkeypatch.setattr(file, "MAX_RECORD_BYTES", len('["b",""]') + 99)
    journal = opened(path)
    assert journal.take_facts() == {"a": 1}
    assert journal.cut_bytes > 0


@pytest.mark.parametrize("synced", [True, False])
def test_a_new_file_that_is_synced_is_so_before_it_takes_the_old_ones_place(
    path, monkeypatch, synced
):
    done = []

    def kind(fd: int) -> str:
        return "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"

    journal = Journal(path, NO_FAILPOINTS, synced=synced)
    monkeypatch.setattr(file.os, "fsync", lambda fd: done.append(f"{kind(fd)} synced"))
    monkeypatch.setattr(
        file.os, "rename", lambda *names: (done.append("renamed"), os.replace(*names))
    )
    assert journal.compact({"a": 1})
    assert done == (["file synced", "renamed", "folder synced"] if synced else ["renamed"])
    journal.close()
    assert facts_of(path) == {"a": 1}


def test_a_file_is_written_anew_when_it_is_both_long_and_much_longer_than_its_facts(
    path, monkeypatch
):
    def wants(facts: int, more: int) -> bool:
        """Whether a file with that many bytes of facts and that many more wants compacting."""
        journal = opened(path)
        assert journal.compact({"a": "x" * facts})
        assert journal.append([("a", "x" * more)])
        journal.close()
        return journal.wants_compaction

    monkeypatch.setattr(file, "COMPACT_AT_BYTES", 10_000)
    assert [wants(100, 5_000), wants(5_000, 10_000), wants(100, 20_000)] == [False, False, True]


@pytest.mark.parametrize("fault", ["enospc:3", "eio:2"])
def test_a_full_disk_refuses_what_is_new_and_a_new_file_heals_it(path, fault):
    journal = opened(path, f"failpoint:journal.reserve={fault}")
    with pytest.raises(errors.PoolExhaustedError, match="cannot write its journal") as caught:
        journal.admit()
    assert caught.value.fields["reason"] == journal.error != ""
    assert not journal.append([("a", 1)])
    assert not journal.compact({"a": 1})
    assert journal.wants_compaction
    assert journal.compact({"a": 1})
    journal.admit()
    assert journal.append([("b", 2)])
    journal.close()
    assert facts_of(path) == {"a": 1, "b": 2}


@pytest.fixture
def free(monkeypatch):
    """free[0]: bytes that the disk has left for allocations past a file's end."""
    left, allocate = [1 << 30], os.posix_fallocate

    def bounded(fd: int, start: int, size: int) -> None:
        more = start + size - os.fstat(fd).st_size
        if more > left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= max(more, 0)
        allocate(fd, start, size)

    monkeypatch.setattr(file.os, "posix_fallocate", bounded)
    return left


def test_a_full_disk_says_how_much_is_wanted_and_little_heals_it(path, free):
    journal = opened(path)
    long = {"long": "x" * (1 << 20)}
    assert journal.append(long.items())
    free[0] = 0
    assert not journal.append([("a", "y" * file.RESERVE_BYTES)])
    assert "No space left on device (256.0 KiB wanted, " in journal.error
    assert not journal.try_again()
    assert "(64.0 KiB wanted, " in journal.error
    free[0] = 240 << 10  # less than the next reserve, and than the file
    assert not journal.compact(long)
    assert journal.try_again()
    assert journal.append([("a", 1)])
    journal.close()
    assert facts_of(path) == {**long, "a": 1}


class Disk:
    """A disk that holds that many bytes, counted by the blocks of a folder's files."""

    def __init__(self, folder, monkeypatch) -> None:
        self._folder = folder
        self._allocate = os.posix_fallocate
        self.room_bytes = 1 << 30
        monkeypatch.setattr(file.os, "posix_fallocate", self._allocated)

    @property
    def used_bytes(self) -> int:
        return sum(512 * os.stat(found).st_blocks for found in self._folder.iterdir())

    def _allocated(self, fd: int, start: int, size: int) -> None:
        before = os.fstat(fd).st_size
        self._allocate(fd, start, size)
        if self.used_bytes > self.room_bytes:
            os.ftruncate(fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class KilledError(BaseException):
    """The daemon was killed."""


# That many facts of 32 KiB each, and as many bytes of obsolete records.
FACTS = {f"fact/{number}": f"{number}" * (16 << 10) for number in range(10, 24)}


def long_journal(path, disk: Disk, *, free_bytes: int) -> Journal:
    """Writes FACTS over older values and between deleted ones, on a disk with only that many free
    bytes.
    """
    journal = opened(path)
    for number, (key, value) in enumerate(FACTS.items()):
        assert journal.append([(key, "before"), (f"gone/{number}", value)])
    for number, fact in enumerate(FACTS.items()):
        assert journal.append([fact, (f"gone/{number}", None)])
    journal.close()
    journal = opened(path)
    journal.take_facts()
    disk.room_bytes = disk.used_bytes + free_bytes
    return journal


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


@pytest.mark.parametrize("free_bytes", [48 << 10, 240 << 10])
def test_a_new_file_needs_little_room_where_the_old_one_gives_way(path, disk, free_bytes):
    journal = long_journal(path, disk, free_bytes=free_bytes)
    facts = {**FACTS, "fact/20": "now", "more": "x" * 1000}
    before = journal.size_bytes
    assert journal.compact(facts)
    assert journal.size_bytes < 0.6 * before
    journal.admit()
    assert journal.append([("next", 1)])
    journal.close()
    assert [found.name for found in path.parent.iterdir()] == ["journal"]
    assert facts_of(path) == {**facts, "next": 1}


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "rename", "unlink"])
def test_a_daemon_killed_while_files_give_way_loses_nothing(tmp_path, monkeypatch, call):
    """Kills before and after each call that changes a file."""
    real, count, ended = getattr(os, call), 0, False
    while not ended:
        for after in (False, True):
            folder = tmp_path / f"{count}-{after}"
            folder.mkdir()
            with monkeypatch.context() as patched:
                disk = Disk(folder, patched)
                journal = long_journal(folder / "journal", disk, free_bytes=240 << 10)
                left = count

                def dying(*words, after: bool = after, **named):
                    nonlocal left
                    left -= 1
                    done = real(*words, **named) if left != -1 or after else None
                    if left == -1:
                        raise KilledError
                    return done

                patched.setattr(file.os, call, dying)
                try:
                    ended = journal.compact(FACTS)
                except KilledError:
                    ended = False
            journal.close()
            again = opened(folder / "journal")
            assert again.take_facts() == FACTS
            assert not again.cut_bytes
            assert again.compact(FACTS)
            again.close()
            assert facts_of(folder / "journal") == FACTS
        count += 1
    assert count > 1


def test_a_disk_that_others_fill_meanwhile_is_waited_for(path, disk, monkeypatch):
    journal = long_journal(path, disk, free_bytes=240 << 10)
    cut = Journal._cut

    def then_full(*words) -> None:
        cut(*words)
        disk.room_bytes = disk.used_bytes

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_cut", then_full)
        assert not journal.compact(FACTS)
    assert not journal.try_again()
    with pytest.raises(errors.PoolExhaustedError, match="No space left"):
        journal.admit()
    assert not journal.append([("new", 1)])
    journal.close()
    again = opened(path)
    assert again.take_facts() == FACTS
    disk.room_bytes += 240 << 10
    assert again.compact({**FACTS, "new": 1})
    again.close()
    assert facts_of(path) == {**FACTS, "new": 1}


def test_a_second_file_of_another_journal_is_not_read(path, disk, monkeypatch):
    journal = long_journal(path, disk, free_bytes=240 << 10)
    monkeypatch.setattr(Journal, "_take_place", lambda *words: os.fsync(1 << 20))
    assert not journal.compact(FACTS)
    journal.close()
    second = path.with_name("journal.part")
    kept = second.read_bytes()
    second.unlink()  # an older daemon does not know it
    write(path, ("fact/10", "newer"))
    second.write_bytes(kept)
    assert facts_of(path)["fact/10"] == "newer"
    assert not second.exists()


def test_records_that_a_crash_may_have_lost_want_a_new_file(path, monkeypatch):
    journal = opened(path)
    assert journal.append([("a", 1)])
    with monkeypatch.context() as patched:
        patched.setattr(file.os, "fdatasync", lambda fd: os.fsync(1 << 20))
        journal.begin_sync()()
    assert journal.error
    assert not journal.try_again()
    assert journal.compact({"a": 1})
    assert journal.error == ""


def test_room_for_the_next_records_is_there_before_they_are_promised(path):
    journal = opened(path, "failpoint:journal.reserve=enospc")
    journal.close()
    journal = opened(path)
    journal.admit(more_bytes=1 << 20)
    assert os.stat(path).st_blocks * 512 >= 1 << 20


def test_an_error_while_writing_is_kept_until_a_new_file_took_its_place(path):
    journal = opened(path, "failpoint:journal.before_write=eio:1")
    assert not journal.append([("a", 1)])
    assert journal.error == os.strerror(5)
    assert not journal.append([("b", 2)])
    assert journal.compact({"b": 2})
    assert journal.error == ""
    journal.close()
    assert facts_of(path) == {"b": 2}


def test_a_directory_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(errors.PoolExhaustedError, match="journal"):
        opened(tmp_path / "missing" / "journal")


@pytest.mark.parametrize(
    "text", ["failpoint:nowhere=kill", "failpoint:rpc.before_answer=explode", "no-peer"]
)
def test_a_failpoint_that_does_not_exist_is_refused(text):
    from ep_runtime_server.base import failpoints

    with pytest.raises(errors.InvalidArgumentError, match="failpoint"):
        failpoints.parse(text)


@pytest.mark.parametrize(
    ("written", "call"),
    [
        ("session/", lambda client, group: client.open("job")),
        ("group/", lambda client, group: client.create(make_spec("other"))),
        ("layers/", lambda client, group: client.register(group, [LayerSpec("a", top_k=1)])),
    ],
    ids=["OpenSession", "CreateGroup", "RegisterLayers"],
)
def test_what_is_new_is_not_answered_where_its_own_record_is_the_first_that_is_not_written(
    daemon, monkeypatch, written, call
):
    client, append = daemon.client(job=None if written == "session/" else "job"), Journal.append
    group = client.create(make_spec()).group if written == "layers/" else None

    def failing(journal: Journal, records) -> bool:
        records = list(records)
        if any(key.startswith(written) for key, _ in records):
            journal.error = os.strerror(5)
        return append(journal, records)

    monkeypatch.setattr(Journal, "append", failing)
    with pytest.raises(errors.PoolExhaustedError, match="done, but the daemon cannot write"):
        call(client, group)
