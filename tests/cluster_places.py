"""Addresses and certificates for daemons of a cluster on one host."""

from __future__ import annotations

import atexit
import datetime
import functools
import itertools
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from ep_runtime_client.daemons import certificates

PORT = 7700  # below the ports that the system assigns automatically
_numbers = itertools.count(1)


def loopback() -> str:
    """A loopback address that no other test of this host uses: all of 127/8 is ours.

    A daemon that was killed can start again on it, which a port from the system does not promise.
    """
    pid, number = os.getpid(), next(_numbers)
    return f"127.{1 + pid // 250 % 250}.{pid % 250}.{number % 250 + 1}"


def place() -> str:
    """Returns HOST:PORT that only this daemon uses."""
    return f"{loopback()}:{PORT}"


def make_certificates(directory: Path, *, days: int = 2, ago: int = 0, **hosts: str) -> Path:
    """Makes or replaces certificates of an authority and of nodes, each with its address.

    They begin `ago` days ago.
    """
    nodes = [
        certificates.CertifiedNode(name, (host,) if host else ()) for name, host in hosts.items()
    ]
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=ago)
    clock = mock.Mock(wraps=datetime)
    clock.datetime.now.side_effect = lambda zone: then
    with mock.patch.object(certificates, "datetime", clock):
        certificates.make(directory, nodes, days=days, force=True)
    return directory


@functools.cache
def plain_tcp() -> tuple[str, ...]:
    """Flags of plain TCP, with a secret that every daemon of this run has."""
    file = Path(tempfile.mkdtemp(prefix="epc-")) / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    atexit.register(shutil.rmtree, file.parent, ignore_errors=True)
    return ("--insecure", "--secret", str(file))


def tls_flags(directory: Path, name: str) -> list[str]:
    return [
        *("--tls-cert", str(directory / f"{name}.pem")),
        *("--tls-key", str(directory / f"{name}.key")),
        *("--tls-ca", str(directory / "ca.pem")),
    ]
