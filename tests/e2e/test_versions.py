"""Daemons and training processes of neighbouring minor versions, in separate environments."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from cluster_places import place, plain_tcp
from harness import DaemonProcess, eventually
from multiprocess.launch import Job, Worker
from raw_client import WAIT_S as CALL_S

import ep_runtime
from ep_runtime import native

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 120.0
_FOLDERS = {"": "ep_runtime", "server": "ep_runtime_server", "client": "ep_runtime_client"}


def minor(step: int) -> str:
    """Returns this tree's version plus that many minor ones."""
    major, ours, rest = ep_runtime.__version__.split(".", 2)
    return f"{major}.{int(ours) + step}.{rest}"


def install(folder: Path, version: str) -> tuple[str, ...]:
    """Makes the environment. Returns a command that runs its arguments as Python's there, although
    their first word names another Python.
    """
    made = folder / "environment"
    run = {"check": True, "capture_output": True, "timeout": INSTALL_S}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], **run)
    (own,) = made.glob("lib/python*/site-packages")
    for folder_of, package in _FOLDERS.items():
        skipped = shutil.ignore_patterns("__pycache__", "_native")
        shutil.copytree(ROOT / folder_of / package, own / package, ignore=skipped)
    text = (own / "ep_runtime/__init__.py").read_text()
    changed = re.sub('^__version__ = ".*"$', f'__version__ = "{version}"', text, flags=re.M)
    (own / "ep_runtime/__init__.py").write_text(changed)
    _stamp(own / "ep_runtime/_native", version)
    # Adds only the path: the import hooks of an editable install would put that install first.
    others = {sysconfig.get_path(kind): None for kind in ("purelib", "platlib")}
    (own / "outer.pth").write_text("\n".join(others))
    python = made / "bin/python"
    return ("sh", "-c", f'shift; PYTHONPATH={ROOT / "tests"} exec {python} -P "$@"', "sh")


def _stamp(folder: Path, version: str) -> None:
    """Copies the native library that is loaded here into `folder`, with another version."""
    folder.mkdir()
    ours, theirs = (text.encode() + b"\0" for text in (ep_runtime.__version__, version))
    assert len(ours) == len(theirs)
    library = native.LIBRARY_PATH.read_bytes()
    assert library.count(ours) == 1
    (folder / native.LIBRARY_PATH.name).write_bytes(library.replace(ours, theirs))


WAIT_S = 60.0
OLDER, OURS, NEWER = VERSIONS = tuple(map(minor, (-1, 0, 1)))
JOB = {"EP_RUNTIME_JOB": "versions"}


@pytest.fixture(scope="module")
def environments(tmp_path_factory) -> dict[str, tuple[str, ...]]:
    """Returns the arguments `launcher` and `places` of each version."""
    return {v: install(tmp_path_factory.mktemp("version"), v) for v in VERSIONS}


_MATRIX = """
session = ep.connect(timeout_s=60)
mesh = mesh_of()
group = session.create_group("g", mesh, ep_axis="ep", num_experts=4, hidden_size=16,
    max_tokens_per_rank=8, max_top_k=2, max_token_dtype="float32", transport="memfd")
layer = group.register_layer("l", top_k=2)

@jax.jit
def step(x, logits):
    routing = ep.route(logits, 2)
    there = ep.dispatch(layer, x, routing.topk_idx, routing.topk_weights)
    return ep.combine(layer, there, there.tokens * 2.0, weights=there.weights)

def error():
    random = np.random.default_rng(0).standard_normal
    x, logits = random((8, 16), dtype=np.float32), random((8, 4), dtype=np.float32)
    return float(np.abs(np.asarray(group.check(step(x, logits))) - 2 * x).max())

say(version=ep.__version__, error=error(), generation=group.generation)
hear()
say(error=error(), generation=group.generation)
hear()
session.close()
"""
# (client, its daemon, the daemon that replaces it)
_MEETINGS = ((OLDER, OURS, NEWER), (OURS, OURS, OLDER), (NEWER, OURS, OURS), (OURS, OLDER, OURS))


def test_clients_keep_their_windows_on_daemons_of_neighbouring_versions(
    environments, daemon_process
):
    """Also replaces a stopped daemon by one of another version."""
    for versions in _MEETINGS:
        _meet(environments, daemon_process, *versions)


def _meet(environments, start, client: str, daemon: str, then: str) -> None:
    running = start("--drain-s", "0", launcher=environments[daemon])
    address = {"EP_RUNTIME_ADDRESS": f"unix://{running.directory}", **JOB}
    places = [environments[client]]
    with Job(_MATRIX, processes=1, devices=2, places=places, **address) as job:
        (said,) = job.heard()
        assert said["version"] == client
        assert said["error"] < 1e-5
        (session,) = running.ask("ListSessions").sessions
        assert (session.client_version, running.status().server_version) == (client, daemon)
        assert len(running.ask("ListBuffers").buffers) == 3  # two windows and a board
        stop(running)
        running = start("--drain-s", "0", launcher=environments[then], directory=running.directory)
        eventually(lambda: running.group_states() == {"g": "READY"}, within_s=WAIT_S)
        eventually(lambda: not running.status().recovery.awaited_bytes, within_s=WAIT_S)
        assert running.status().server_version == then
        assert not running.status().recovery.lost_bytes
        job.tell()
        (again,) = job.heard()
        assert again == {"error": said["error"], "generation": said["generation"]}
        job.end()
        eventually(lambda: not running.ask("ListBuffers").buffers, within_s=WAIT_S)
    stop(running)


def stop(daemon: DaemonProcess) -> None:
    """Stops the daemon in good order, as an upgrade does."""
    daemon.popen.send_signal(signal.SIGTERM)
    assert daemon.ended(CALL_S)[0] == 0


class Nodes:
    """Starts daemons a (the coordinator), b and c; `change` restarts one from another wheel."""

    def __init__(self, start, environments) -> None:
        address = place()
        roles = {"a": "--coordinator", "b": "--join", "c": "--join"}
        self._start, self._environments = start, environments
        self._flags = {
            name: (role, address, "--node", name, *plain_tcp(), "--drain-s", "0")
            for name, role in roles.items()
        }
        self.daemons: dict[str, DaemonProcess] = {}
        for name in roles:
            self._serve(name, OURS)
        self.whole()

    def _serve(self, name: str, version: str, **more) -> None:
        flags, launcher = self._flags[name], self._environments[version]
        self.daemons[name] = self._start(*flags, launcher=launcher, **more)

    def change(self, name: str, version: str) -> None:
        before = self.daemons[name]
        stop(before)
        self._serve(name, version, directory=before.directory)
        self.whole()
        assert self.daemons[name].status().server_version == version

    def whole(self) -> None:
        """Checks that every node sees all nodes JOINED."""

        def seen() -> bool:
            found = [daemon.status().cluster.nodes for daemon in self.daemons.values()]
            return all(len(nodes) == 3 and {n.state for n in nodes} == {1} for nodes in found)

        eventually(seen, within_s=WAIT_S, what="all nodes have joined")


@pytest.fixture
def nodes(environments, daemon_process) -> Nodes:
    return Nodes(daemon_process, environments)


_TRAINS = """
from pathlib import Path
from faults import training_job
training_job.train(Path(os.environ["TEST_SAVED"]), say)
"""


def losses(worker: Worker) -> list[str]:
    """Returns the loss of every step so far; checks that no step is missing or repeated."""
    found = re.findall(r"^step (\d+) loss (\S+)$", worker.log.read_text(), flags=re.M)
    assert [int(number) for number, _ in found] == [*range(len(found))]
    return [loss for _, loss in found]


def goes_on(worker: Worker) -> None:
    """Returns when two more steps are done."""
    wanted = len(losses(worker)) + 2
    eventually(lambda: len(losses(worker)) >= wanted, within_s=WAIT_S, what="it trains on")


def test_a_rolling_upgrade_and_rollback_of_three_daemons_lose_no_step(
    nodes: Nodes, environments, tmp_path: Path
):
    own = [{"EP_RUNTIME_ADDRESS": f"unix://{nodes.daemons[name].directory}"} for name in ("b", "c")]
    with Job(
        _TRAINS,
        processes=2,
        devices=1,
        own=own,
        places=[environments[OURS]] * 2,
        TEST_SAVED=str(tmp_path),
        **JOB,
    ) as job:
        job.heard()
        # Two nodes of the newer version, with the coordinator, and one of ours train on; then back.
        for name, version in [*((n, NEWER) for n in "cab"), *((n, OURS) for n in "cb")]:
            nodes.change(name, version)
            for worker in job.workers:
                goes_on(worker)
            for daemon in (nodes.daemons[n] for n in "bc"):
                assert daemon.group_states() == {"training": "READY"}
        found = [losses(worker) for worker in job.workers]
        shared = min(map(len, found))
        assert found[0][:shared] == found[1][:shared]
        assert not any(worker.ended for worker in job.workers)
