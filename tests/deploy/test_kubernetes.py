"""Tests the Kubernetes manifests and their images: schemas, stages, commands, and a job."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import booted_systemd
import checkers
import doc_pages
import pods
import pytest
import yaml
from child_programs import run_to_end
from harness import eventually
from packaging.specifiers import SpecifierSet

from ep_runtime_client import cli
from ep_runtime_server.main import build_parser

FOLDER = doc_pages.ROOT / "docs/deploy/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
DOCUMENTS = [
    document for path in FILES for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
JOBSET_SCHEMA = Path(__file__).with_name("jobset_schema.json")
SERVES_S = 60.0
ATTEMPT_S = 180.0


def find(kind: str) -> Any:
    (found,) = [document for document in DOCUMENTS if document["kind"] == kind]
    return found


def validate(document: Any) -> None:
    """Raises if Kubernetes would refuse the object; it refuses unknown fields too."""
    import kubernetes_validate

    version = kubernetes_validate.latest_version()
    if document["kind"] != "JobSet":
        kubernetes_validate.validate(document, version, strict=True)
        return
    import jsonschema

    jsonschema.validate(document["spec"], json.loads(JOBSET_SCHEMA.read_text(encoding="utf-8")))
    for job in document["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        kubernetes_validate.validate(whole | job["template"], version, strict=True)


@pytest.fixture
def schemas() -> None:
    pytest.importorskip("kubernetes_validate", reason="the extra dev is not installed")


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_kubernetes_schema_takes_it(document: Any) -> None:
    validate(document)


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("DaemonSet", ["spec", "template", "spec", "hostPid"], True),
        ("DaemonSet", ["spec", "updateStrategy", "type"], 1),
        ("JobSet", ["spec", "failurePolicy", "maxRestart"], 1),
        ("JobSet", ["spec", "failurePolicy", "restartStrategy"], "Replace"),
        ("JobSet", ["spec", "replicatedJobs", 0, "template", "spec", "completion"], 2),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(kind: str, path: list[Any], value: Any) -> None:
    document = json.loads(json.dumps(find(kind)))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(Exception, match=re.escape(str(path[-1])) + "|" + str(value)):
        validate(document)


def test_names_of_one_manifest_are_those_of_another() -> None:
    """Checks references from one object to another, which schemas do not check."""
    service, coordinator = find("Service"), find("Deployment")
    labels = coordinator["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    for owner in (coordinator, find("DaemonSet")):
        template = owner["spec"]["template"]
        matched = owner["spec"]["selector"]["matchLabels"]
        assert matched.items() <= template["metadata"]["labels"].items()
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    (port,) = [item["port"] for item in service["spec"]["ports"]]
    args = find("DaemonSet")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--join={name}.{namespace}:{port}" in args
    (claim,) = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in coordinator["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claim == find("PersistentVolumeClaim")["metadata"]["name"]
    job = find("JobSet")
    (trainer,) = job["spec"]["replicatedJobs"]
    (container,) = trainer["template"]["spec"]["template"]["spec"]["containers"]
    values = {item["name"]: item["value"] for item in container["env"]}
    first = f"{job['metadata']['name']}-{trainer['name']}-0-0.{job['metadata']['name']}"
    assert values["JAX_COORDINATOR_ADDRESS"].startswith(f"{first}:")
    assert values["NUM_PROCESSES"] == str(trainer["template"]["spec"]["completions"])
    user = trainer["template"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"--allow-uid={user}" in args


@pytest.fixture
def node() -> Iterator[booted_systemd.System]:
    """A system that knows names of Services and has the images' programs on the path."""
    why = booted_systemd.why_not()
    if why is not None:
        pytest.skip(why)
    system = booted_systemd.boot()
    system.write("/usr/local/bin/ep-runtime", booted_systemd.program_text(), 0o755)
    python = f'#!/bin/sh\nPYTHONPATH={os.environ["PYTHONPATH"]} exec {sys.executable} "$@"\n'
    system.write("/usr/local/bin/python3", python, 0o755)
    # Names of the cluster, and the line a kubelet adds: a pod knows its own host's name.
    names = ["localhost", "ep-runtime-coordinator.ep-runtime", "pretrain-trainer-0-0.pretrain"]
    system.write("/etc/hosts", " ".join(["127.0.0.1", *names, socket.gethostname()]) + "\n")
    job = (Path(__file__).parent / "job.py").read_text(encoding="utf-8")
    system.write("/job/train.py", job)
    (system.root / "job").chmod(0o777)
    yield system
    system.close()


def make_secret(system: booted_systemd.System) -> str:
    """Makes the folder that stands for the Secret: certificates of the coordinator and one node."""
    names = ("ep-runtime-coordinator=ep-runtime-coordinator.ep-runtime", "node-0")
    system.run("/opt/ep-runtime/bin/ep-runtime", "certs", "/secret", *names)
    system.run("sh", "-c", "rm /secret/ca.key; chmod 755 /secret; chgrp 1000 /secret/*; "
               "chmod 440 /secret/*")  # fmt: skip
    return "/secret"


def train(system: booted_systemd.System, codes: list[int]) -> None:
    """Imitates the JobSet controller: restarts all pods if one of a Job fails."""
    spec = find("JobSet")["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0
    for _ in range(spec["failurePolicy"]["maxRestarts"] + 1):
        running = [
            pods.Pod(
                system,
                job["template"]["spec"],
                facts={},
                sources={},
                JOB_COMPLETION_INDEX=str(index),
                JAX_PLATFORMS="cpu",
            ).start()
            for index in range(job["completions"])
        ]
        try:
            eventually(
                lambda pods=running: (
                    any(pod.poll() for pod in pods) or all(pod.poll() == 0 for pod in pods)
                ),
                within_s=ATTEMPT_S,
            )
        finally:
            for pod in running:
                pod.kill()
        codes.append(max(pod.wait() % 256 for pod in running))
        if codes[-1] == 0:
            return


def test_pods_of_a_job_meet_through_the_nodes_daemon(node: booted_systemd.System) -> None:
    secret = make_secret(node)
    node.run("install", "-d", "-m", "2775", "-g", "1000", "/claim")
    started: list[subprocess.Popen[bytes]] = []
    try:
        coordinator = pods.Pod(
            node,
            find("Deployment")["spec"]["template"]["spec"],
            facts={"status.podIP": "127.0.0.1"},
            sources={"certs": secret, "state": "/claim"},
            entrypoint=("ep-runtime",),
        )
        daemon = pods.Pod(
            node,
            find("DaemonSet")["spec"]["template"]["spec"],
            facts={"status.podIP": "127.0.0.2", "spec.nodeName": "node-0"},
            sources={"certs": secret},
            entrypoint=("ep-runtime",),
        )
        for pod, probe in ((coordinator, "livenessProbe"), (daemon, "startupProbe")):
            started.append(pod.start())
            eventually(lambda p=pod, n=probe: p.probe(n) == 0, within_s=SERVES_S, what="it serves")
        order = ("/opt/ep-runtime/bin/ep-runtime", "--address", "unix:///run/ep-runtime")
        node.run(order[0], "drain", "--yes", *order[1:])
        assert (daemon.probe("livenessProbe"), daemon.probe("readinessProbe")) == (0, 3)
        node.run(order[0], "undrain", *order[1:])
        assert daemon.probe("readinessProbe") == 0
        codes: list[int] = []
        train(node, codes)
        assert (len(codes), codes[-1]) == (2, 0)
        assert codes[0] != 0
        for number in range(2):
            lines = (node.root / f"job/said-{number}").read_text().splitlines()
            first, second = map(json.loads, lines)
            assert (first["reattached"], second["reattached"]) == (False, True)
            assert first["node_size"] == second["node_size"] == 4
        seen = node.run(
            *("/opt/ep-runtime/bin/ep-runtime", "status", "-o", "json"),
            *("--address", "unix:///run/ep-runtime"),
        )
        assert {item["node"] for item in json.loads(seen.stdout)["nodes"]} == {
            "ep-runtime-coordinator",
            "node-0",
        }
    finally:
        for process in started:
            process.terminate()
            process.wait(SERVES_S)


PATH = doc_pages.ROOT / "docs/deploy/docker/Dockerfile"
TEXT = PATH.read_text(encoding="utf-8")
LINES = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
PROJECT = tomllib.loads((doc_pages.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STAGES = re.findall(r"^FROM (\S+) AS (\S+)$", TEXT, re.MULTILINE)


def words(instruction: str) -> list[str]:
    """The JSON list of an instruction that stands there once."""
    (found,) = [line for line in LINES if re.match(rf"{instruction}\b", line)]
    return list(json.loads(found[found.index("[") :]))


@pytest.mark.skipif(checkers.HADOLINT is None, reason="the extra dev is not installed")
def test_hadolint_finds_nothing() -> None:
    run_to_end(checkers.HADOLINT, PATH)


def test_stages_build_on_what_was_built_before() -> None:
    names = [name for _, name in STAGES]
    assert len(set(names)) == len(names)
    for line in LINES:
        for source in re.findall(r"COPY --from=(\S+)", line):
            assert source in names
    targets = set(re.findall(r"--target (\w+)", TEXT))
    assert targets == {"cpu", "cuda"} <= set(names)


def test_images_have_a_python_and_extras_that_the_package_takes() -> None:
    (python,) = re.findall(r"^ARG PYTHON=(.+)$", TEXT, re.MULTILINE)
    assert f"{python}.0" in SpecifierSet(PROJECT["requires-python"])
    assert f"python{python} " in TEXT  # of the other stage, which has no image here
    for extras in re.findall(r"\*\.whl\)\[([\w,]+)\]", TEXT):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_what_the_images_run_is_a_daemon_and_its_probe() -> None:
    assert words("ENTRYPOINT") == ["ep-runtime"]
    serve, *options = words("CMD")
    assert serve == "serve"
    directory = build_parser().parse_args(options).dir
    program, status, *options = words("HEALTHCHECK")
    parser = argparse.ArgumentParser()
    cli.module(status).add_arguments(parser)
    assert program == "ep-runtime"
    assert parser.parse_args(options).address.startswith(f"unix://{directory}?")


def test_the_manifests_use_these_images() -> None:
    path = doc_pages.ROOT / "docs/deploy/kubernetes/daemons.yaml"
    pods = [
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if document["kind"] in ("DaemonSet", "Deployment")
    ]
    images = [container["image"] for pod in pods for container in pod["containers"]]
    assert {image.rpartition(":")[2] for image in images} == {"cpu", "cuda"}
