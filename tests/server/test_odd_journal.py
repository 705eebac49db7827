"""The daemon starts from torn or odd journals, and names and counts their faults."""

from __future__ import annotations

import copy
import json
import random
import shutil

import pytest
from raw_client import make_spec

from ep_runtime import board_abi
from ep_runtime.layer_specs import LayerSpec
from ep_runtime.wire import LayerStackSpec
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.journal import summary
from ep_runtime_server.journal.file import Journal

_ODD = [
    None,
    True,
    -1,
    0,
    1.5,
    2**31,
    2**63,
    2**64,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x" * 1000,
    "\x1b[31m",
    [],
    [[]],
    [1, 2, 3],
    {},
    {"a": {}},
]


def facts_of(path) -> dict:
    journal = Journal(path, Failpoints())
    facts = journal.take_facts()
    journal.close()
    return facts


def write(path, facts) -> None:
    path.unlink(missing_ok=True)
    journal = Journal(path, Failpoints())
    assert journal.append(list(facts.items()))
    journal.close()


def places(value, path=()):
    """Yields the paths of a JSON value and of every value inside it."""
    yield path
    inner = (
        value
        if isinstance(value, dict)
        else dict(enumerate(value if isinstance(value, list) else ()))
    )
    for key, item in inner.items():
        yield from places(item, (*path, key))


def replaced(value, path, odd):
    if not path:
        return odd
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], odd)
    return value


def odd_journals(facts, numbers, count):
    """Yields journals in which one value is odd."""
    every = [(key, path) for key, value in facts.items() for path in places(value)]
    for _ in range(count):
        key, path = numbers.choice(every)
        odd = numbers.choice(_ODD)
        changed = replaced(facts[key], path, odd)
        yield f"{key} at {path} = {odd!r:.60}", {**facts, key: changed}


@pytest.fixture
def journal_of_a_job(start_daemon, tmp_path):
    """A journal that names a session, a group with layers, and windows."""
    daemon = start_daemon()
    client = daemon.client()
    client.open("job", labels={"a": "b"})
    group = client.ready(make_spec())
    stack = LayerStackSpec(LayerSpec("s", top_k=1), 3)
    client.register(group, [LayerSpec("l", top_k=1)], [stack])
    daemon.status()
    path = tmp_path / "journal"
    shutil.copy(daemon.directory / "journal", path)
    client.goodbye()
    return path


def look(daemon) -> None:
    """Calls everything that an operator may ask, and runs everything that the clock triggers."""
    for method in ("Sessions", "Groups", "Layers", "Handles", "Buffers", "Ranks", "Events"):
        daemon.ask(f"List{method}")
    daemon.status()
    runtime = daemon._daemon.runtime
    daemon._loop.call_soon_threadsafe(runtime.tick)
    assert list(daemon.status().failing_tasks) == []
    daemon.client().create(make_spec("after"))


@pytest.mark.timeout(3600)
@pytest.mark.doses(ci=40, full=4000)
def test_a_daemon_starts_on_any_journal_of_whole_records(
    start_daemon, journal_of_a_job, tmp_path, dose
):
    facts = facts_of(journal_of_a_job)
    assert {key.partition("/")[0] for key in facts} >= {"session", "group", "layers", "windows"}
    numbers = random.Random(dose)
    for number, (what, odd) in enumerate(odd_journals(facts, numbers, dose)):
        directory = tmp_path / f"d{number}"
        directory.mkdir(mode=0o700)
        write(directory / "journal", odd)
        try:
            daemon = start_daemon(directory=directory, recovery_s=0.0)
            look(daemon)
            daemon.close()
        except Exception as error:
            raise AssertionError(f"input {number}: {what}") from error
        daemon.close = lambda: None


@pytest.mark.parametrize(
    "payload",
    [
        b"7",
        b"[]",
        b'["a"]',
        b'["a",1,2]',
        b"[1,2]",
        b"[[],1]",
        b"{}",
        b"no json",
        b"\xff",
        b"[" * 9999,
    ],
)
def test_a_whole_record_that_is_no_fact_is_left_out(tmp_path, payload, monkeypatch):
    path = tmp_path / "journal"
    write(path, {"a": 1})
    with monkeypatch.context() as patch:
        patch.setattr("ep_runtime_server.journal.file._payload", lambda record: payload)
        journal = Journal(path, Failpoints())
        assert journal.append([("b", 2)])
        journal.close()
    journal = Journal(path, Failpoints())
    assert (journal.odd_records, journal.cut_bytes) == (1, 0)
    assert journal.append([("c", 3)])
    journal.close()
    assert facts_of(path) == {"a": 1, "c": 3}


@pytest.mark.parametrize(
    ("kind", "place", "value", "left_out"),
    [
        ("layers", (0, 3), board_abi.MAX_HANDLES, 1),  # more than a board has
        ("windows", ("buffers", 0, 2), -2, 2),  # -1 is the board; its group is dropped too
    ],
)
def test_a_record_of_one_number_too_far_is_left_out(
    start_daemon, journal_of_a_job, tmp_path, kind, place, value, left_out
):
    facts = facts_of(journal_of_a_job)
    (key,) = (key for key in facts if key.startswith(f"{kind}/"))
    facts[key] = replaced(facts[key], place, value)
    directory = tmp_path / "d"
    directory.mkdir(mode=0o700)
    write(directory / "journal", facts)
    daemon = start_daemon(directory=directory, recovery_s=0.0)
    assert daemon.event_kinds().count("journal.unreadable") == left_out
    look(daemon)


@pytest.mark.parametrize(("written", "read"), [(None, None), (2.0, 2.0), (1 << 30, 1 << 30)])
def test_the_workspace_of_a_group_is_kept(start_daemon, journal_of_a_job, tmp_path, written, read):
    facts = facts_of(journal_of_a_job)
    specs = [fact["spec"] for fact in facts.values() if isinstance(fact, dict) and "spec" in fact]
    assert specs
    for spec in specs:
        assert "workspace" not in spec  # its default: a version without the field reads the record
        spec.update({} if written is None else {"workspace": written})
    directory = tmp_path / "d"
    directory.mkdir(mode=0o700)
    write(directory / "journal", facts)
    daemon = start_daemon(directory=directory, recovery_s=60.0)
    (group,) = daemon.ask("ListGroups").groups
    assert "journal.unreadable" not in daemon.event_kinds()
    size = group.group.spec.workspace.WhichOneof("size")
    assert (size and getattr(group.group.spec.workspace, size)) == read


def test_facts_are_counted_by_kind_and_told_to_nobody(tmp_path, capsys):
    path = tmp_path / "journal"
    journal = Journal(path, Failpoints())
    records = [("session/a", {"token_digest": "x"}), ("session/b", {}), ("group/g", {"job": "y"})]
    assert journal.append([*records, ("session/b", None), ("boot", "id")])
    assert summary.main([str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["facts"] == {"boot": 1, "group": 1, "session": 1}
    assert (found["num_records"], found["num_odd_records"], found["cut_bytes"]) == (5, 0, 0)
    assert found["file_bytes"] > found["record_bytes"] == journal.size_bytes  # room ahead
    journal.close()
    path.write_bytes(path.read_bytes()[: found["record_bytes"] - 1])
    torn = summary.summary(path)
    assert (torn["num_records"], torn["cut_bytes"] > 0) == (4, True)
