"""Another user in the daemon's place gets nothing, and the error tells the user what to do."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_process import Process

import ep_runtime as ep
from ep_runtime import wire
from ep_runtime.v1 import session_service_pb2
from ep_runtime_client import cli
from ep_runtime_client.daemons import addresses, transport

NOBODY = 65534
TIMEOUT_S = 0.5

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.fixture
def stranger() -> Iterator[Process]:
    """A process of another user that binds the three sockets and listens, as a daemon does."""
    process = Process()
    process.do("become", NOBODY)
    yield process
    process.kill()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the rights of /tmp that holds our default daemon's directory name."""
    path = Path(tempfile.mkdtemp(prefix="eps-"))
    path.chmod(0o1777)
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(path / "ep-runtime-0"))
    yield path
    shutil.rmtree(path)


CONNECTS: dict[str, Callable[[Path], Any]] = {
    "the default": lambda path: ep.connect(timeout_s=TIMEOUT_S),
    "an address": lambda path: ep.connect(f"unix://{path}", timeout_s=TIMEOUT_S),
    "node": lambda path: ep.connect("node", timeout_s=TIMEOUT_S),
}


@pytest.mark.parametrize("how", CONNECTS)
def test_a_squatted_directory_is_an_error_and_gets_no_byte(
    shared: Path, stranger: Process, how: str
) -> None:
    squatted = shared / "ep-runtime-0"
    stranger.do("squat", squatted)
    with pytest.raises(ep.PermissionDeniedError) as caught:
        CONNECTS[how](squatted)
    assert stranger.do("heard") == []
    assert caught.value.fields["uid"] == NOBODY
    for said in (f"{squatted} belongs to uid {NOBODY}", "?uid=UID", "XDG_RUNTIME_DIR"):
        assert said in str(caught.value)


def test_the_command_line_says_denied(shared: Path, stranger: Process, capsys: Any) -> None:
    stranger.do("squat", shared / "ep-runtime-0")
    assert cli.main(["status"]) == cli.DENIED
    assert f"belongs to uid {NOBODY}" in capsys.readouterr().err
    assert stranger.do("heard") == []


def test_a_strangers_socket_in_a_directory_of_ours_gets_no_byte(
    shared: Path, stranger: Process, capsys: Any
) -> None:
    squatted = shared / "ep-runtime-0"
    stranger.do("squat", squatted)
    os.chown(squatted, 0, 0)
    with pytest.raises(ep.PermissionDeniedError, match=rf"a process of uid {NOBODY} serves .*fd"):
        CONNECTS["an address"](squatted)
    assert cli.main(["status", "--address", f"unix://{squatted}"]) == cli.DENIED
    assert f"uid {NOBODY} serves {squatted / wire.ADMIN_SOCKET}" in capsys.readouterr().err
    assert stranger.do("heard") == []


def test_a_directory_that_others_can_swap_is_refused(shared: Path) -> None:
    shared.chmod(0o777)
    (shared / "ep-runtime-0").mkdir(mode=0o700)
    with pytest.raises(ep.PermissionDeniedError, match=f"{shared} has mode 0777"):
        ep.connect(timeout_s=TIMEOUT_S)


def test_a_user_who_is_named_is_trusted(shared: Path, stranger: Process) -> None:
    squatted = shared / "ep-runtime-0"
    stranger.do("squat", squatted)
    with pytest.raises(ep.RuntimeUnavailableError, match="no answer in time"):
        ep.connect(f"unix://{squatted}?uid={NOBODY}", timeout_s=TIMEOUT_S)
    with pytest.raises(ep.PermissionDeniedError):
        ep.connect(f"unix://{squatted}?uid={NOBODY - 1}", timeout_s=TIMEOUT_S)


def test_a_name_that_changes_hands_under_a_channel_leads_nowhere_else(
    shared: Path, stranger: Process
) -> None:
    ours = shared / "ep-runtime-0"
    ours.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(ours / wire.API_SOCKET))
        daemon.listen()
        control = transport.ControlChannel(addresses.SocketDirectory(ours), "secret")
        shutil.rmtree(ours)
    stranger.do("squat", ours)
    with pytest.raises(ep.RuntimeUnavailableError):
        control.call(control.sessions.Heartbeat, session_service_pb2.HeartbeatRequest())
    control.close()
    assert stranger.do("heard") == []


@pytest.mark.parametrize("text", ["unix:///d?uid=", "unix:///d?uid=-1", "unix:///d?uid=me"])
def test_a_uid_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ep.InvalidArgumentError, match="uid=N"):
        addresses.parse_address(text)


def test_an_address_keeps_its_uid() -> None:
    address = addresses.parse_address("unix:///d?uid=7")
    assert address == addresses.Address("directory", Path("/d"), 7)
    assert addresses.SocketDirectory(Path("/d"), 7).address == "unix:///d?uid=7"
