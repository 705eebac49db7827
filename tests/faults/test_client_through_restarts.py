"""A client whose daemon dies anywhere between connect and close only takes longer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from child_programs import WITHOUT_JAX, Start
from daemon_fixtures import start_daemon, wait_until

from ep_runtime_client.cli.daemon import source

# No JAX: groups are formed like Session.create_group does it, with all ranks in this process.
_PROLOGUE = (
    WITHOUT_JAX
    + """
from ep_runtime import layer_specs, specs
from ep_runtime_client.groups import forming, registrations

spec = specs.make_group_spec(
    name="g", mesh_axes=(("ep", 4),), ep_axis="ep", num_experts=8, hidden_size=64,
    max_tokens_per_rank=64, max_top_k=2, retain_s=60.0)
"""
)
_PROGRAM = """
session = ep.connect(job="kills", timeout_s=60)
formed = forming.form(session._client, spec, forming.Claim((0, 1, 2, 3)), replace=False)
layers = [layer_specs.check_layer(spec, layer_specs.LayerSpec(f"l{i}", top_k=2)) for i in range(3)]
found, _ = registrations.register(session._client, spec, formed.generation, layers, [])
again, _ = registrations.register(session._client, spec, formed.generation, layers, [])
say(generation=formed.generation, bases=[item.handle_base for item in found],
    same=[item.base_id for item in found] == [item.base_id for item in again])
sys.stdin.readline()
forming.leave(session._client, "g", formed.generation, formed.native_group)
session.close()
say(closed=True)
sys.stdin.readline()
"""


def _points(often: list[tuple[str, int]], rarely: list[tuple[str, int]]) -> list[object]:
    """(failpoint, which pass of it kills); the second list is for long runs."""
    return [*often, *(pytest.param(*point, marks=pytest.mark.slow) for point in rarely)]


_POINTS = _points(
    [("rpc.before_answer", 3), ("fd.after_send", 1)],
    [
        *(("journal.before_write", times) for times in (3, 4, 5)),
        *(("journal.after_write", times) for times in (3, 4, 5)),
        *(("rpc.before_answer", times) for times in (2, 4, 5, 6)),
        ("fd.before_send", 1),
    ],
)


@pytest.mark.parametrize(("point", "times"), _POINTS)
def test_a_daemon_killed_at_a_change_is_not_noticed(
    run_program: Start, directory: Path, point: str, times: int
) -> None:
    # Kills start with the first group, because connect() does not wait for a dead daemon.
    daemon = start_daemon(directory, "--testing", f"failpoint:{point}=kill:{times}")
    program = run_program(_PROGRAM, prologue=_PROLOGUE, EP_RUNTIME_ADDRESS=f"unix://{directory}")
    wait_until(lambda: daemon.ended, "the daemon is killed")
    assert daemon.stop() == -signal.SIGKILL
    daemon = start_daemon(directory)
    said = program.heard()
    assert said["same"]
    assert said["bases"] == [0, 1, 2]
    with source.open_source(f"unix://{directory}", timeout_s=60) as admin:
        (group,) = admin.groups()
        assert (group["state"], group["generation"]) == ("READY", said["generation"])
        assert len(admin.buffers()) == 5
        program.tell()
        assert program.heard() == {"closed": True}
        assert admin.groups() == []
        wait_until(lambda: not admin.buffers(), "the memory is freed")
        program.end()
    assert daemon.stop() == 0, daemon.log_tail(50)


_TOGETHER = _points(
    [("rpc.before_answer", 4)],
    [
        *(("journal.after_write", times) for times in (5, 6)),
        *(("rpc.before_answer", times) for times in (3, 6, 8)),
        ("fd.after_send", 2),
    ],
)


@pytest.mark.parametrize(("point", "times"), _TOGETHER)
def test_processes_that_form_a_group_meet_again_after_a_kill(
    run_program: Start, directory: Path, point: str, times: int
) -> None:
    daemon = start_daemon(directory, "--testing", f"failpoint:{point}=kill:{times}")
    program = _PROGRAM.replace("(0, 1, 2, 3)", "RANKS").replace(
        "formed = ", "say(connected=True)\nsys.stdin.readline()\nformed = "
    )
    programs = [
        run_program(
            program,
            prologue=_PROLOGUE + f"RANKS = ({first}, {first + 1})\n",
            EP_RUNTIME_ADDRESS=f"unix://{directory}",
        )
        for first in (0, 2)
    ]
    assert [program.heard() for program in programs] == [{"connected": True}] * 2
    for program in programs:
        program.tell()
    wait_until(lambda: daemon.ended, "the daemon is killed")
    assert daemon.stop() == -signal.SIGKILL
    daemon = start_daemon(directory)
    said = [program.heard() for program in programs]
    assert said[0] == said[1]
    assert said[0]["bases"] == [0, 1, 2]
    with source.open_source(f"unix://{directory}", timeout_s=60) as admin:
        (group,) = admin.groups()
        assert (group["state"], group["generation"]) == ("READY", said[0]["generation"])
        for program in programs:
            program.tell()
        assert [program.heard() for program in programs] == [{"closed": True}] * 2
        wait_until(lambda: not admin.groups() and not admin.buffers(), "the memory is freed")
    for program in programs:
        program.end()
    assert daemon.stop() == 0, daemon.log_tail(50)


_CLOSED_ALONE = """
session = ep.connect(job="kills", timeout_s=60)
formed = forming.form(session._client, spec, forming.Claim((0, 1, 2, 3)), replace=False)
say(generation=formed.generation)
sys.stdin.readline()
if "group" in CLOSES:
    forming.leave(session._client, "g", formed.generation, formed.native_group)
if "session" in CLOSES:
    session.close()
say(closed=True)
sys.stdin.readline()
if AGAIN:
    session = ep.connect(job="kills", timeout_s=60)
    formed = forming.form(session._client, spec, forming.Claim((0, 1, 2, 3)), replace=False)
    say(generation=formed.generation)
    sys.stdin.readline()
    session.close()
"""


_FORMS = """
session = ep.connect(job="ends", timeout_s=2)
say(connected=True)
try:
    forming.form(session._client, spec, forming.Claim((0, 1)), replace=False)
except ep.RuntimeUnavailableError as error:
    say(text=str(error))
sys.stdin.readline()
"""


def test_who_waits_for_others_when_the_daemon_ends_hears_of_them(
    run_program: Start, directory: Path
) -> None:
    daemon = start_daemon(directory, "--drain-s", "0")
    address = f"unix://{directory}"
    program = run_program(_FORMS, prologue=_PROLOGUE, EP_RUNTIME_ADDRESS=address)
    program.heard()
    with source.open_source(address, timeout_s=60) as admin:
        wait_until(admin.groups, "the group forms")
    assert daemon.stop() == 0
    told = program.heard()["text"]
    assert "while group 'g' formed: ranks [2, 3] of 4 were not claimed" in told
    assert f"ep-runtime serve --dir {directory}" in told


@pytest.mark.parametrize("closes", [("group",), ("session",), ("group", "session")])
def test_what_closed_while_the_daemon_was_away_is_given_back_when_it_returns(
    run_program: Start, directory: Path, closes: tuple[str, ...]
) -> None:
    address = f"unix://{directory}"
    daemon = start_daemon(directory)
    prologue = _PROLOGUE + f"CLOSES, AGAIN = {closes}, False\n"
    program = run_program(_CLOSED_ALONE, prologue=prologue, EP_RUNTIME_ADDRESS=address)
    program.heard()
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.stop()
    program.tell()
    assert program.heard() == {"closed": True}
    daemon = start_daemon(directory)
    with source.open_source(address, timeout_s=60) as admin:
        wait_until(lambda: not admin.groups() and not admin.buffers(), "group and memory are freed")
    program.end()
    assert daemon.stop() == 0, daemon.log_tail(50)


def test_a_process_that_left_while_the_daemon_was_away_comes_again_with_a_new_session(
    run_program: Start, directory: Path
) -> None:
    address = f"unix://{directory}"
    daemon = start_daemon(directory)
    prologue = _PROLOGUE + "CLOSES, AGAIN = ('session',), True\n"
    program = run_program(_CLOSED_ALONE, prologue=prologue, EP_RUNTIME_ADDRESS=address)
    before = program.heard()["generation"]
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.stop()
    program.tell()
    assert program.heard() == {"closed": True}
    daemon = start_daemon(directory)
    program.tell()
    assert program.heard()["generation"] > before
    with source.open_source(address, timeout_s=60) as admin:
        assert [group["state"] for group in admin.groups()] == ["READY"]
        program.tell()
        wait_until(lambda: not admin.groups() and not admin.buffers(), "the memory is freed")
    assert program.finish() == 0
    assert daemon.stop() == 0, daemon.log_tail(50)
