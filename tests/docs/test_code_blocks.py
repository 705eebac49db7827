"""Runs every code block of README and docs that does not name what it lacks (`doc_pages`)."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
import textwrap
import tomllib
from pathlib import Path

import doc_pages
import pytest
import run_examples
import run_page
from child_programs import run_to_end

from ep_runtime_client import cli
from ep_runtime_client.demo.cli import make_config
from ep_runtime_server.main import build_parser

# Runs before a page's commands: their background processes end with them.
ENDS_ITS_JOBS = "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT"
LANGUAGES = {"python", "bash", "toml", "text", "diff", ""}

BLOCKS = [block for page in doc_pages.PAGES for block in doc_pages.blocks(page)]


def pages(language: str) -> list[Path]:
    """Pages with a block of that language that runs; examples of docstrings continue from START."""
    found = {block.page for block in BLOCKS if block.runs and block.language == language}
    return sorted(found - {run_examples.START})


@pytest.mark.parametrize("page", pages("python"), ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    # A separate process, like a reader's, because connect() must come before JAX's backends.
    script = str(doc_pages.TESTS / "run_page.py")
    command = [sys.executable, "-W", "error", script, str(page)]
    run_to_end(*command, cwd=tmp_path, env=environment, **run_page.CHEAP)


@pytest.mark.parametrize("page", pages("bash"), ids=lambda page: page.stem)
def test_the_shell_of_a_page_runs(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    blocks = [b.code for b in doc_pages.blocks(page) if b.runs and b.language == "bash"]
    script = "\n".join([ENDS_ITS_JOBS, *blocks])
    run_to_end("bash", "-euo", "pipefail", "-c", script, cwd=tmp_path, env=environment)


def test_blocks_that_do_not_run_say_why() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, block.place
        assert block.said("not run:") != "", f"{block.place}: no reason"


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.said("from ")], ids=lambda block: block.place
)
def test_code_from_a_file_stands_in_it(block: doc_pages.Block) -> None:
    path = doc_pages.ROOT / str(block.said("from "))
    script = path.read_text(encoding="utf-8")
    assert block.code in script or textwrap.indent(block.code, "    ") in script


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"])
def test_configuration_parses(block: doc_pages.Block) -> None:
    assert tomllib.loads(block.code)


def commands() -> list[tuple[str, list[str]]]:
    """Returns (place, words) of every shown command of ours, with the block's
    variables filled in.
    """
    found = []
    for block in BLOCKS:
        if block.language != "bash":
            continue
        variables: dict[str, str] = {}
        whole_lines = block.code.replace("\\\n", " ").splitlines()
        for number, line in enumerate(whole_lines):
            variables |= dict(re.findall(r'^(\w+)="(.*)"$', line))
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            words = shlex.shlex(line, posix=True, punctuation_chars=True)
            words.whitespace_split = True
            for ends, part in itertools.groupby(words, lambda word: word in (">", "&", "&&", ";")):
                command = list(part)
                if not ends and "ep-runtime" in [Path(word).name for word in command]:
                    start = [Path(word).name for word in command].index("ep-runtime")
                    found.append((f"{block.place}+{number}", command[start + 1 :]))
    return found


def parser_of(command: str, place: str) -> argparse.ArgumentParser:
    if command == "serve":  # its options are the daemon's
        return build_parser()
    parser = argparse.ArgumentParser(prog=place)
    cli.module(command).add_arguments(parser)
    return parser


def test_options_of_our_commands_exist() -> None:
    checked = 0
    for place, words in commands():
        args = parser_of(words[0], place).parse_args(words[1:])
        if words[0] == "demo":
            make_config(args)
        checked += 1
    assert checked > 20


def test_scripts_that_pages_name_exist() -> None:
    # Results are dated: a script that measured some may have been removed.
    pages = [page for page in doc_pages.PAGES if page.name != "results.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    folders = r"(?:tests|csrc|docs|proto|ep_runtime|client/ep_\w+|server/ep_\w+)"
    named = set(
        re.findall(rf"(?<![\w/]){folders}/[\w/]+\.(?:py|sh|cu|cc|h|md|proto)\b(?!::)", text)
    )
    assert len(named) > 20
    assert [path for path in sorted(named) if not (doc_pages.ROOT / path).exists()] == []
