"""Environments with this tree's packages that say another version, for daemons beside clients of
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


def minor(step: int) -> str:
    """This tree's version, so many minor ones later."""
    major, ours, rest = ep_runtime.__version__.split(".", 2)
    return f"{major}.{int(ours) + step}.{rest}"


def install(folder: Path, version: str) -> tuple[str, ...]:
    """Makes the environment; a command that ends in running its arguments as Python's, behind the
    name of another Python, in that environment."""
    made = folder / "environment"
    run = {"check": True, "capture_output": True, "timeout": INSTALL_S}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], **run)
    (own,) = made.glob("lib/python*/site-packages")
    for place, package in _FOLDERS.items():
        skipped = shutil.ignore_patterns("__pycache__", "_native")
        shutil.copytree(ROOT / place / package, own / package, ignore=skipped)
    text = (own / "ep_runtime/__init__.py").read_text()
    changed = re.sub('^__version__ = ".*"$', f'__version__ = "{version}"', text, flags=re.M)
    (own / "ep_runtime/__init__.py").write_text(changed)
    _stamp(own / "ep_runtime/_native", version)
    # A path alone: what an editable install there would put before ours is not run.
    others = {sysconfig.get_path(kind): None for kind in ("purelib", "platlib")}
    (own / "outer.pth").write_text("\n".join(others))
    python = made / "bin/python"
    return ("sh", "-c", f'shift; PYTHONPATH={ROOT / "tests"} exec {python} -P "$@"', "sh")


def _stamp(folder: Path, version: str) -> None:
    folder.mkdir()
    ours, theirs = (text.encode() + b"\0" for text in (ep_runtime.__version__, version))
    assert len(ours) == len(theirs)
    library = native.LIBRARY_PATH.read_bytes()
    assert library.count(ours) == 1
    (folder / native.LIBRARY_PATH.name).write_bytes(library.replace(ours, theirs))
