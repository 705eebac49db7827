"""Commands in a cluster show all nodes, also when nodes are away or answer nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fixed_daemon as fixed
import pytest
from cluster_places import place, plain_tcp
from daemon_fixtures import start_daemon, wait_until
from fuzz_messages import OddMessages
from raw_client import Client, make_spec

from ep_runtime import errors
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime_client import cli
from ep_runtime_client.cli.daemon import choosing, source
from ep_runtime_client.cli.ranks import board_samples, rows, screen
from ep_runtime_client.daemons import runtime
from ep_runtime_client.readers import admin_service

WAIT_S = 30.0


class Node:
    """Starts a daemon of a cluster and runs one command against it."""

    def __init__(self, name: str, role: str, address: str) -> None:
        self.name = name
        self.address = address
        self.directory = Path(tempfile.mkdtemp(prefix="ept-"))
        self._flags = (role, address, *plain_tcp(), "--node", name, "--drain-s", "0")
        self._clients: list[Client] = []
        self.start()

    def start(self) -> None:
        self.child: runtime.Child = start_daemon(self.directory, *self._flags)

    def group(self, name: str) -> None:
        client = Client(self.directory)
        self._clients.append(client)
        client.ready(make_spec(name=name))

    def link(self) -> Any:
        with source.open_source(f"unix://{self.directory}", timeout_s=WAIT_S) as daemon:
            return daemon.status()["cluster"]["link"]

    def ask(self, capsys: Any, *words: str) -> tuple[int, str, str]:
        """Returns exit code, standard output and standard error."""
        code = cli.main([*words, "--address", f"unix://{self.directory}"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        assert self.child.stop() == -signal.SIGKILL

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.child.stop()
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def opened() -> Iterator[tuple[Node, Node]]:
    """Starts node a, the coordinator, and node b, which joined; each has its own group."""
    address = place()
    a = Node("a", "--coordinator", address)
    b = Node("b", "--join", address)
    wait_until(lambda: b.link() == "JOINED", "b joins")
    a.group("left")
    b.group("right")
    yield a, b
    b.close()
    a.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Node]]:
    with opened() as nodes:
        yield nodes


def test_every_node_shows_the_whole_cluster(pair, capsys):
    for node in pair:
        code, text, _ = node.ask(capsys, "groups")
        assert code == 0
        lines = [line.split() for line in text.splitlines()]
        assert lines[0][:2] == ["NODE", "GROUP"]
        assert [line[:2] for line in lines[1:]] == [["a", "left"], ["b", "right"]]
        document = json.loads(node.ask(capsys, "sessions", "-o", "json")[1])
        assert [item["node"] for item in document["items"]] == ["a", "b"]
        assert document["unreachable"] == []
        assert node.ask(capsys, "groups", "right")[1].split()[:2] == ["node", "b"]


def test_one_node_can_be_asked_alone(pair, capsys):
    a, _ = pair
    document = json.loads(a.ask(capsys, "groups", "--node", "b", "-o", "json")[1])
    assert [(item["node"], item["name"]) for item in document["items"]] == [("b", "right")]
    messages = a.ask(capsys, "events", "--node", "b")[1]
    assert "'b' joined the coordinator" in messages
    assert "'b' joined the coordinator" not in a.ask(capsys, "events")[1]
    code, _, error = a.ask(capsys, "groups", "--node", "x")
    assert code == 1
    assert "no node 'x' in the cluster, which has a, b" in error


def test_status_lists_the_nodes_with_what_they_have(pair, capsys):
    a, b = pair
    code, text, _ = b.ask(capsys, "status")
    assert code == 0
    assert f"node b joined the coordinator at {a.address}" in text
    assert "over PLAIN TCP" in text
    document = json.loads(a.ask(capsys, "status", "-o", "json")[1])
    assert document["cluster"]["link"] == "COORDINATOR"
    wanted = {"state": "JOINED", "daemon": "SERVING", "num_groups": 1, "error": ""}
    assert [node["node"] for node in document["nodes"]] == ["a", "b"]
    for node in document["nodes"]:
        assert {key: node[key] for key in wanted} == wanted
    assert [node["role"] for node in document["nodes"]] == ["coordinator", ""]
    other = json.loads(a.ask(capsys, "status", "--node", "b", "-o", "json")[1])
    assert (other["pid"], other["cluster"]["node"], other["nodes"]) == (b.child.pid, "b", [])
    code, text, _ = a.ask(capsys, "describe", "node", "b")
    assert (code, dict(line.split(None, 1) for line in text.splitlines())["state"]) == (0, "JOINED")
    (group,) = json.loads(a.ask(capsys, "describe", "group", "right", "-o", "json")[1])["items"]
    assert (group["node"], group["members"][0]["node"]) == ("b", "b")
    assert {event["group"] for event in group["events"]} == {"right"}


@pytest.fixture
def parted() -> Iterator[tuple[Node, Node]]:
    with opened() as nodes:
        yield nodes


def test_a_node_that_is_away_is_said_with_since_when(parted, capsys):
    gone, left = parted
    gone.kill()
    code, text, error = left.ask(capsys, "groups")
    assert code == 3
    assert [line.split()[0] for line in text.splitlines()[1:]] == [left.name]
    assert f"node {gone.name} at " in error
    assert "is unreachable" in error
    wait_until(
        lambda: (
            json.loads(left.ask(capsys, "groups", "-o", "json")[1])["unreachable"][0]["since_s"]
            > 0.2
        ),
        "the time grows",
    )
    code, text, _ = left.ask(capsys, "status")
    assert code == 3
    (row,) = [line.split() for line in text.splitlines() if line.startswith(f"{gone.name} ")]
    assert row[1] == "UNREACHABLE"
    assert left.ask(capsys, "status", "--ready")[0] == 0  # the daemon itself is healthy
    assert left.ask(capsys, "groups", "--node", left.name)[0] == 0
    code, _, error = left.ask(capsys, "groups", "--node", gone.name)
    assert code == 2
    assert "does not answer" in error
    gone.start()
    wait_until(lambda: left.ask(capsys, "groups")[0] == 0, "the cluster is whole again")


def test_a_coordinator_that_never_was_there_is_said_too(capsys):
    b = Node("b", "--join", place())
    try:
        b.group("right")
        code, text, error = b.ask(capsys, "groups")
        assert (code, "right" in text) == (3, True)
        assert f"node ? at {b.address} is unreachable" in error
        code, text, _ = b.ask(capsys, "status")
        assert code == 3
        assert f"node b has not reached the coordinator at {b.address}" in text
    finally:
        b.close()


def test_a_daemon_alone_shows_no_node(address, capsys):
    assert cli.main(["groups", "--address", address, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "kind": "groups",
        "items": [],
        "unreachable": [],
    }
    assert cli.main(["groups", "--address", address, "--node", "b"]) == 1
    assert "belongs to no cluster" in capsys.readouterr().err


GOOD, ODD = fixed.NODES
Answer = Callable[[str, Any], Any]
# (words of the command, a list that the command reads)
COMMANDS = {
    ("sessions", "--all"): "ListSessions",
    ("groups",): "ListGroups",
    ("layers",): "ListLayers",
    ("handles",): "ListHandles",
    ("buffers",): "ListBuffers",
    ("top", "--interval", "0.001", "--samples", "1"): "ListTallies",
    ("load",): "ListHandles",
    ("skew", "--interval", "0.001"): "ListTallies",
    ("describe", "session", fixed.SESSION): "ListSessions",
    ("describe", "group", fixed.GROUP): "ListEvents",
    ("describe", "layer", fixed.LAYER): "ListHandles",
    ("describe", "node", GOOD): "GetStatus",
    ("status",): "GetStatus",
}


@contextlib.contextmanager
def _odd(answer: Answer) -> Iterator[None]:
    """Makes the second node give that answer."""

    class Daemon(fixed.FixedDaemon):
        def of_node(self, node: str) -> Daemon:
            return Daemon(node)

        def _send(self, method: str, request: Any, timeout_s: float) -> Any:
            if self._node == ODD:
                return answer(method, request)
            return super()._send(method, request, timeout_s)

    @contextlib.contextmanager
    def open_source(address: str | None, *, timeout_s: float) -> Iterator[source.Source]:
        yield Daemon()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "open_source", open_source)
        yield


def _right(method: str, request: Any) -> Any:
    return fixed.FixedDaemon()._send(method, request, 1.0)


class Endless:
    """A daemon whose lists never end, with `rows` rows a page."""

    def __init__(self, rows: int, token: Callable[[int], str] = str) -> None:
        self._rows, self._token = rows, token
        self.pages = 0

    def __call__(self, method: str, request: Any) -> Any:
        if method == "GetStatus":
            return _right(method, request)
        self.pages += 1
        answer = _right(method, request)
        for field, items in answer.ListFields():
            if field.is_repeated:
                for _ in range(self._rows - 1):
                    items.add().CopyFrom(items[0])
                if not self._rows:
                    answer.ClearField(field.name)
        answer.next_page_token = self._token(self.pages)
        return answer


def _fails(method: str, request: Any) -> Any:
    raise errors.EpRuntimeError(f"{method} failed inside the daemon: RuntimeError")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_service, "MAX_LIST_PAGES", 20)
    monkeypatch.setattr(admin_service, "MAX_LIST_BYTES", 50_000)


LISTS = [words for words, method in COMMANDS.items() if method != "GetStatus"]


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Endless(1), r"\d\d pages with .* and no end"),
        (Endless(0), "20 pages with .* and no end"),
        (Endless(1000), "1 pages with .* and no end"),
        (Endless(1, lambda page: "7"), "page '7' comes twice"),
        (Endless(1, lambda page: str(page % 5)), "comes twice"),
        (_fails, "failed inside the daemon: RuntimeError"),
    ],
    ids=["rows", "empty pages", "large pages", "one token", "a circle", "an error"],
)
def test_a_node_without_a_list_is_named_and_the_others_are_shown(words, answer, why, capsys):
    with _odd(answer):
        assert cli.main([*words]) == cli.PARTIAL
        table, told = capsys.readouterr()
        assert cli.main([*words, "-o", "json"]) == cli.PARTIAL
        document = json.loads(capsys.readouterr().out)
    assert re.search(rf"node {ODD} at \S+ failed \(.*{why}.*is not listed", told, re.DOTALL)
    assert any(name in table for name in (fixed.SESSION, fixed.GROUP, fixed.LAYER))
    (missing,) = document["unreachable"]
    assert (missing["node"], missing["state"]) == (ODD, "FAILED")
    assert re.search(why, missing["error"])
    rows = document["items"] if "items" in document else document["groups"]
    assert rows
    assert all(row.get("node", GOOD) == GOOD for row in rows)


def test_status_says_which_node_failed_and_why(capsys):
    with _odd(_fails):
        assert cli.main(["status"]) == cli.PARTIAL
        table, told = capsys.readouterr()
        assert cli.main(["status", "-o", "json"]) == cli.PARTIAL
        document = json.loads(capsys.readouterr().out)
    assert re.search(rf"{ODD} +FAILED", table)
    assert f"{ODD} at 10.17.3.103:7700 failed (GetStatus failed inside the daemon" in told
    good, odd = document["nodes"]
    assert (good["state"], odd["state"]) == ("JOINED", "FAILED")
    assert odd["error"] == "GetStatus failed inside the daemon: RuntimeError"


def test_a_list_takes_a_few_times_the_wait_for_one_answer(capsys, monkeypatch):
    now = [0.0]
    waits: list[float] = []
    monkeypatch.setattr(admin_service.time, "monotonic", lambda: now[0])

    def slow(method: str, request: Any) -> Any:
        now[0] += 4.0
        return Endless(1, lambda page: str(now[0]))(method, request)

    class Daemon(fixed.FixedDaemon):
        def _send(self, method: str, request: Any, timeout_s: float) -> Any:
            waits.append(timeout_s)
            return slow(method, request)

    with pytest.raises(errors.EpRuntimeError, match="ListGroups .*no end within 10 s"):
        Daemon(ODD).groups()
    assert waits == [5.0, 5.0, 2.0]


def test_what_is_nested_counts_as_well(monkeypatch):
    (group,) = fixed.FixedDaemon(ODD).groups()
    for most in (100, 100 + len(group["members"])):
        monkeypatch.setattr(admin_service, "MAX_LIST_VALUES", most)
        with pytest.raises(errors.EpRuntimeError, match=f"'{ODD}'.* more than {most} values"):
            fixed.FixedDaemon(ODD).groups()


def test_a_node_that_is_asked_alone_and_fails_is_an_error_with_its_name(capsys):
    with _odd(Endless(1, lambda page: "7")):
        for words in (["groups"], ["events"], ["load"], ["describe", "group", fixed.GROUP]):
            assert cli.main([*words, "--node", ODD]) == cli.PARTIAL
            assert f"the answer of node '{ODD}' to List" in capsys.readouterr().err


def test_a_dump_has_what_others_say_and_names_who_failed(tmp_path, capsys):
    path = tmp_path / "dump.tar.gz"
    with _odd(_fails):
        assert cli.main(["dump", str(path), "--address", f"unix://{tmp_path}"]) == cli.PARTIAL
    assert f"without handles of {ODD}: ListHandles failed inside" in capsys.readouterr().err
    with tarfile.open(path) as archive:
        file = archive.extractfile("ep-runtime-dump/handles.json")
        assert file is not None
        document = json.load(file)
    assert {row["node"] for row in document["items"]} == {GOOD}
    assert [node["node"] for node in document["unreachable"]] == [ODD]


def test_the_screen_says_who_failed(capsys):
    with _odd(_fails), source.open_source(None, timeout_s=1.0) as daemon:
        shown = screen.Screen(board_samples.BoardSamples(daemon, None, None, 0.01), rows.Links())
        lines = "\n".join(line for line, _ in shown.lines(200, 24))
    assert f"node {ODD} at 10.17.3.103:7700 failed (ListTallies failed inside the daemon" in lines


def test_names_of_any_length_are_sorted():
    long = "1" * 5000  # int() accepts at most 4,300 digits
    names = [f"b{long}", "b10", f"b0{long}2", "b9", "b"]
    found = choosing.ordered([{"name": name} for name in names], "name", ())
    assert [row["name"] for row in found] == ["b", "b9", "b10", f"b{long}", f"b0{long}2"]


ALONE = [
    ("status", "--node", ODD),
    ("events", "--node", ODD, "--since", "1h"),
    ("groups", "--node", ODD, "-o", "wide", "--sort-by", "GROUP"),
    ("skew", "--node", ODD, "--interval", "0.001", "-o", "wide"),
]


@pytest.mark.parametrize("words", [*COMMANDS, *ALONE], ids=" ".join)
def test_any_values_in_a_nodes_answers_are_shown_or_its_failure(words, capsys):
    types = pb.DESCRIPTOR.services_by_name["AdminService"].methods_by_name
    for seed in range(4):
        numbers = random.Random(seed)
        models = [answer() for answer in fixed.ANSWERS.values()] if seed else []
        odd = OddMessages(numbers, *models)
        with _odd(lambda method, request, odd=odd: odd.message(types[method].output_type)):
            assert cli.main([*words]) in range(6)
            assert cli.main([*words, "-o", "json"]) in range(6)
    capsys.readouterr()


def test_a_status_after_a_recovery_has_no_time_left() -> None:
    recovery = {"under_way": False, "left_s": None}
    row = {"cluster": None, "drain": None, "recovery": recovery, "uptime_s": 1.0}
    assert admin_service._whole_status(row) == row
    recovery["under_way"] = True
    with pytest.raises(ValueError, match="a row without left_s"):
        admin_service._whole_status(row)
