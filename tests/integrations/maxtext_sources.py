"""MaxText's sources with the patch of its page, in a copy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import doc_pages

PAGE = doc_pages.ROOT / "docs/integrations/maxtext.md"
TRAINER = "maxtext.trainers.pre_train.train"
CONFIG = "src/maxtext/configs/base.yml"


def patch() -> str:
    """The page's one diff."""
    (block,) = (block for block in doc_pages.blocks(PAGE) if block.language == "diff")
    return block.code


def patched_copy(checkout: Path, to: Path) -> Path:
    """Copies what MaxText runs from into the folder `to`, patches it there, gives `to` back.

    Raises:
        ValueError: no MaxText there, or another revision than the page's; with git's words.
    """
    if not (checkout / CONFIG).is_file():
        raise ValueError(f"{checkout} is no checkout of MaxText: it has no {CONFIG}")
    shutil.copytree(checkout / "src", to / "src")
    applied = subprocess.run(
        ["git", "apply", "--unidiff-zero", "-"],
        cwd=to,
        input=patch(),
        text=True,
        capture_output=True,
        check=False,
    )
    if applied.returncode:
        raise ValueError(f"the patch of {PAGE.name} does not apply to {checkout}: {applied.stderr}")
    return to
