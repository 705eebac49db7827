"""Tests of one checkout never run on the packages of another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkout import ROOT

# As an editable install does, which comes before every path.
_EDITABLE = """
import importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            return importlib.util.spec_from_file_location(
                name, {places[0]!r} + "/__init__.py", submodule_search_locations={places!r})

sys.meta_path.insert(0, Finder)
"""
_OFF_THE_PATH = f"import sys\nsys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]\n"


def refusal(
    folder: Path, name: str, *places: Path, hook: str = "", options: Sequence[str] = ()
) -> str:
    """What pytest says where a package is found in these places."""
    text = hook + _EDITABLE.format(name=name, places=[*map(str, places)])
    (folder / "sitecustomize.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "--collect-only", *options, "tests/test_tiers.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    return done.stderr


@pytest.mark.parametrize("name", ["ep_runtime", "ep_runtime_server"])
def test_another_checkouts_package_is_named(tmp_path: Path, name: str) -> None:
    told = refusal(tmp_path, name, tmp_path / "other" / name)
    assert f"{name} must come from {ROOT}" in told
    assert f"got {tmp_path}/other." in told
    assert "pip install -e" in told


def test_another_checkouts_native_library_is_too(tmp_path: Path) -> None:
    told = refusal(tmp_path, "ep_runtime", ROOT / "ep_runtime", tmp_path / "ep_runtime")
    assert f"got {' and '.join(sorted(map(str, (ROOT, tmp_path))))}." in told


def test_a_checkout_is_no_installed_wheel(tmp_path: Path) -> None:
    tree, wheel = ROOT / "ep_runtime", ("-o", "pythonpath=tests")
    told = refusal(tmp_path, "ep_runtime", tree, hook=_OFF_THE_PATH, options=wheel)
    assert f"site-packages, got {ROOT}." in told
