"""Two hosts in network namespaces of their own, and a link between them that is cut and mended."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}
# `ip netns exec NAME` shows what lies in here, in NAME, as /etc.
_ETC = Path("/etc/netns")
_numbers = itertools.count(1)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class Net:
    """Two hosts, a and b, as the kernel sees them."""

    def __init__(self) -> None:
        prefix = f"ept{os.getpid()}n{next(_numbers)}"
        self.names = {host: f"{prefix}{host}" for host in HOSTS}
        try:
            for host, name in self.names.items():
                ip("netns", "add", name)
                self._name_ourselves(name, HOSTS[host])
            a, b = self.names.values()
            ip("link", "add", "eth", "netns", a, "type", "veth", "peer", "eth", "netns", b)
            for host, name in self.names.items():
                ip("-n", name, "addr", "add", f"{HOSTS[host]}/24", "dev", "eth")
                for device in ("lo", "eth"):
                    ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _name_ourselves(name: str, address: str) -> None:
        """The host's own name means its address there: who listens for others looks it up."""
        etc = _ETC / name
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")

    def launcher(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self) -> None:
        """The cable is out at b: a's packets vanish and nobody tells a."""
        ip("-n", self.names["b"], "link", "set", "eth", "down")

    def mend(self) -> None:
        ip("-n", self.names["b"], "link", "set", "eth", "up")

    def close(self) -> None:
        """Also of what was made in part."""
        for name in self.names.values():
            shutil.rmtree(_ETC / name, ignore_errors=True)
            if Path("/run/netns", name).exists():
                ip("netns", "del", name)


@pytest.fixture
def net():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = Net()
    except (subprocess.CalledProcessError, OSError) as error:
        why = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else error
        pytest.skip(f"no network namespaces here: {str(why).strip()}")
    yield made
    made.close()
