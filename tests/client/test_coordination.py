"""`ep-runtime coordination`: its address, how it ends, and its errors."""

from __future__ import annotations

import signal
import socket
import subprocess

import pytest
from child_programs import command

from ep_runtime_client.base import jax_internals

_WAIT_S = 60.0


def _start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("coordination", "--processes", 2, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_its_address_and_ends_well(number: signal.Signals) -> None:
    with _start() as service:
        try:
            assert service.stdout is not None
            line = service.stdout.readline()
            assert line.startswith("coordination service is ready at 127.0.0.1:")
            port = int(line.rpartition(":")[2])
            socket.create_connection(("127.0.0.1", port), _WAIT_S).close()
            service.send_signal(number)
            assert service.wait(_WAIT_S) == 0
        finally:
            service.kill()


@pytest.mark.parametrize(
    ("bind", "text"),
    [
        ("127.0.0.1:{taken}", "got 127.0.0.1:{taken}: Address already in use"),
        ("192.0.2.1:0", "got 192.0.2.1:0: Cannot assign requested address"),
        ("8476", "the address must be HOST:PORT, got '8476'"),
    ],
)
def test_an_address_that_it_cannot_have_is_named(bind: str, text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with _start("--bind", bind.format(taken=taken)) as service:
            said = service.communicate(timeout=_WAIT_S)[1]
    assert service.returncode == 1
    assert text.format(taken=taken) in said


def test_this_jaxlib_has_what_recovery_needs() -> None:
    assert jax_internals.recoverability_reason() is None


@pytest.mark.parametrize(
    ("path", "wanted", "text"),
    [
        ("no_such_name", (), "has no jaxlib._jax.no_such_name"),
        ("get_distributed_runtime_service", ("kept",), "runtime_service with kept="),
    ],
)
def test_what_another_jaxlib_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, path: str, wanted: tuple[str, ...], text: str
) -> None:
    monkeypatch.setitem(jax_internals._JAXLIB, path, wanted)
    assert text in (jax_internals.recoverability_reason() or "")
    with pytest.raises(NotImplementedError, match="jaxlib"):
        jax_internals.start_coordination("127.0.0.1:0", 1, 10)
