"""`serve --config`, SIGHUP, and paths that are not the files the daemon expects."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import tracemalloc
from pathlib import Path

import cluster_places
import pytest
from harness import eventually

from ep_runtime import errors, files
from ep_runtime_client.daemons import addresses, runtime
from ep_runtime_server import config_file, main
from ep_runtime_server.base.events import EventFile
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.journal.file import MAGIC, Journal
from ep_runtime_server.journal.summary import summary


def parsed(path: Path, *words: str):
    return main._parse(["--config", str(path), *words])[1]


def test_flags_win_over_the_file_and_lists_add(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text(
        'allow-gid = [7]\nmax-host-bytes = "64M"\ndrain-s = 5\n'
        "metrics = 9470\nmetrics-detail = true\n"
    )
    found = parsed(path, "--drain-s", "1.5", "--allow-gid", "8")
    assert (found.allow_gid, found.drain_s, found.max_host_bytes) == ([7, 8], 1.5, "64M")
    assert (found.metrics, found.metrics_detail) == ("9470", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-host-byte = 1", "no use for 'max-host-byte'; did you mean 'max-host-bytes'"),
        ("ready-fd = 3", "no use for 'ready-fd'"),
        ("config = 'x'", "no use for 'config'"),
        ("allow-uid = 7", "allow-uid in .*: must be a list, got 7"),
        ("allow-uid = ['root']", "allow-uid in .*'root'"),
        ("drain-s = 'soon'", "drain-s in .*'soon'"),
        ("metrics-detail = 1", "metrics-detail in .*: must be true or false, got 1"),
        ("log-level = 'loud'", "log-level in .*: must be one of debug, info"),
        ("max-layers-per-uid = 0", "max-layers-per-uid in .*: must be a number from 1 on"),
        ("dir = true", "dir in .*: must be a number or a text"),
        ("dir", "cannot read"),
    ],
)
def test_what_a_file_may_not_say_is_named(tmp_path, text, message):
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(errors.InvalidArgumentError, match=message):
        parsed(path)


def test_a_printed_file_says_the_same(tmp_path, capsys):
    words = ["--dir", str(tmp_path / "d"), "--allow-uid", "7", "--max-host-bytes", "64M"]
    assert main.main([*words, "--max-retain-s", "60", "--print-config"]) == 0
    path = tmp_path / "serve.toml"
    path.write_text(capsys.readouterr().out)
    parser, before = main._parse([*words, "--max-retain-s", "60"])
    assert config_file.changes(parser, before, parsed(path)) == []
    path.write_text('max-host-bytes = "much"\n')
    assert main.main(["--config", str(path), "--print-config"]) == 1
    assert "got 'much'" in capsys.readouterr().err


def test_sighup_reads_what_can_change_and_names_what_cannot(daemon_process, tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text("allow-uid = [7]\n")
    daemon = daemon_process("--config", str(path), directory=tmp_path / "d")

    def told(text: str) -> str:
        path.write_text(text)
        before = len(daemon.event_kinds())
        daemon.popen.send_signal(signal.SIGHUP)
        eventually(lambda: len(daemon.event_kinds()) > before)
        return daemon.ask("ListEvents").events[-1].message

    new = (
        "allow-uid = [7, 8]\nmax-sessions-per-uid = 1\nmetrics-detail = true\n"
        'max-host-bytes = "64M"\nidle-exit-s = 1000\n'
    )
    said = told(new)
    changed = "allow-uid, max-host-bytes, max-sessions-per-uid, idle-exit-s"
    assert f"changed {changed}; wants a restart: metrics-detail" in said
    limits = daemon.status().user_limits
    assert (limits.max_sessions, limits.max_host_bytes) == (1, 32 << 20)
    assert daemon.status().pools[0].limit_bytes == 64 << 20
    daemon.client()
    with pytest.raises(errors.PoolExhaustedError):
        daemon.client()
    assert "no use for 'nonsense'" in told("nonsense = 1\n")
    assert daemon.status().user_limits.max_sessions == 1
    assert "changed nothing; wants a restart: metrics-detail" in told(new)


MIB = 1 << 20
ENDED_S = 20.0  # of a daemon that does not wait at all


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


KINDS = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": _socket,
    "a symbolic link": lambda path: path.symlink_to("/dev/zero"),
    "a character device": lambda path: path.symlink_to("/dev/zero"),  # if links are followed
    "a regular file": Path.touch,
}
OF_DIRECTORY = [
    *(
        (name, kind)
        for name in ("lock", "journal", "events", "cluster")
        for kind in list(KINDS)[:4]
    ),
    *((name, "a directory") for name in ("api.sock", "fd.sock", "admin.sock", "rpc.sock")),
    *(("admin.sock", kind) for kind in ("a FIFO", "a symbolic link", "a regular file")),
]
GIVEN = ("--secret", "--cluster", "--tls-cert", "--tls-key", "--tls-ca")
FOLLOWED = ("a FIFO", "a directory", "a socket", "a character device")


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="epo-") as name:
        yield Path(name)


@pytest.mark.parametrize(("name", "kind"), OF_DIRECTORY)
def test_a_daemon_says_what_is_in_the_place_of_its_file_and_ends(daemon_process, place, name, kind):
    KINDS[kind](place / name)
    options = ("--coordinator", cluster_places.place(), *cluster_places.plain_tcp())
    daemon = daemon_process(*options, directory=place, ready=False)
    code, said = daemon.ended(ENDED_S)
    line = said.splitlines()[-1]
    assert code == main.EXIT_CANNOT_SERVE
    assert "Traceback" not in said
    assert f"{place / name}" in line
    assert kind in line
    assert os.path.lexists(place / name)


@pytest.mark.parametrize("kind", FOLLOWED)
@pytest.mark.parametrize("flag", GIVEN)
def test_a_file_that_a_flag_names_must_be_one(place, flag, kind):
    path = place / "file"
    KINDS[kind](path)
    pem = place / "pem"
    pem.write_text("-----BEGIN CERTIFICATE-----\nPRIVATE KEY-----\n")
    words = ["--dir", str(place), "--join", "127.0.0.1:7"]
    if flag == "--secret":
        words += ["--insecure", "--secret", str(path)]
    elif flag == "--cluster":
        words = ["--dir", str(place), "--cluster", str(path), *cluster_places.plain_tcp()]
    else:
        for name in GIVEN[2:]:
            words += [name, str(path if name == flag else pem)]
    with pytest.raises(errors.InvalidArgumentError, match=f"{flag}: .*{path}: it is {kind}"):
        main.make_config(main.build_parser().parse_args(words))


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a socket"])
@pytest.mark.parametrize("name", ["start.lock", "daemon.log"])
def test_a_daemon_of_the_node_says_what_it_cannot_use(place, monkeypatch, name, kind):
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(place))
    (place / "node").mkdir()
    KINDS[kind](place / "node" / name)
    with pytest.raises(errors.RuntimeUnavailableError, match=f"/node/{name}: .*{kind}"):
        runtime.open_runtime(addresses.parse_address("node"), ENDED_S)


def sparse(path: Path, start: bytes = b"") -> Path:
    path.write_bytes(start)
    os.truncate(path, 1024 * MIB)
    return path


@pytest.mark.parametrize(
    "read",
    [
        lambda path: Journal(sparse(path), Failpoints()).close(),
        lambda path: Journal(sparse(path, MAGIC), Failpoints()).close(),
        lambda path: summary(sparse(path, MAGIC)),
        lambda path: list(EventFile(sparse(path)).read()),
    ],
)
def test_a_file_of_a_gigabyte_of_nothing_is_not_read_whole(tmp_path, read):
    tracemalloc.start()
    try:
        read(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 200 * MIB
    finally:
        tracemalloc.stop()


def test_files_are_read_up_to_their_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert files.read(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="it must have at most 9 bytes, got 10"):
        files.read(path, 9)
