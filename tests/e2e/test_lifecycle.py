"""Processes that come and go: embedded daemons, SIGKILL, retained windows, fork, two sessions."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from child_programs import WITHOUT_JAX, Start
from daemon_fixtures import wait_gone, wait_until
from harness import memfds_of

import ep_runtime as ep
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime

_EMBEDDED = """
session = ep.connect("embedded")
directory = session.address.removeprefix("unix://")
say(daemon=session.daemon_pid, directory=directory, address=session.address)
"""


def test_an_embedded_daemon_ends_with_close(run_program: Start) -> None:
    program = run_program(
        _EMBEDDED + "hear(); session.close(); say(closed=True); hear()", prologue=WITHOUT_JAX
    )
    started = program.heard()
    assert Path(started["directory"]).stat().st_mode & 0o777 == 0o700
    program.tell()
    assert program.heard() == {"closed": True}
    wait_gone(started["daemon"])
    assert not Path(started["directory"]).exists()
    program.end()


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("raise KeyError('on purpose')", 1), ("os._exit(7)", 7)],
)
def test_an_embedded_daemon_ends_with_its_process(
    run_program: Start, ending: str, code: int
) -> None:
    program = run_program(_EMBEDDED + "sys.stderr.close()\n" + ending, prologue=WITHOUT_JAX)
    started = program.heard()
    assert program.finish() == code
    wait_gone(started["daemon"])
    wait_until(lambda: not Path(started["directory"]).exists(), "the directory is removed")


def test_an_embedded_daemon_outlives_the_thread_that_connected(run_program: Start) -> None:
    program = run_program(
        "import threading\n"
        "found = []\n"
        "thread = threading.Thread(target=lambda: found.append(ep.connect('embedded')))\n"
        "thread.start(); thread.join()\n"
        "group = found[0].create_group('g', mesh_of(), **ARGUMENTS)\n"
        "group.check(); say(state=group.describe()['state']); hear()\n"
    )
    assert program.heard() == {"state": "READY"}
    program.end()


def test_the_default_is_embedded_without_a_daemon_and_the_daemon_with_one(
    run_program: Start, directory: Path
) -> None:
    text = "session = ep.connect()\nsay(address=session.address, child=session.daemon_pid)\nhear()"
    how = {"prologue": WITHOUT_JAX, "RUNTIME_DIRECTORY": str(directory)}
    alone = run_program(text, **how)
    assert alone.heard()["child"] is not None
    daemon = runtime.Child.start(directory, [])
    daemon.wait_ready(60)
    try:
        beside = run_program(text, **how)
        assert beside.heard() == {"address": f"unix://{directory}", "child": None}
        for program in (alone, beside):
            program.end()
    finally:
        assert daemon.stop() == 0


def test_a_node_daemon_is_shared_and_ends_after_the_last(
    run_program: Start, directory: Path
) -> None:
    text = (
        "session = ep.connect('node')\n"
        "say(address=session.address, child=session.daemon_pid); hear()"
    )
    how = {"prologue": WITHOUT_JAX, "RUNTIME_DIRECTORY": str(directory)}
    programs = [run_program(text, **how) for _ in range(3)]
    heard = [program.heard() for program in programs]
    assert {row["address"] for row in heard} == {f"unix://{directory}/node"}
    started = [row["child"] for row in heard if row["child"] is not None]
    assert len(started) == 1
    for program in programs:
        program.end()
    wait_gone(started[0])


_JOIN = """
session = ep.connect(sys.argv[1] if len(sys.argv) > 1 else None, job="training")
group = session.create_group("g", mesh_of(), **ARGUMENTS, retain_s=60)
layer = group.register_layer("moe/0", top_k=2, in_flight=2)
say(generation=group.generation, reattached=group.reattached, id=layer.id)
hear()
"""


_BY_NAME = """
session = ep.connect(job="training")
group = session.group("g")
layer = group.layer("moe/0")
say(generation=group.generation, reattached=group.reattached, id=layer.id, top_k=layer.top_k,
    in_flight=layer.in_flight, same=layer.group is group, spec=group.spec.fingerprint)
hear()
"""


def test_a_killed_client_comes_back_to_its_windows(
    run_program: Start, address: str, admin: source.Source, daemon: runtime.Child
) -> None:
    """A process that attaches by the group's name alone has the same layer."""
    told = _JOIN.replace("id=layer.id", "id=layer.id, spec=group.spec.fingerprint")
    first = run_program(told, EP_RUNTIME_ADDRESS=address)
    before = first.heard()
    assert not before["reattached"]
    buffers = {(row["buffer_id"], row["bytes"]) for row in admin.buffers()}
    memory = memfds_of(daemon.pid)
    assert len(memory) == 5  # four windows and a board
    first.kill()
    wait_until(lambda: admin.groups()[0]["state"] == "RETAINED", "the group is retained")
    assert {row["state"] for row in admin.buffers()} == {"RETAINED"}
    second = run_program(_JOIN, EP_RUNTIME_ADDRESS=address)
    after = second.heard()
    assert after["reattached"]
    assert after["generation"] > before["generation"]
    assert after["id"] == before["id"]
    now = admin.buffers()
    assert len(now) == len(buffers)
    assert sum(row["bytes"] for row in now) == sum(size for _, size in buffers)
    assert memfds_of(daemon.pid) == memory
    second.kill()
    wait_until(lambda: admin.groups()[0]["state"] == "RETAINED", "the group is retained")
    third = run_program(_BY_NAME, EP_RUNTIME_ADDRESS=address)
    after = third.heard()
    assert (after["id"], after["spec"]) == (before["id"], before["spec"])
    assert (after["top_k"], after["in_flight"]) == (2, 2)
    assert after["reattached"]
    assert after["same"]
    third.end()


def test_leaving_without_close_retains_and_leaving_the_with_block_frees(
    run_program: Start, address: str, admin: source.Source
) -> None:
    leaves = run_program(_JOIN, EP_RUNTIME_ADDRESS=address)
    leaves.heard()
    leaves.end()
    wait_until(
        lambda: [row["state"] for row in admin.groups()] == ["RETAINED"], "the group is retained"
    )
    closes = run_program(_JOIN + "\nsession.close()\n", EP_RUNTIME_ADDRESS=address)
    assert closes.heard()["reattached"]
    closes.end()
    assert admin.groups() == []
    wait_until(lambda: not admin.buffers(), "the memory is freed")


_FORK = """
session = ep.connect(job="parent")
group = session.create_group("g", mesh_of(), **ARGUMENTS)
layer = group.register_layer("a", top_k=1)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    found = []
    for call in (lambda: session.create_group("h", mesh_of(), **ARGUMENTS),
                 lambda: group.register_layer("b", top_k=1), lambda: layer.group):
        try:
            call()
            found.append("worked")
        except ep.EpRuntimeError as error:
            found.append(type(error).__name__)
    session.close()
    with ep.connect("none") as own:
        found.append(own.job)
    os.write(writer, json.dumps(found).encode())
    os._exit(0)
os.close(writer)
found = b""
while part := os.read(reader, 4096):
    found += part
_, status = os.waitpid(child, 0)
group.check()
again = group.register_layer("b", top_k=1)
say(child=json.loads(found), status=status, alive=session.alive, same=again.group is group)
hear()
"""


def test_a_forked_child_drops_the_session_and_the_parent_keeps_it(
    run_program: Start, address: str, admin: source.Source
) -> None:
    program = run_program(_FORK, EP_RUNTIME_ADDRESS=address)
    heard = program.heard()
    assert heard["child"] == [
        "PermissionDeniedError",
        "PermissionDeniedError",
        "StaleHandleError",
        str(heard["child"][3]),
    ]
    assert (heard["status"], heard["alive"], heard["same"]) == (0, True, True)
    assert [row["state"] for row in admin.sessions()] == ["ACTIVE"]
    assert admin.groups()[0]["state"] == "READY"
    program.end()


def test_a_forked_child_that_lives_on_does_not_hold_an_embedded_daemon(
    run_program: Start,
) -> None:
    program = run_program(
        _EMBEDDED + "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.pause()\n"
        "say(child=child); hear()\n",
        prologue=WITHOUT_JAX,
    )
    started = program.heard()
    child = program.heard()["child"]
    program.kill()
    try:
        wait_gone(started["daemon"])
        wait_until(lambda: not Path(started["directory"]).exists(), "the directory is removed")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_checkout_underfoot_is_not_imported_by_the_child(
    run_program: Start, tmp_path: Path
) -> None:
    """The daemon's packages must come from the client's environment, not from the directory."""
    for name in ("ep_runtime_server", "ep_runtime", "grpc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported by accident')")
    program = run_program(
        f"os.chdir({str(tmp_path)!r})\n" + _EMBEDDED + "hear()", prologue=WITHOUT_JAX
    )
    assert program.heard()["daemon"] is not None
    program.end()


def test_a_daemon_that_cannot_start_says_why(directory: Path) -> None:
    child = runtime.Child.start(directory, ["--max-host-bytes", "no size"])
    with pytest.raises(ep.RuntimeUnavailableError, match="exit code 1(.|\n)*no size"):
        child.wait_ready(60)
