"""Tests lists: their rows, order and changes, one object in detail, and how a watch ends."""

from __future__ import annotations

import argparse
import json
import os
import signal
from typing import Any

import fixed_daemon as fixed
import pytest

from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime_client import cli
from ep_runtime_client.cli.commands import describe
from ep_runtime_client.cli.daemon import choosing, reading, source, watching
from ep_runtime_client.cli.tables import IDENTITY, Column

DEAD = "s-ba9876543210"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command on the fixed daemon: exit code, standard output, standard error."""
    monkeypatch.setattr(source, "open_source", fixed.open_source)

    def run(words: str) -> tuple[int, str, str]:
        code = cli.main(words.split())
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


ROWS = [
    {"name": "layer10", "bytes": 3, "labels": {"team": "nlp"}, "pids": [4, 5], "state": "READY"},
    {"name": "layer2", "bytes": 12, "labels": {"team": "vision"}, "pids": [], "state": "BROKEN"},
    {"name": "layer1", "bytes": None, "labels": {}, "pids": [5], "state": "READY"},
]
COLUMNS = (Column("name", "LAYER", priority=IDENTITY), Column("bytes", "BYTES", "bytes"))


@pytest.mark.parametrize(
    ("sort_by", "order"),
    [
        (None, [10, 2, 1]),
        ("LAYER", [1, 2, 10]),
        ("-layer", [10, 2, 1]),
        ("bytes", [10, 2, 1]),  # rows without a value come last
        ("-BYTES", [2, 10, 1]),
        ("state", [2, 10, 1]),
    ],
)
def test_rows_are_sorted_as_people_count(sort_by: str | None, order: list[int]) -> None:
    found = choosing.ordered(ROWS, sort_by, COLUMNS)
    assert [row["name"] for row in found] == [f"layer{number}" for number in order]


@pytest.mark.parametrize(
    ("labels", "left"),
    [
        ([], [10, 2, 1]),
        (["team=nlp"], [10]),
        (["team!=nlp"], [2, 1]),
        (["state=ready"], [10, 1]),
        (["state=READY,pids=5"], [10, 1]),
        (["state=READY", "pids=4"], [10]),
        (["layer=layer2"], [2]),
        (["bytes="], [1]),
    ],
)
def test_rows_are_chosen_by_label_or_field(labels: list[str], left: list[int]) -> None:
    found = choosing.filtered(ROWS, choosing.conditions(labels), COLUMNS)
    assert [row["name"] for row in found] == [f"layer{number}" for number in left]


def test_a_group_of_several_nodes_is_described_once() -> None:
    def row(node: str, epoch: int) -> dict[str, Any]:
        owner = {"uid": 0, "job": "j", "name": "g", "epoch": epoch, "node": node}
        members = [
            {"world_rank": rank, "node": of, "state": "IDLE" if of == node else None}
            for rank, of in enumerate("ab")
        ]
        events = [{"time": f"{number}{node}"} for number in range(8)]
        late = [{"world_rank": 1}] if node == "a" else []
        return {**owner, "total_bytes": 5, "members": members, "events": events, "late_ranks": late}

    (one,) = describe._together([row("a", 2), row("b", 2)])
    assert (one["node"], one["total_bytes"], len(one["late_ranks"])) == (["a", "b"], 10, 1)
    assert [member["state"] for member in one["members"]] == ["IDLE", "IDLE"]
    assert len(one["events"]) == describe.MOST_EVENTS
    assert [(event["time"], event["node"]) for event in one["events"]][-2:] == [
        ("7a", "a"),
        ("7b", "b"),
    ]
    assert len(describe._together([row("a", 0), row("b", 0)])) == 2  # each node has its own


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sessions --sort-by bet", "no field 'bet'; did you mean 'BEAT'?"),
        ("sessions -l taem=nlp", "no field 'taem'; did you mean 'team'?"),
        ("sessions -l team", "-l takes KEY=VALUE or KEY!=VALUE"),
        ("groups pretrain-mixture-of-expert", f"did you mean '{fixed.GROUP}'?"),
        ("describe gruop x", "no kind 'gruop'; did you mean 'group'?"),
        ("describe group x", f"there are: {fixed.GROUP}"),
        ("sesions", "did you mean 'sessions'?"),
        ("groups --sorted-by name", "did you mean '--sort-by'?"),
        ("groups -o jsn", "did you mean 'json'?"),
        ("events pretrain-mixture-of-expert", f"did you mean '{fixed.GROUP}'?"),
        ("events nobody", "no group or session named 'nobody'; there are: "),
        ("events --since soon", "must be like 90s, 10m or 1h30m, got 'soon'"),
    ],
)
def test_a_wrong_name_says_what_was_meant(ask: Any, words: str, said: str) -> None:
    code, out, err = ask(words)
    assert (code, out) == (cli.USAGE, "")
    assert said in err


def test_names_alone_are_for_scripts(ask: Any) -> None:
    assert ask("sessions --all -o name") == (0, f"{fixed.SESSION}\n{DEAD}\n", "")
    code, out, _ = ask("layers --no-headers")
    assert (code, len(out.splitlines())) == (0, 2)  # one per node
    assert out.split()[0] == fixed.NODES[0]


def test_sessions_that_ended_leave_the_list_after_a_minute(ask: Any) -> None:
    assert DEAD not in ask("sessions")[1]
    assert DEAD in ask("sessions --all")[1]
    assert "DEAD" in ask(f"sessions {DEAD}")[1]


def test_status_has_an_exit_code_for_late_ranks(ask: Any) -> None:
    code, out, _ = ask("status")
    assert (code, "LATE: ranks 0, 1, 2 of" in out) == (cli.LATE, True)
    code, out, _ = ask(f"status --node {fixed.NODES[1]} -o json")
    assert (code, json.loads(out)["gpus"]["items"]) == (cli.LATE, [])


def test_describe_shows_what_each_rank_does_and_whom_it_waits_for(ask: Any) -> None:
    code, out, _ = ask(f"describe group {fixed.GROUP} -o json")
    group = json.loads(out)["items"][0]
    assert (code, len(group["members"]), group["members"][0]["waiting_for"]) == (0, 64, 3)
    assert group["members"][3]["state"] == "RUNNING"
    assert [layer["name"] for layer in group["layers"]] == [fixed.LAYER]
    assert [event["kind"] for event in group["events"]][-1] == "rank.late"
    assert "{" not in ask(f"groups --node {fixed.NODES[0]} {fixed.GROUP}")[1]  # members are a table


def test_events_are_chosen_by_kind_and_age(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(words: str) -> list[str]:
        document = json.loads(ask(f"events -o json {words}")[1])
        return [item["kind"] for item in document["items"]]

    assert kinds("") == ["session.hello", "group.ready", "rank.late"]
    assert kinds("--type group --type rank.late") == ["group.ready", "rank.late"]
    assert kinds("--type *.hello") == ["session.hello"]
    assert kinds("--type rank.la") == []
    assert kinds("--since 10m") == []
    assert kinds("--since 999999999d") == ["session.hello", "group.ready", "rank.late"]
    assert kinds(f"--sort-by=-seq -l group={fixed.GROUP}")[0] == "rank.late"


@pytest.mark.parametrize("name", [fixed.GROUP, fixed.SESSION, DEAD])
@pytest.mark.parametrize(
    "gone", [("ListEvents",), ("ListGroups", "ListSessions")], ids=["no-events", "events-alone"]
)
def test_events_are_asked_by_any_name_that_is_or_was(
    ask: Any, monkeypatch: pytest.MonkeyPatch, name: str, gone: tuple[str, ...]
) -> None:
    told = fixed._events()
    told.events[0].session_id = DEAD
    monkeypatch.setitem(fixed.ANSWERS, "ListEvents", lambda: told)
    empty = {
        "ListEvents": pb.ListEventsResponse,
        "ListGroups": pb.ListGroupsResponse,
        "ListSessions": pb.ListSessionsResponse,
    }
    for method in gone:
        monkeypatch.setitem(fixed.ANSWERS, method, empty[method])
    code, out, _ = ask(f"events {name} -o json")
    assert (code, bool(json.loads(out)["items"])) == (cli.OK, gone != ("ListEvents",))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("7", 7)]
)
def test_spans_of_time(text: str, seconds: float) -> None:
    assert reading.span(text) == seconds


def test_changes_are_what_is_new_other_or_gone() -> None:
    columns = (Column("name", "NAME"), Column("state", "STATE"), Column("age_s", "AGE", "seconds"))
    changes = watching.Changes(columns, ("name",))

    def told(*rows: tuple[str, str, str, float], away: tuple[str, ...] = ()) -> list[str]:
        keys = ("node", "name", "state", "age_s")
        found = changes.since([dict(zip(keys, row, strict=True)) for row in rows], away)
        return [f"{row['node']} {row['name']} {row['change']} {row['state']}" for row in found]

    assert told(("a", "x", "READY", 1.0), ("b", "x", "READY", 1.0)) == [
        "a x ADDED READY",
        "b x ADDED READY",
    ]
    assert told(("a", "x", "READY", 2.0), ("b", "x", "READY", 2.0)) == []  # only older events
    assert told(("a", "x", "BROKEN", 3.0), away=("b",)) == ["a x CHANGED BROKEN"]
    assert told(("a", "x", "BROKEN", 4.0)) == ["b x GONE READY"]
    assert told(("a", "x", "BROKEN", 5.0)) == []


def test_changes_go_on_below_one_heading(
    ask: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = iter(("GROUP_STATE_FORMING", "GROUP_STATE_READY", None))

    def groups() -> pb.ListGroupsResponse:
        answer, state = fixed._groups(), next(states)
        if state is None:
            return pb.ListGroupsResponse()
        answer.groups[0].group.state = state
        return answer

    monkeypatch.setitem(fixed.ANSWERS, "ListGroups", groups)

    def thrice(args: argparse.Namespace, once: Any, *, clear: bool) -> int:
        assert (args.watch, clear) == (watching.EVERY_S, False)
        return max(once() for _ in range(3))

    monkeypatch.setattr(watching, "repeat", thrice)
    code, out, _ = ask(f"groups -w --node {fixed.NODES[0]} {fixed.GROUP}")
    lines = [line.split() for line in out.splitlines()]
    assert (code, [line[0] for line in lines]) == (0, ["CHANGE", "ADDED", "CHANGED", "GONE"])
    state = lines[0].index("STATE")
    assert [line[state] for line in lines[1:]] == ["FORMING", "READY", "READY"]


@pytest.mark.parametrize("words", ["", "-o json", "--after 7 -o json"])
def test_followed_events_say_once_that_there_are_none(
    ask: Any, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setitem(fixed.ANSWERS, "ListEvents", pb.ListEventsResponse)
    monkeypatch.setattr(
        watching, "repeat", lambda args, once, *, clear: max(once() for _ in range(3))
    )
    code, out, _ = ask(f"events -f {words}")
    assert (code, len(out.splitlines())) == (0, 1)


_ENDS_AT = 2
_MOST = 50


class Interrupts:
    """An object whose finalizer presses Ctrl-C: Python reports the exception and continues."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_ends_a_watch_also_where_its_exception_is_lost() -> None:
    calls = 0

    def once() -> int:
        nonlocal calls
        calls += 1
        assert calls < _MOST
        if calls == _ENDS_AT:
            Interrupts()
        return 0

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        watching.repeat(argparse.Namespace(watch=0.01, output="json"), once)
    assert calls == _ENDS_AT
    assert signal.getsignal(signal.SIGINT) is before
