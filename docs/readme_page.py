"""A hook of mkdocs: the README and the folder of examples are pages of the site too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGE = "readme-page.md"
EXAMPLES = "examples/index.md"


def on_files(files: Any, config: Any) -> Any:
    """Adds both; the README's links become links from docs/."""
    docs = Path(config.docs_dir)
    text = (docs.parent / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/examples)", f"]({EXAMPLES})").replace("](docs/", "](")
    files.append(File.generated(config, PAGE, content=text))
    scripts = sorted((docs / "examples").glob("*.py"))
    shown = [f"## {path.name}\n\n```python\n{path.read_text('utf-8')}```\n" for path in scripts]
    files.append(File.generated(config, EXAMPLES, content="\n".join(["# Examples\n", *shown])))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to ../README.md of a checkout into links to the page."""
    return re.sub(r"\]\(((?:\.\./)*)\.\./README\.md", rf"](\1{PAGE}", markdown)
