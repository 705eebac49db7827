"""Runs prolog, batch script and epilog of a Slurm job: with stubs, and with Slurm and systemd."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import booted_systemd
import checkers
import doc_pages
import guardian
import pytest
from child_programs import run_to_end
from harness import eventually

FOLDER = doc_pages.ROOT / "docs/deploy/slurm"
HERE = Path(__file__).parent
# Two addresses of this host are two nodes.
NODES = ("127.0.0.1", "127.0.0.2")
TIMEOUT_S = 240.0


class Site:
    """Two nodes of a site with everything installed, and one of our jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "prefix/bin"
        programs.mkdir(parents=True)
        for name in ("scontrol", "systemd-run", "systemctl", "srun"):
            self._script(programs / name, f"{sys.executable} {HERE / 'slurm_stubs.py'} {name}")
        self._script(programs / "python", sys.executable)
        self._script(programs / "python3", sys.executable)
        (programs / "ep-runtime").write_text(booted_systemd.program_text())
        (programs / "ep-runtime").chmod(0o755)
        (folder / "key").write_text("a site's own\n")
        self.job_id = str(os.getpid())
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "STUBS": str(folder),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
            "EP_RUNTIME_PREFIX": str(folder / "prefix"),
            "EP_RUNTIME_KEY": str(folder / "key"),
            "SLURM_JOB_ID": self.job_id,
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_JOB_NODELIST": ",".join(NODES),
        }

    @staticmethod
    def _script(path: Path, command: str) -> None:
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)

    def jobs(self, node: str) -> Path:
        """The folder of jobs in the node's /run."""
        return self.folder / node

    def run(
        self, script: str, *words: str, node: str = NODES[0]
    ) -> subprocess.CompletedProcess[str]:
        own = {"SLURMD_NODENAME": node, "EP_RUNTIME_JOBS": str(self.jobs(node))}
        words = ("bash", FOLDER / script, *words)
        how = {"env": self.environment | own, "cwd": self.folder}
        return run_to_end(*words, code=None, limit_s=TIMEOUT_S, **how)

    def daemons(self) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.folder.glob("*.pid"))]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    folder = Path(os.path.realpath(f"/tmp/epslurm-{os.getpid()}"))
    folder.mkdir(mode=0o700)
    site = Site(folder)
    yield site
    for pid in site.daemons():
        guardian.protect(pid)
    shutil.rmtree(folder)


def test_a_job_starts_again_on_its_nodes_and_leaves_nothing(site: Site) -> None:
    for node in NODES:
        done = site.run("prolog.sh", node=node)
        assert done.returncode == 0, done.stdout + done.stderr
    for pid in site.daemons():
        guardian.protect(pid)
    done = site.run("train.sbatch", str(HERE / "job.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 1 of 5 ended with 137" in done.stderr
    assert "attempt 2" not in done.stderr
    for number in range(len(NODES)):
        lines = (site.folder / f"said-{number}").read_text().splitlines()
        first, second = map(json.loads, lines)
        # A node's restart finds only its own windows.
        assert (first["reattached"], second["reattached"]) == (False, True)
        assert first["node_size"] == second["node_size"] == 2
    for node in NODES:
        done = site.run("epilog.sh", node=node)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not (site.jobs(node) / site.job_id).exists()
    assert site.daemons() == []


def test_a_script_that_always_fails_ends_with_its_code(site: Site) -> None:
    (site.folder / "train.py").write_text("raise SystemExit(7)")
    site.environment["ATTEMPTS"] = "2"
    done = site.run("train.sbatch", "train.py")
    assert done.returncode == 7
    assert "attempt 2 of 2 ended with 7" in done.stderr


def test_a_daemon_that_does_not_start_fails_the_prolog(site: Site) -> None:
    (site.folder / "key").unlink()
    done = site.run("prolog.sh")
    assert done.returncode != 0
    assert "key" in done.stderr
    assert site.run("epilog.sh").returncode == 0
    assert not (site.jobs(NODES[0]) / site.job_id).exists()


@pytest.mark.skipif(checkers.SHELLCHECK is None, reason="the extra dev is not installed")
@pytest.mark.parametrize("script", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    run_to_end(checkers.SHELLCHECK, script)


NODE = "node-0"
# Slurm resolves names as if the host had only loopback.
ADDRESS = "10.0.0.1"
USER = 65534
READY_S = 60.0
_CONF = f"""
ClusterName=test
SlurmctldHost={NODE}({ADDRESS})
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/log
SlurmdLogFile=/run/slurm/log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
NodeName={NODE} NodeAddr={ADDRESS} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
Prolog=/etc/slurm/ep-runtime/prolog.sh
Epilog=/etc/slurm/ep-runtime/epilog.sh
PrologFlags=Alloc
"""
_needs_slurm = pytest.mark.skipif(
    not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "ip"))),
    reason="Slurm is not installed",
)


@pytest.fixture
def cluster() -> Iterator[booted_systemd.System]:
    why = booted_systemd.why_not()
    if why is not None:
        pytest.skip(why)
    system = booted_systemd.boot()
    try:
        system.run("hostname", NODE)
        system.run("ip", "address", "add", f"{ADDRESS}/24", "dev", "lo")
        system.write("/etc/hosts", f"127.0.0.1 localhost\n{ADDRESS} {NODE}\n")
        python = f'#!/bin/sh\nPYTHONPATH={os.environ["PYTHONPATH"]} exec {sys.executable} "$@"\n'
        system.write("/usr/local/bin/python3", python, 0o755)
        system.write("/etc/slurm/slurm.conf", _CONF)
        system.write("/etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\n")  # unused
        for name in ("prolog.sh", "epilog.sh"):
            system.write(f"/etc/slurm/ep-runtime/{name}", (FOLDER / name).read_text(), 0o755)
        system.write("/job/train.sbatch", (FOLDER / "train.sbatch").read_text())
        system.write("/job/job.py", (Path(__file__).parent / "job.py").read_text())
        (system.root / "job").chmod(0o777)
        system.run("mkdir", "-p", "/run/slurm/state", "/run/slurm/spool")
        system.run("install", "-d", "-o", "munge", "/run/munge")
        system.run("systemd-run", "--unit=munged", "--uid=munge", "munged", "--foreground")
        for name in ("slurmctld", "slurmd"):
            where = ["-N", NODE] if name == "slurmd" else []
            system.run(
                "systemd-run", f"--unit=our-{name}", shutil.which(name) or name, "-D", *where
            )
        eventually(
            lambda: "idle" in system.run("sinfo", "-h", "-o", "%T", check=False).stdout,
            within_s=READY_S,
            what="the node is idle",
        )
        yield system
    finally:
        system.close()


@_needs_slurm
def test_a_job_starts_again_on_its_node_and_leaves_nothing(cluster: booted_systemd.System) -> None:
    done = cluster.run(
        *("sbatch", "--wait", "--chdir=/job", "--output=/job/out", "--nodes=1"),
        *("--ntasks-per-node=2", "--gpus-per-node=0", "/job/train.sbatch", "job.py"),
        user=USER,
        check=False,
        JAX_PLATFORMS="cpu",
    )
    out = cluster.root / "job/out"
    said = done.stdout + done.stderr + (out.read_text() if out.exists() else "")
    assert done.returncode == 0, said
    assert "attempt 1 of 5 ended with" in said
    assert "attempt 2" not in said
    for number in range(2):
        lines = (cluster.root / f"job/said-{number}").read_text().splitlines()
        first, second = map(json.loads, lines)
        assert (first["reattached"], second["reattached"]) == (False, True)
        assert second["generation"] > first["generation"]
    left = cluster.root / "run/ep-runtime-jobs"
    eventually(lambda: not any(left.iterdir()), within_s=READY_S, what="the epilog ran")
    units = cluster.run("systemctl", "list-units", "--all", "--plain", "ep-runtime-job-*").stdout
    assert "0 loaded units" in units
    assert "idle" in cluster.run("sinfo", "-h", "-o", "%T").stdout  # and was not drained
