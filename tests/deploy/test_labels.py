"""Every file of docs/deploy states whether it was run, and the page states the same."""

from __future__ import annotations

import re
from pathlib import Path

import doc_pages

FOLDER = doc_pages.ROOT / "docs/deploy"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".md")


def label_of(path: Path) -> str | None:
    """Returns the label in the file's first comment; None for formats without comments."""
    if path.suffix == ".json":
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    found = re.match(r"# (Run here|Not run): \S", next(x for x in lines if not x.startswith("#!")))
    assert found, f"{path} does not begin with `# Run here: BY WHAT` or `# Not run: WHY`"
    return found[1].lower()


def test_the_page_lists_every_file_with_its_label() -> None:
    rows = doc_pages.table(FOLDER / "index.md", "# Deployment")
    shown = {row[0].strip("`"): row[2] for row in rows}
    assert set(shown) == {str(path.relative_to(FOLDER)) for path in FILES}
    for path in FILES:
        label = shown[str(path.relative_to(FOLDER))]
        assert label in ("run here", "not run")
        assert label == (label_of(path) or label), path


def test_what_was_run_names_the_test_that_did_it() -> None:
    for path in FILES:
        if label_of(path) == "run here":
            top = " ".join(path.read_text(encoding="utf-8").splitlines()[:3])
            named = re.search(r"tests/[\w/]+\.py", top)
            assert named is not None, path
            assert (doc_pages.ROOT / named[0]).exists(), path
