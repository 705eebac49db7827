"""docs/troubleshooting.md says what the runtime says; what needs several processes, elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import doc_pages
import pytest
import run_page
from daemon_fixtures import package_path

TIMEOUT_S = 120.0
SAID = {
    name: block
    for block in doc_pages.blocks(doc_pages.TROUBLESHOOTING)
    if (name := block.said("says:")) is not None
}
TESTS = doc_pages.ROOT / "tests"


@pytest.fixture(scope="module")
def provoked() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(TESTS / "docs/symptoms.py")],
        env={**os.environ, **run_page.CHEAP, "PYTHONPATH": package_path()},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def elsewhere() -> set[str]:
    """Messages that tests of several processes compare with the page."""
    here = Path(__file__)
    files = (path.read_text("utf-8") for path in TESTS.rglob("test_*.py") if path != here)
    return {name for text in files for name in re.findall(r'check_said\("([\w ]+)"', text)}


def test_every_message_of_the_page_is_provoked(provoked: dict[str, str]) -> None:
    assert set(SAID) == set(provoked) | elsewhere()
    assert not set(provoked) & elsewhere()


def test_messages_are_as_the_page_has_them(provoked: dict[str, str]) -> None:
    for name, text in provoked.items():
        doc_pages.check_said(name, text)


def test_the_page_would_be_found_wrong(provoked: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="layer again"):
        doc_pages.check_said("layer again", provoked["group again"])


def test_the_first_look_works(address: str, environment: dict[str, str]) -> None:
    (look,) = [b for b in doc_pages.blocks(doc_pages.TROUBLESHOOTING) if "beside" in b.markers]
    shown = run_page.beside(look, address, environment)
    assert "SERVING" in shown
