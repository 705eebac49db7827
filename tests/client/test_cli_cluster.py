"""The reading commands in a cluster: every node's rows from any node, and nodes that are away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_places import place, plain_tcp
from daemon_fixtures import start_daemon, wait_until
from raw_client import Client, make_spec

from ep_runtime_client import cli
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import children

WAIT_S = 30.0


class Node:
    """A daemon of the cluster, and one command asked of it."""

    def __init__(self, name: str, role: str, address: str) -> None:
        self.name = name
        self.address = address
        self.directory = Path(tempfile.mkdtemp(prefix="ept-"))
        self._flags = (role, address, *plain_tcp(), "--node", name, "--drain-s", "0")
        self._clients: list[Client] = []
        self.start()

    def start(self) -> None:
        self.child: children.Child = start_daemon(self.directory, *self._flags)

    def group(self, name: str) -> None:
        client = Client(self.directory)
        self._clients.append(client)
        client.ready(make_spec(name=name))

    def link(self) -> Any:
        with source.open_source(f"unix://{self.directory}", timeout_s=WAIT_S) as daemon:
            return daemon.status()["cluster"]["link"]

    def ask(self, capsys: Any, *words: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
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
    """a, which coordinates, and b, which joined; each with a group of its own."""
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
    assert left.ask(capsys, "status", "--ready")[0] == 0  # the daemon itself is well
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
