"""Pictures of the docs are small, shown on a page, and fetch nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree

import doc_pages
import pytest

FOLDER = doc_pages.ROOT / "docs/images"
PICTURES = sorted(FOLDER.iterdir())
MOST_BYTES = 16 << 10


def test_top_load_and_skew_are_there() -> None:
    assert {path.name for path in PICTURES} >= {"top.svg", "load.svg", "skew.svg"}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_needs_nothing_else(path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    assert xml.etree.ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert re.findall(r"https?://(?!www\.w3\.org/)", text) == []
    assert "@font-face" not in text
    pages = [page.read_text(encoding="utf-8") for page in FOLDER.parent.rglob("*.md")]
    assert any(f"(images/{path.name})" in page for page in pages)
