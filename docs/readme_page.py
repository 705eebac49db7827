"""A hook of mkdocs: the README is a page of the site, and links to it work in both places."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGE = "readme-page.md"


def on_files(files: Any, config: Any) -> Any:
    """Adds the page; its links are as from docs/."""
    readme = Path(config.docs_dir).parent / "README.md"
    text = readme.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, PAGE, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What leads to ../README.md in a checkout leads to the page."""
    return re.sub(r"\]\(((?:\.\./)*)\.\./README\.md", rf"](\1{PAGE}", markdown)
