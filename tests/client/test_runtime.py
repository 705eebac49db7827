"""Parses each form of address, and names the error if no daemon is at the address."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import doc_pages
import pytest

import ep_runtime as ep
from ep_runtime_client.base import jax_state
from ep_runtime_client.daemons import addresses
from ep_runtime_client.sessions import connect


@pytest.fixture(autouse=True)
def _own_default(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(directory))


def test_parse_address_reads_the_four_forms(directory: Path) -> None:
    assert addresses.parse_address("embedded") == addresses.Address("embedded")
    assert addresses.parse_address("none") == addresses.Address("none")
    assert addresses.parse_address("node") == addresses.Address("node", directory / "node")
    assert addresses.parse_address("unix:///some/dir") == addresses.Address(
        "directory", Path("/some/dir")
    )


@pytest.mark.parametrize("text", ["", "localhost:1234", "unix://relative", "emebdded"])
def test_parse_address_names_the_forms_and_what_it_got(text: str) -> None:
    with pytest.raises(ep.InvalidArgumentError, match="embedded.*got " + repr(text)):
        addresses.parse_address(text)


def test_parse_address_refuses_a_directory_too_long_for_sockets() -> None:
    with pytest.raises(ep.InvalidArgumentError, match="at most 96 bytes.*got 101"):
        addresses.parse_address("unix:///" + "d" * 100)


def test_an_environment_address_that_is_wrong_is_named_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EP_RUNTIME_ADDRESS", "nonsense")
    with pytest.raises(ep.InvalidArgumentError, match="EP_RUNTIME_ADDRESS must be"):
        ep.connect()


def test_without_any_daemon_the_choice_is_embedded() -> None:
    assert connect.choose(None) == addresses.Address("embedded")


def test_a_given_address_without_daemon_is_unavailable(directory: Path) -> None:
    with pytest.raises(
        ep.RuntimeUnavailableError, match=f"no daemon answers at unix://{directory}"
    ):
        ep.connect(f"unix://{directory}")


def test_a_dead_environment_address_is_never_replaced(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    monkeypatch.setenv("EP_RUNTIME_ADDRESS", f"unix://{directory}")
    with pytest.raises(ep.RuntimeUnavailableError) as caught:
        ep.connect()
    assert caught.value.fields == {"address": f"unix://{directory}", "answered": False}


def test_a_socket_file_that_nobody_serves_is_unavailable(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_behind:
        left_behind.bind(str(directory / "fd.sock"))
    with pytest.raises(ep.RuntimeUnavailableError, match="Connection refused"):
        ep.connect(f"unix://{directory}")


def test_a_socket_that_never_answers_ends_at_the_timeout(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(directory / "fd.sock"))
        silent.listen()
        with pytest.raises(ep.RuntimeUnavailableError, match="no answer in time"):
            ep.connect(f"unix://{directory}", timeout_s=0.2)


def test_a_place_among_many_who_connect_is_waited_for(directory: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first,
    ):
        busy.bind(str(directory / "fd.sock"))
        busy.listen(0)
        first.connect(str(directory / "fd.sock"))
        started = time.monotonic()
        with pytest.raises(ep.RuntimeUnavailableError):
            ep.connect(f"unix://{directory}", timeout_s=0.2)
        assert time.monotonic() - started >= 0.2


def test_embedded_in_a_job_of_several_processes_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax_state, "num_processes", lambda: 4)
    with pytest.raises(ep.InvalidArgumentError) as caught:
        ep.connect("embedded")
    doc_pages.check_said("embedded", str(caught.value))


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_connect_refuses_a_timeout_that_is_none(timeout_s: float) -> None:
    with pytest.raises(ep.InvalidArgumentError, match="timeout_s must be a positive number"):
        ep.connect("none", timeout_s=timeout_s)


def test_connect_refuses_a_job_that_is_no_name() -> None:
    with pytest.raises(ep.InvalidArgumentError, match="job name must be"):
        ep.connect("none", job="")
