"""The version is written in `ep_runtime/__init__.py` only; all other places read it there."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import doc_pages
import pytest
from child_programs import command, run_to_end

import ep_runtime
from ep_runtime import native

VERSION = ep_runtime.__version__


def test_the_package_says_it() -> None:
    project = tomllib.loads((doc_pages.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    source = project["tool"]["scikit-build"]["metadata"]["version"]
    assert source["input"] == "ep_runtime/__init__.py"
    try:
        installed = importlib.metadata.version("ep-runtime")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    assert installed == VERSION


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_native_libraries_say_it(platform: str) -> None:
    if not native.library_path(platform).exists():
        pytest.skip(f"no {platform} library here")
    assert native.library(platform).version == VERSION


def test_the_command_says_it() -> None:
    done = run_to_end(*command("version", "--client", "-o", "json"))
    assert f'"client_version": "{VERSION}"' in done.stdout


def test_the_changelog_begins_with_it() -> None:
    text = (doc_pages.ROOT / "docs/CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+?)(?:, .*)?$", text, re.MULTILINE)
    assert headings[0] == VERSION


def test_cmake_does_not_repeat_it() -> None:
    assert VERSION not in (doc_pages.ROOT / "csrc/CMakeLists.txt").read_text(encoding="utf-8")
