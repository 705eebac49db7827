"""A copy of the tree, whose tests import the copy, whatever is installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from ep_runtime import native

ROOT = Path(__file__).resolve().parents[1]
_COPIED = ("ep_runtime", "server", "client", "csrc", "proto", "docs", "tests")
_COPIED += ("README.md", "pyproject.toml")
# An editable install finds our packages by a list of its own, before any path: in this process and
# in those that tests start.
_SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
"""
_PYTEST = """
import ep_runtime, ep_runtime_client, ep_runtime_server, pytest, sys
for package in (ep_runtime, ep_runtime_client, ep_runtime_server):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[2:]]))
"""


def copy_to(root: Path) -> None:
    """With a link to the native libraries that are loaded here."""
    for name in _COPIED:
        source, skipped = ROOT / name, shutil.ignore_patterns("__pycache__", "_native")
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=skipped)
        else:
            shutil.copy(source, root / name)
    (root / "ep_runtime/_native").symlink_to(native.LIBRARY_PATH.parent)
    (root / "sitecustomize.py").write_text(_SITE)


def pytest_command(root: Path, *words: str) -> list[str]:
    """Runs pytest in the copy at `root`, with `environment` there; it asserts that it does."""
    return [sys.executable, "-P", "-c", _PYTEST, f"{root}{os.sep}", *words]


def environment(root: Path) -> dict[str, str]:
    places = [str(root / folder) for folder in (".", "server", "client", "tests")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(places)}
