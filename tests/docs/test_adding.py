"""docs/developing.md, "To add, touch": the examples touch what the table says, and work.

An example is a section of that page; its blocks are new files and changes in others, which are made
in a copy of the tree. There the stubs are generated anew and the example's tests run.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import copied_tree
import doc_pages
import pytest

PAGE = doc_pages.ROOT / "docs/developing.md"
EXAMPLES = {
    "An op": "an op",
    "An RPC": "an RPC",
    "A command": "a command",
    "A group setting": "a group setting",
}
# Tests of the tree that an example must leave true, beside its own.
KEPT = (
    "tests/core/test_public_names.py::test_the_stub_lists_the_public_names",
    "tests/core/test_wire.py::test_a_group_spec_comes_back_equal",
    "tests/docs/test_docstrings.py::test_the_reference_has_every_name",
    "tests/docs/test_tables.py::test_the_command_table_lists_every_command",
    "tests/server/test_api_sock.py::test_readings_are_the_services_own",
)
TIMEOUT_S = 200


def blocks_of(example: str) -> list[doc_pages.Block]:
    """New files and changes of one section."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.count("\n", 0, text.index(f"\n### {example}\n")) + 1
    after = re.search(r"\n##+ ", text[text.index(f"\n### {example}\n") + 5 :])
    length = len(text) if after is None else text.index(f"\n### {example}\n") + 5 + after.start()
    end = text.count("\n", 0, length) + 1
    return [block for block in doc_pages.blocks(PAGE) if start < block.line <= end]


def path_of(block: doc_pages.Block) -> str:
    path = block.said("new:") or block.said("in:")
    assert path, f"{block.place} says neither new: nor in:"
    return path


def named(cell: str) -> list[str]:
    """Paths of a cell as patterns: `<op>` may be anything."""
    paths = [re.sub(r"<\w+>", "*", text) for text in re.findall(r"`([^`]+)`", cell)]
    tools = ("tests/tools/", "tests/faults/")
    return [
        path
        for path in paths
        if ("/" in path or "." in path or path == "*") and not path.startswith(tools)
    ]


def change(text: str, diff: str, place: str) -> str:
    """The text with the hunks of a diff made; what stands around each is there once."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert old, f"{place}: a hunk stands nowhere"
        assert text.count(old) == 1, f"{place}: {text.count(old)} times there:\n{old}"
        text = text.replace(old, new)
    return text


def make(block: doc_pages.Block, root: Path) -> None:
    path = root / path_of(block)
    if block.said("new:"):
        assert not path.exists(), f"{block.place}: {path} is there"
        path.write_text(block.code, encoding="utf-8")
    else:
        text = path.read_text(encoding="utf-8")
        path.write_text(change(text, block.code, block.place), encoding="utf-8")


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_touches_what_the_table_says(example: str) -> None:
    rows = {row[0]: row for row in doc_pages.table(PAGE, "## To add, touch")}
    _, always, where = rows[EXAMPLES[example]]
    paths = [path_of(block) for block in blocks_of(example)]
    assert len(set(paths)) == len(paths)
    touched = set(paths) - set(named(where))
    # Those that say most come first: a reader may be any file that is left.
    for pattern in sorted(named(always), key=lambda path: ("*" in path, -len(path))):
        fitting = fnmatch.filter(touched, pattern)
        assert len(fitting) == 1, (pattern, touched)
        touched.remove(fitting[0])
    assert not touched, "no column names them"


def test_a_setting_costs_four_files_and_its_test() -> None:
    touched = [path_of(block) for block in blocks_of("A group setting")]
    assert len([path for path in touched if not path.startswith("tests/")]) <= 4


def test_every_path_of_the_table_is_there() -> None:
    for row in doc_pages.table(PAGE, "## To add, touch"):
        for path in [path for cell in row[1:] for path in named(cell)]:
            place = path.partition("*")[0].rpartition("/")[0] if "*" in path else path
            assert (doc_pages.ROOT / place).exists(), path


@pytest.mark.skipif(
    not importlib.util.find_spec("grpc_tools"), reason="stubs need grpcio-tools (the extra dev)"
)
def test_what_the_examples_add_works(tmp_path: Path) -> None:
    copied_tree.copy_to(tmp_path)
    blocks = [block for example in EXAMPLES for block in blocks_of(example)]
    for block in blocks:
        make(block, tmp_path)
    tests = sorted({path for path in map(path_of, blocks) if path.startswith("tests/")})
    for command in (
        [sys.executable, str(tmp_path / "tests/tools/generate_stubs.py")],
        copied_tree.pytest_command(tmp_path, *tests, *KEPT),
    ):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=copied_tree.environment(tmp_path),
            timeout=TIMEOUT_S,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
