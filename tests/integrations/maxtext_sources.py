"""MaxText's release with the patch of its page, unpacked from its wheel."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import doc_pages

PAGE = doc_pages.ROOT / "docs/integrations/maxtext.md"
CONFIG = "maxtext/configs/base.yml"


def patch() -> str:
    """The page's one diff."""
    (block,) = (block for block in doc_pages.blocks(PAGE) if block.language == "diff")
    return block.code


def patched_copy(wheel: Path, to: Path) -> Path:
    """Unpacks MaxText into the folder `to`, patches it there, gives `to` back.

    Raises:
        ValueError: no wheel of MaxText, or one that the patch does not fit; with git's words.
    """
    if not zipfile.is_zipfile(wheel):
        raise ValueError(f"{wheel} is no wheel: `pip download --no-deps maxtext` makes one")
    with zipfile.ZipFile(wheel) as release:
        release.extractall(to)
    applied = subprocess.run(
        ["git", "apply", "--unidiff-zero", "-"],
        cwd=to,
        input=patch(),
        text=True,
        capture_output=True,
        check=False,
    )
    if applied.returncode:
        raise ValueError(f"the patch of {PAGE.name} does not apply to {wheel}: {applied.stderr}")
    return to
