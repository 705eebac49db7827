"""Refuses the bad English that a regular expression finds in pages, docstrings, errors, `--help`.

    PYTHONPATH=.:server:client:tests python tests/tools/plain_english.py

Prints `file:line: text: what to say instead` and ends with exit code 1 on findings.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator

from doc_pages import ROOT
from public_names import PUBLIC

from ep_runtime_client import cli
from ep_runtime_server.main import build_parser

MAX_WORDS = 30
# The changelog's and the results' lines are dated and never change.
PAGES = ["README.md", "docs/**/*.md"]
DATED = {"CHANGELOG.md", "results.md"}

# Patterns match within one sentence, which ^ begins and $ ends.
RULES = {
    r"(?<![Tt]here )\b(is|are|was|were) no (?!longer\b|more\b|less\b)": 'say "is not"',
    r"\b(is|are) said\b": 'say "warns", "reports" or "the text says"',
    r"\b(is|are|was|were) told\b": 'say "is reported" or name the actor',
    r"\b(lie|lies|lay|lying) (over|along|on|across|alike|by)\b": 'say "is sharded over" or "is on"',
    r"^(What|Who|Whom|Whose|Those|That which)\b(?!.*\?$)": "name the subject",
    r"^Of (the|a|an|which|those|these|all)\b": "begin with the subject",
    r"\bof (what|whom)\b": 'say "of the NOUN that"',
    r"^Where\b(?!.*\?$)": 'a condition takes "if" or "when"',
    r"\bwhere (nothing|no|none|only|any|there|it has|it is)\b": 'a condition takes "if" or "when"',
    r"\b(but for|nothing but|none but|all but|any but)\b": 'say "unless", "except" or "only"',
    r"\bby (itself|themselves)\b": 'say "by default", "separately" or "alone"',
    r"\b(by which|whom)\b": "name the noun, or start a new sentence",
    r"\bbeside\b": 'say "next to", "with" or "overlaps"',
    r"\bstock [\w`]": 'say "plain JAX"',
    r"(\w ?\.\.\.|…)$": "say the rest, or how much is left out",
}
# An empty line, a list's item, a heading, a quote, a table's cell, or a column of a `--help`.
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*#>!]|\d+\.) )|(?<!\\)\||\n(?= *\S+(?: \S+)?  )")
# Calls with texts for users.
SPOKEN = re.compile(r"(Error|_log|\b_?log(ger)?\.(debug|info|warning|error|exception))$")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[`*\"\[(]*[A-Z0-9])")


def faults(page: str) -> Iterator[tuple[int, str, str]]:
    """Yields line from 0 on, text and what to say instead, without code, comments and addresses."""
    code = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.M | re.S)
    page = code.sub(lambda found: "\n" * found[0].count("\n"), page)
    page = re.sub(r"`[^`]+`", "`Code`", re.sub(r"\]\([^)\s]*\)", "]", page))
    page = _BLOCK.sub(lambda border: "\f" + border[0].strip("|"), page)
    page = SENTENCE_END.sub(lambda space: "\f" + space[0], page)
    end = 0
    for piece in page.split("\f"):
        sentence = " ".join(piece.split()).lstrip("-*> ")
        line = end + piece[: len(piece) - len(piece.lstrip())].count("\n")
        end += piece.count("\n")
        if sentence.startswith("#"):
            continue
        for pattern, instead in RULES.items():
            if found := re.search(pattern, sentence):
                yield line, sentence[max(found.start() - 30, 0) : found.end() + 30], instead
        if (words := len(re.findall(r"\w\S*", sentence))) > MAX_WORDS:
            yield line, f"{sentence[:60]} ({words} words)", "split the sentence"


def _help(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the texts of a parser and of its subcommands."""
    yield from filter(None, (parser.description, parser.epilog))
    for action in parser._actions:
        yield from filter(None, [action.help])
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                yield from _help(choice)


def _template(text: ast.expr) -> str:
    """Returns a string, with `Code` for values of a run; "" for another expression."""
    if isinstance(text, ast.BinOp):
        return f"{_template(text.left)}{_template(text.right)}"
    if isinstance(text, ast.JoinedStr):
        return "".join(_template(part) or "`value`" for part in text.values)
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and clauses, each a sentence, of texts in `raise`, errors and log calls."""
    for node in ast.walk(ast.parse(source)):
        named = isinstance(node, ast.Call) and SPOKEN.search(ast.unparse(node.func))
        calls = ast.walk(node) if isinstance(node, ast.Raise) else [node] if named else []
        for call in calls:
            for text in call.args if isinstance(call, ast.Call) else []:
                clauses = re.split(r"(?<=[\w`)])[;:] ", _template(text))
                yield text.lineno, "\n\n".join(each[:1].upper() + each[1:] for each in clauses)


def _texts() -> Iterator[tuple[str, int, str]]:
    """Yields file, line from 1 on, and text."""
    for package in ("ep_runtime", "server", "client"):
        for path in (ROOT / package).rglob("*.py"):
            for line, text in messages(path.read_text("utf-8")):
                yield str(path), line, text
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            if path.name not in DATED:
                yield str(path), 1, path.read_text(encoding="utf-8")
    for item in PUBLIC:
        source, line = inspect.getsourcelines(item.definition)
        line += next(index for index, text in enumerate(source) if '"""' in text)
        # Each entry of a section is a text; an example is code.
        text = re.sub(r"\n(?=    \w)", "\n|", item.doc.split("\nExamples:")[0])
        yield str(inspect.getsourcefile(item.definition)), max(line, 1), text
    for name in cli.COMMANDS:
        for text in _help(build_parser() if name == "serve" else cli.make_parser(name)):
            yield f"ep-runtime {name} --help", 1, text


def main() -> int:
    found = [
        f"{place.removeprefix(f'{ROOT}/')}:{first + line}: {text}: {instead}"
        for place, first, whole in _texts()
        for line, text, instead in faults(whole)
    ]
    sys.stdout.writelines(f"{text}\n" for text in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
