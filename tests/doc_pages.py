"""Parses README.md and docs/ for tests: pages, their fenced blocks, their tables.

HTML comments in the lines before a fence say how its code is checked; readers do not see them.

| comment | the block |
|---|---|
| none | python and bash run, a page's blocks in order |
| `not run: REASON` | does not run here; of bash the options are still parsed |
| `from PATH` | stands in that file, which has a test of its own |
| `beside` | is bash that runs beside the page's python, on the daemon of its `session` |
| `prints` | is what the page's code printed since the last such block |
| `shows` | are lines among those that the `beside` before it printed; `...` in them is anything |
| `says: NAME` | is a message, with `...` as above, that a test of that name provokes |
| anything else | is a name by which a test finds it |
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
README = ROOT / "README.md"
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]

_FENCED = re.compile(
    r"^(?P<comments>(?:<!--[^\n]*-->\n)*)```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block; `line` is the line of its first line of code."""

    page: Path
    line: int
    language: str
    markers: tuple[str, ...]
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def said(self, key: str) -> str | None:
        """REASON of `not run: REASON`, PATH of `from PATH`; None without such a comment."""
        found = (
            marker.removeprefix(key).strip() for marker in self.markers if marker.startswith(key)
        )
        return next(found, None)

    @property
    def runs(self) -> bool:
        apart = any(self.said(key) is not None for key in ("not run:", "from ", "beside"))
        return self.language in ("python", "bash") and not apart


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            tuple(re.findall(r"<!-- (.*?) -->", found["comments"])),
            found["code"],
        )
        for found in _FENCED.finditer(text)
    ]


def named(page: Path, marker: str) -> Block:
    """Returns the block with that comment."""
    found = [block for block in blocks(page) if marker in block.markers]
    assert len(found) == 1, f"{len(found)} blocks of {page.name} are marked {marker!r}"
    return found[0]


def _pattern(shown: str) -> str:
    """A regular expression: spaces and line ends count as one space, `...` matches anything."""
    return re.escape(" ".join(shown.split())).replace(re.escape("..."), ".*")


def check_shown(block: Block, text: str) -> None:
    """Checks that every line of the block is a line of the text."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for wanted in block.code.splitlines():
        found = any(re.fullmatch(_pattern(wanted), line) for line in lines)
        assert found, f"{block.place}: {wanted!r} is not in\n{text}"


def check_said(name: str, text: str) -> None:
    """Checks that the page on troubleshooting shows that message under that name."""
    block = named(TROUBLESHOOTING, f"says: {name}")
    found = re.fullmatch(_pattern(block.code), " ".join(text.split()))
    assert found, f"{block.place}, {name}: the page has\n{block.code}and what was said is\n{text}"


def table(page: Path, heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, without its two header lines."""
    after = f"\n{page.read_text(encoding='utf-8')}".split(f"\n{heading}\n", 1)[1]
    lines = after[after.index("\n|") + 1 :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
