"""The command against a real daemon: JSON that scripts may rely on, tables, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import signal
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import raw_client
from cases import SMALL
from child_programs import command, run_python
from daemon_fixtures import WAIT_S, start_daemon, wait_until

import ep_runtime as ep
from ep_runtime import wire
from ep_runtime.v1 import admin_service_pb2 as messages
from ep_runtime.v1 import fd_socket_pb2
from ep_runtime_client import cli
from ep_runtime_client.cli.daemon import probe, source
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.addresses import SocketDirectory

_NOBODY = 65534

# Keys of one item, in order, after "node". Removing or changing a key raises schema_version; new
# keys may come between. An event has no node, because one node is asked for events.
_KEYS = {
    "sessions": "session_id state uid pid job labels process_index client_version groups "
    "create_time age_s since_heartbeat_s progress since_end_s",
    "groups": "name job uid generation state window_bytes board_bytes create_time retained_left_s "
    "epoch attempt age_s world_size ep_size mesh_axes pids num_layers num_handles total_bytes "
    "poison_reason late_ranks wanted_ranks nccl_version nccl_state ep_axis outer_axes num_experts "
    "hidden_size "
    "max_tokens_per_rank "
    "recv_capacity_per_rank max_top_k max_token_dtype alignment lanes on_overflow "
    "combine_precision transport partitioning op_timeout_s retain_s num_sms node_size workspace "
    "overlap members",
    "layers": "name group job uid generation top_k alignment in_flight num_experts hidden_size "
    "num_layers base_id handle_base",
    "handles": "layer handle index group job uid generation pids state last_op epoch lane calls "
    "rows dropped_rows age_s rounds",
    "buffers": "buffer_id bytes device kind state group job uid generation world_rank mapped_by "
    "age_s owner",
    "events": "sequence time kind session_id group message fields_json",
}


@pytest.fixture
def group(address: str, mesh: Any) -> Iterator[ep.Group]:
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as session:
        settings = SMALL | {"outer_axes": "dp", "workspace": 1.25}
        group = session.create_group("moe", mesh, **settings)
        group.register_layer("first", top_k=2, in_flight=2)
        group.register_layer_stack("stack", 2, top_k=1)
        yield group


@pytest.fixture
def ask(address: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process; returns its exit code and its output."""

    def run(*words: str) -> tuple[int, str]:
        code = cli.main([words[0], "--address", address, *words[1:]])
        captured = capsys.readouterr()
        return code, captured.out if code == 0 else captured.err

    return run


@pytest.mark.parametrize("name", sorted(_KEYS))
def test_json_has_these_keys(ask: Any, group: ep.Group, name: str) -> None:
    code, text = ask(name, "-o", "json")
    document = json.loads(text)
    assert code == 0
    assert (document["schema_version"], document["kind"]) == (1, name)
    assert document["items"]
    for item in document["items"]:
        wanted = ["node"] * (name != "events") + _KEYS[name].split()
        assert [key for key in item if key in wanted] == wanted


def test_json_values_of_a_group(ask: Any, group: ep.Group) -> None:
    (item,) = json.loads(ask("groups", "moe", "-o", "json")[1])["items"]
    wanted = {
        "name": "moe",
        "job": "tests",
        "uid": os.geteuid(),
        "state": "READY",
        "generation": group.generation,
        "world_size": 8,
        "ep_size": 4,
        "mesh_axes": {"dp": 2, "ep": 4},
        "pids": [os.getpid()],
        "num_layers": 3,
        "num_handles": 4,
        "transport": "MEMFD",
        "on_overflow": "DROP",
        "poison_reason": "",
        "retain_s": 60.0,
        "workspace": 1.25,
    }
    assert {key: item[key] for key in wanted} == wanted
    assert item["total_bytes"] == item["board_bytes"] + 8 * item["window_bytes"]
    assert [member["world_rank"] for member in item["members"]] == list(range(8))


@pytest.mark.parametrize(
    ("name", "headings"),
    [
        ("sessions", "SESSION STATE JOB USER PID GROUPS AGE BEAT"),
        ("groups", "GROUP JOB USER STATE LATE GEN RANKS EP LAYERS HANDLES BYTES PIDS AGE"),
        ("layers", "LAYER GROUP JOB USER TOP-K ALIGN HANDLES STACK GEN"),
        ("handles", "LAYER HANDLE LANE GEN STATE JOB USER PIDS AGE LAST-OP EPOCH"),
        ("buffers", "BUFFER BYTES DEVICE GPU KIND STATE OWNER USER MAPPED"),
        ("events", "SEQ TIME KIND SESSION GROUP MESSAGE"),
    ],
)
def test_tables_have_these_columns(ask: Any, group: ep.Group, name: str, headings: str) -> None:
    code, text = ask(name)
    assert code == 0
    assert text.splitlines()[0].split() == headings.split()
    assert "\x1b" not in text
    wide = ask(name, "-o", "wide")[1]
    assert len(wide.splitlines()[0].split()) > len(headings.split())


def test_groups_wide_names_transport_nccl_and_retention(ask: Any, group: ep.Group) -> None:
    lines = ask("groups", "-o", "wide")[1].splitlines()
    assert {"TRANSPORT", "NODESIZE", "NCCL", "NCCL-STATE", "RETAIN"} <= set(lines[0].split())
    assert "MEMFD" in lines[1].split()


def test_a_name_describes_one_object(ask: Any, group: ep.Group) -> None:
    code, text = ask("layers", "stack")
    assert code == 0
    pairs = dict(line.split(None, 1) for line in text.splitlines())
    assert (pairs["name"], pairs["num_layers"], pairs["top_k"]) == ("stack", "2", "1")
    code, text = ask("handles", "first")
    assert len(text.splitlines()) == 3  # headings and two handles


def test_a_name_that_is_not_there_is_usage_and_lists_what_is(ask: Any, group: ep.Group) -> None:
    code, text = ask("layers", "second")
    assert code == 1
    assert "no layers named 'second'; there are: first, stack" in text


def test_status_is_one_screen(ask: Any, group: ep.Group, address: str) -> None:
    code, text = ask("status")
    assert code == 0
    assert "SERVING" in text
    assert address in text
    assert "journal" in text
    assert text.splitlines()[-1] == "nothing is late, nobody is silent"
    document = json.loads(ask("status", "-o", "json")[1])
    wanted = {"state": "SERVING", "num_sessions": 1, "num_groups": 1, "num_handles": 4}
    assert {key: document[key] for key in wanted} == wanted
    assert document["late_ranks"] == []


def test_a_drained_daemon_is_unhealthy_and_lives_until_it_is_taken_back(
    ask: Any, admin: source.Source, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    def probed() -> tuple[int, int]:
        live, ready = (cli.main(["status", f, "--address", address]) for f in ("--live", "--ready"))
        return live, ready

    admin.call("Drain", messages.DrainRequest())
    assert cli.main(["status", "--address", address]) == 3
    out = capsys.readouterr().out
    assert "DRAINING" in out
    assert f"by uid {os.geteuid()} (pid {os.getpid()}) with ep-runtime drain" in out
    assert "`ep-runtime undrain` admits again" in out
    assert probed() == (0, 3)
    assert "not ready: it is drained by uid" in capsys.readouterr().err
    assert cli.main(["doctor", "-o", "wide", "--address", address]) == 3
    assert "`ep-runtime undrain` admits sessions" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["undrain", "--address", address]) == 0
    assert probed() == (0, 0)
    assert cli.main(["undrain", "--address", address]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "was not drained"


def test_a_probe_loads_neither_grpc_nor_protobuf_and_writes_what_the_stubs_would(
    address: str,
) -> None:
    heavy = ("grpc", "google.protobuf", "ep_runtime.wire", "ep_runtime_client.cli.machine.gpus")
    program = (
        "import sys; from ep_runtime_client import cli; "
        f"code = cli.main(['status', '--ready', '--address', '{address}']); "
        f"print(code, [name for name in {heavy} if name in sys.modules])"
    )
    done = run_python("-c", program)
    assert (done.stdout, done.stderr) == ("ready\n0 []\n", "")
    request = fd_socket_pb2.FdRequest(probe=fd_socket_pb2.Probe())
    admits = fd_socket_pb2.FdReply(condition=fd_socket_pb2.Condition())
    assert (
        request.SerializeToString(),
        admits.SerializeToString(),
    ) == (probe.REQUEST, probe.ADMITS)
    assert probe.FD_SOCKET == wire.FD_SOCKET
    for told in ("é", "\n" + "é" * 200):
        reply = fd_socket_pb2.FdReply(condition=fd_socket_pb2.Condition(refusal=told))
        assert probe._NOT_NOW.fullmatch(reply.SerializeToString())[1].decode() == told


def test_drain_waits_for_the_last_session_says_what_is_left_and_ends_with_ctrl_c(
    address: str,
) -> None:
    words = ["drain", "--yes", "--wait", "--address", address]

    def start() -> tuple[subprocess.Popen[str], str]:
        waiting = subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        return waiting, next(line for line in waiting.stderr if line.startswith("draining:"))

    with ep.connect(address, job="tests", timeout_s=WAIT_S):
        waiting, line = start()
        assert line == "draining: 1 sessions left (tests 1)\n"
        waiting.send_signal(signal.SIGINT)
        assert "`ep-runtime undrain` takes that back" in waiting.communicate(timeout=WAIT_S)[1]
        assert waiting.returncode == 3
        waiting, _ = start()
    waiting.communicate(timeout=WAIT_S)
    assert waiting.returncode == 0
    assert cli.main([*words, "--deadline", "60"]) == 0
    assert cli.main(["undrain", "--address", address]) == 0


@pytest.mark.parametrize(
    ("words", "breaks"),
    [
        (["reclaim", "moe"], "group moe of job tests"),
        (["drain", "--shutdown"], "sessions"),
    ],
)
def test_orders_without_yes_say_what_breaks_and_do_nothing(
    ask: Any, group: ep.Group, words: list[str], breaks: str
) -> None:
    code, text = ask(*words)
    assert code == 1
    assert breaks in text
    assert "--yes" in text
    group.check()
    assert ask("status", "--ready") == (0, "ready\n")


def test_fence_and_reclaim_report_what_they_did(ask: Any, group: ep.Group) -> None:
    session_id = group.session.session_id
    code, text = ask("fence", "nobody", "--yes")
    assert (code, session_id in text) == (1, True)
    code, text = ask("fence", session_id, "--yes", "--reason", "too loud", "-o", "json")
    assert (code, json.loads(text)["groups"]) == (0, ["moe"])
    wait_until(lambda: not group.session.alive, "the client hears of the fence")
    with pytest.raises(ep.SessionFencedError, match="too loud"):
        group.session.group("moe")
    for yes in ([], ["--yes"]):
        code, text = ask("reclaim", "moe", *yes)
        assert (code, "no group named 'moe'; there is none" in text) == (1, True)


def test_a_name_of_several_jobs_needs_the_job(ask: Any, group: ep.Group, address: str) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    directory = Path(address.removeprefix("unix://"))
    with contextlib.closing(raw_client.Client(directory, job="other")) as other:
        other.create(raw_client.make_spec())
        wanted = f"choose by one of: --job other --user {user} and --job tests --user {user}"
        for words in (["describe", "group"], ["reclaim"]):
            code, text = ask(*words, "moe")
            assert (code, wanted in text) == (1, True), text
        code, text = ask("describe", "group", "tests/moe", "--user", user)
        assert (code, "job other" in text, "generation 1 begins" in text) == (0, False, True)
        assert not re.search("^ .*group moe", text, re.MULTILINE)
        (told,) = json.loads(ask("describe", "group", "other/moe", "-o", "json")[1])["items"]
        assert {json.loads(one["fields_json"])["job"] for one in told["events"]} == {"other"}
        other.goodbye()


def test_reclaim_of_a_live_group_counts_its_bytes(ask: Any, group: ep.Group) -> None:
    code, text = ask("reclaim", "moe", "--job", "tests", "--yes", "-o", "json")
    document = json.loads(text)
    assert (code, document["kind"], document["groups"]) == (0, "reclaim", ["moe"])
    assert document["freed_bytes"] + document["quarantined_bytes"] > 0


def test_watch_repeats_until_interrupted(address: str, group: ep.Group) -> None:
    words = command("handles", "--watch", "0.05", "-o", "json", "--address", address)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        documents = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    assert all(len(document["items"]) == 4 for document in documents)


def test_a_closed_pipe_is_no_error(address: str, group: ep.Group) -> None:
    words = command("events", "--watch", "0.05", "-o", "json", "--address", address)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, text=True, **pipes)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (0, "")


def _then_as_nobody(program: str, address: str) -> subprocess.CompletedProcess[str]:
    """Runs a program as we are, then again in the same process as another user.

    The first run imports what the second needs: another user may not read this checkout.
    """
    words = (
        "import os, sys\n"
        "import ep_runtime as ep\n"
        "from ep_runtime_client import cli\n"
        f"def program():\n{textwrap.indent(program, '    ')}\n"
        "program()\n"
        f"os.setgroups([]); os.setgid({_NOBODY}); os.setuid({_NOBODY})\n"
        "program()\n"
    )
    return run_python("-c", words, address)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_is_denied(address: str, daemon: Any) -> None:
    done = _then_as_nobody(
        "code = cli.main(['status', '--address', sys.argv[1]])\nprint(code, file=sys.stderr)",
        address,
    )
    served, *denied, code = done.stderr.splitlines()
    assert (served, code) == ("0", "4"), done.stderr
    assert "may not open" in " ".join(denied)
    done = _then_as_nobody(
        "try:\n"
        "    ep.connect(sys.argv[1]).close()\n"
        "    print('served')\n"
        "except ep.PermissionDeniedError as error:\n"
        "    print(error.fields['uid'])",
        address,
    )
    assert done.stdout.split() == ["served", f"{_NOBODY}"], done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_user_who_is_served_reads_and_orders_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="epu-") as name:
        os.chmod(name, 0o755)
        daemon = start_daemon(Path(name) / "d", "--allow-uid", str(_NOBODY))
        done = _then_as_nobody(
            # Without --yes drain only reports what it would do, but has loaded the code to do it.
            "drain = 'drain --yes' if os.geteuid() else 'drain'\n"
            "for words in ('status', 'handles', 'sessions', drain, 'version'):\n"
            "    code = cli.main([*words.split(), '--address', sys.argv[1]])\n"
            "    print(words, code, file=sys.stderr)",
            f"unix://{daemon.directory}",
        )
        assert daemon.stop() == 0
    theirs = done.stderr.split("version 0\n", 1)[1]
    for said in ("status 0", "handles 0", "sessions 0", "drain --yes 4", "admin.sock", "version 0"):
        assert said in theirs


def test_doctor_finds_this_machine_fit(ask: Any, daemon: Any) -> None:
    code, text = ask("doctor", "-o", "json")
    document = json.loads(text)
    states = {item["check"]: item["state"] for item in document["items"]}
    assert (code, document["healthy"]) == (0, True)
    assert (states["native library"], states["daemon"]) == ("OK", "OK")
    assert "CHECK" in ask("doctor")[1]
    (found,) = [item["found"] for item in json.loads(text)["items"] if item["check"] == "directory"]
    assert found == str(daemon.directory)


def test_version_asks_the_daemon(ask: Any, daemon: Any) -> None:
    document = json.loads(ask("version", "-o", "json")[1])
    assert document["client_version"] == document["server_version"] == ep.__version__


def test_serve_becomes_the_daemon_and_ends_on_sigterm(directory: Path) -> None:
    words = command("serve", "--dir", directory, "--max-host-bytes", "64M")
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    try:
        address = f"unix://{directory}"
        wait_until(
            lambda: cli.main(["status", "--ready", "--address", address]) == 0, "the daemon serves"
        )
        with source.open_source(address, timeout_s=WAIT_S) as daemon:
            assert daemon.status()["pid"] == process.pid
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    with (
        pytest.raises(ep.RuntimeUnavailableError),
        transport.fd_socket(SocketDirectory(directory), 1.0),
    ):
        pass
