"""Two hosts in separate network namespaces, and a link between them that tests cut and mend."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import guardian
import pytest

HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}
# `ip netns exec NAME` mounts the files of this folder's NAME over /etc.
_ETC = Path("/etc/netns")
_CABLE = Path(__file__).with_name("lossy_link.py")
_numbers = itertools.count(1)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class Net:
    """Two hosts, a and b, as separate network namespaces."""

    def __init__(self) -> None:
        prefix = f"ept{os.getpid()}n{next(_numbers)}"
        self.names = {host: f"{prefix}{host}" for host in HOSTS}
        try:
            for host, name in self.names.items():
                ip("netns", "add", name)
                self._name_ourselves(name, HOSTS[host])
            self._lay_cable()
            for host, name in self.names.items():
                ip("-n", name, "addr", "add", f"{HOSTS[host]}/24", "dev", "eth")
                for device in ("lo", "eth"):
                    ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def _lay_cable(self) -> None:
        """Makes the device `eth` of both hosts."""
        a, b = self.names.values()
        ip("link", "add", "eth", "netns", a, "type", "veth", "peer", "eth", "netns", b)

    @staticmethod
    def _name_ourselves(name: str, address: str) -> None:
        """Resolves the host's name to its address: servers that listen for other
        hosts look it up.
        """
        etc = _ETC / name
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")

    def launcher(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self) -> None:
        """Pulls the cable at b: packets from a vanish, and a gets no error."""
        ip("-n", self.names["b"], "link", "set", "eth", "down")

    def mend(self) -> None:
        ip("-n", self.names["b"], "link", "set", "eth", "up")

    def close(self) -> None:
        """Also removes hosts that were made only in part."""
        for name in self.names.values():
            shutil.rmtree(_ETC / name, ignore_errors=True)
            if Path("/run/netns", name).exists():
                ip("netns", "del", name)


class LossyNet(Net):
    """Two hosts whose cable loses and delays packets, separately in each direction."""

    def __init__(self) -> None:
        self._cable: subprocess.Popen[str] | None = None
        super().__init__()

    def _lay_cable(self) -> None:
        self._cable = subprocess.Popen(
            [sys.executable, str(_CABLE), *self.names.values()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        guardian.protect(self._cable.pid)
        self._answered("ready")

    def _answered(self, word: str) -> None:
        assert self._cable is not None
        assert self._cable.stdout is not None
        if self._cable.stdout.readline().strip() != word:
            raise OSError(f"no cable: it ended with {self._cable.wait(10)}")

    def now(self, **faults: dict[str, float]) -> None:
        """Sets what happens to each host's packets: now(a={"lost": 0.3, "late_s": 0.2}, b={})."""
        assert self._cable is not None
        assert self._cable.stdin is not None
        self._cable.stdin.write(json.dumps({"a": {}, "b": {}, **faults}) + "\n")
        self._cable.stdin.flush()
        self._answered("told")

    def cut(self) -> None:
        self.now(a={"lost": 1.0}, b={"lost": 1.0})

    def mend(self) -> None:
        self.now()

    def close(self) -> None:
        if self._cable is not None:
            assert self._cable.stdin is not None
            assert self._cable.stdout is not None
            self._cable.stdin.close()
            self._cable.wait(10)
            self._cable.stdout.close()
        super().close()


def _made(kind: type[Net]) -> Net:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        return kind()
    except (subprocess.CalledProcessError, OSError) as error:
        why = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else error
        pytest.skip(f"no network namespaces here: {str(why).strip()}")


@pytest.fixture
def net():
    made = _made(Net)
    yield made
    made.close()


@pytest.fixture
def lossy_net():
    made = _made(LossyNet)
    yield made
    made.close()
