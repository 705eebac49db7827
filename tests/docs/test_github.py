"""Files of the code host: they parse, and what they name is there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import doc_pages
import pytest
import yaml

FOLDER = doc_pages.ROOT / ".github"
if not FOLDER.exists():
    pytest.skip("a copy of the tree without .github", allow_module_level=True)


def parsed(path: str) -> dict:
    return yaml.safe_load((FOLDER / path).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_gate() -> None:
    steps = parsed("workflows/gate.yml")["jobs"]["gate"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(doc_pages.ROOT / commands[0], os.X_OK)


def test_a_bug_report_needs_an_archive_of_dump() -> None:
    fields = {
        field["id"]: field for field in parsed("ISSUE_TEMPLATE/bug.yml")["body"] if "id" in field
    }
    assert "ep-runtime dump " in fields["dump"]["attributes"]["description"]
    assert fields["dump"]["validations"]["required"]


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.*")), ids=lambda path: path.name)
def test_pages_that_a_file_names_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"`(docs/[\w/-]+\.md)`", text):
        assert (doc_pages.ROOT / name).exists(), name
    assert "@" not in re.sub(r"uses: [\w/-]+@v\d+", "", text), "an address"
