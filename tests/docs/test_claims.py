"""Pages that name tests for what they promise: the tests are there, no promise lacks one."""

from __future__ import annotations

import re
from pathlib import Path

import doc_pages
import pytest
from named_tests import names_in

DOCS = doc_pages.ROOT / "docs"
GUARANTEES = DOCS / "guarantees.md"
NAME = re.compile(r"`([^\s`]+\.py)::([^\s`]+)`")

PAGES = pytest.mark.parametrize(
    "page", [DOCS / "threat-model.md", DOCS / "faults.md", GUARANTEES], ids=lambda page: page.stem
)


@PAGES
def test_every_test_that_the_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = NAME.findall(text)
    assert len(named) > 50
    form = len(re.findall("`FILE::TEST`", text))
    assert len(named) + form == len(re.findall(r"`[^`\n]*::[^`\n]*`", text))
    assert not [f"{file}::{test}" for file, test in named if test not in names_in(file)]


@PAGES
def test_every_claim_of_a_table_has_a_test(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tables = [part for part in text.split("\n\n") if "| held by |" in part]
    rows = [row for table in tables for row in table.splitlines() if row.startswith("|")]
    claims = [row for row in rows if "held by" not in row and not row.startswith("|---")]
    assert claims
    assert not [row for row in claims if not NAME.search(row.rpartition(" | ")[2])]


def test_every_promise_has_a_table_of_tests() -> None:
    sections = re.split(r"^## ", GUARANTEES.read_text(encoding="utf-8"), flags=re.M)[1:]
    bare = [text.splitlines()[0] for text in sections if "| held by |" not in text]
    assert bare == ["Not guaranteed"]
    assert len(sections) > 5
