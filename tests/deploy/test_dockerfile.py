"""The Dockerfile, which nothing here can build: hadolint reads it, and what it says is so."""

from __future__ import annotations

import argparse
import json
import re
import tomllib

import checkers
import doc_pages
import pytest
import yaml
from child_programs import run_to_end
from packaging.specifiers import SpecifierSet

from ep_runtime_client import cli
from ep_runtime_server.main import build_parser

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
    assert f"python{python} " in TEXT  # of the other stage, whose image has none
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
