"""What stands under the names of the daemon's files, and is none: a line, and an end."""

from __future__ import annotations

import os
import socket
import tempfile
import tracemalloc
from pathlib import Path

import cluster_places
import pytest

from ep_runtime import errors, files
from ep_runtime_client.daemons import addresses, runtime
from ep_runtime_server import main
from ep_runtime_server.base.event_file import EventFile
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.journal.file import MAGIC, Journal
from ep_runtime_server.journal.summary import summary

MIB = 1 << 20
ENDED_S = 20.0  # of a daemon that does not even wait


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


KINDS = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": _socket,
    "a symbolic link": lambda path: path.symlink_to("/dev/zero"),
    "a character device": lambda path: path.symlink_to("/dev/zero"),  # where links are followed
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
    with pytest.raises(OSError, match="it has 10 bytes, and may have 9"):
        files.read(path, 9)
