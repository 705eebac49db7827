"""Assigns tests to tiers: the lists of this folder name files, tests or cases.

- static: checks of texts and sources, which `static.txt` lists.
- long: `long.txt`, which tests/tools/long_tests.py writes, without those of `telling.txt`.
- quick: all others, and those of `telling.txt`: a case of each kind that tells of a broken product.
- slow: what is marked so.

pytest without arguments runs the quick tier, `-m full` the first three, as the gate does, `-m slow`
the last one. A path or -k without -m runs all of what it names but the last.
"""

from __future__ import annotations

import functools
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@functools.cache
def lines(name: str) -> frozenset[str]:
    """Returns the lines of the list `name`.txt."""
    return frozenset((FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines())


def tier_of(test: str) -> str:
    """Returns the tier of a node id, by its case, its test or its file."""
    names = {test, test.partition("[")[0], test.partition("::")[0]}
    if names & lines("static"):
        return "static"
    return "long" if names & lines("long") and not names & lines("telling") else "quick"
