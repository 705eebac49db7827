"""Environments with wheels of this tree that say another version, for daemons beside clients of
others. Their native library is the one that is loaded here, with the version written over."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from copied_tree import ROOT

import ep_runtime
from ep_runtime import native

INSTALL_S = 120.0
_FOLDERS = {"": "ep_runtime", "server": "ep_runtime_server", "client": "ep_runtime_client"}
_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "ep-runtime"
version = "{version}"
[tool.setuptools]
include-package-data = false
[tool.setuptools.packages.find]
[tool.setuptools.package-data]
"*" = ["*.so", "*.pyi"]
"""


def minor(step: int) -> str:
    """This tree's version, so many minor ones later."""
    major, ours, rest = ep_runtime.__version__.split(".", 2)
    return f"{major}.{int(ours) + step}.{rest}"


def install(folder: Path, version: str) -> tuple[str, ...]:
    """Builds and installs a wheel; a command that ends in running its arguments as Python's, behind
    the name of another Python, in that environment."""
    source, made = folder / "source", folder / "environment"
    for place, package in _FOLDERS.items():
        skipped = shutil.ignore_patterns("__pycache__", "_native")
        shutil.copytree(ROOT / place / package, source / package, ignore=skipped)
    (source / "pyproject.toml").write_text(_PROJECT.format(version=version))
    text = (source / "ep_runtime/__init__.py").read_text()
    changed = re.sub('^__version__ = ".*"$', f'__version__ = "{version}"', text, flags=re.M)
    (source / "ep_runtime/__init__.py").write_text(changed)
    _stamp(source / "ep_runtime/_native", version)
    run = {"check": True, "capture_output": True, "timeout": INSTALL_S}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], **run)
    python = made / "bin/python"
    places = {kind: sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (own,) = made.glob("lib/python*/site-packages")
    # A path alone: what an editable install there would put before ours is not run.
    (own / "outer.pth").write_text("\n".join(dict.fromkeys(places.values())))
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    options += ("--no-compile",)
    subprocess.run([python, "-P", "-m", "pip", "install", *options, source], cwd=folder, **run)
    return ("sh", "-c", f'shift; PYTHONPATH={ROOT / "tests"} exec {python} -P "$@"', "sh")


def _stamp(folder: Path, version: str) -> None:
    folder.mkdir()
    ours, theirs = (text.encode() + b"\0" for text in (ep_runtime.__version__, version))
    assert len(ours) == len(theirs)
    library = native.LIBRARY_PATH.read_bytes()
    assert library.count(ours) == 1
    (folder / native.LIBRARY_PATH.name).write_bytes(library.replace(ours, theirs))
