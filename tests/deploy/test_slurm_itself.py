"""The same scripts under Slurm and systemd themselves, where Slurm is installed: one job."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import booted_systemd
import doc_pages
import pytest
from harness import eventually

FOLDER = doc_pages.ROOT / "docs/deploy/slurm"
NODE = "node-0"
# Slurm looks names up as if loopback were no network.
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

pytestmark = pytest.mark.skipif(
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
