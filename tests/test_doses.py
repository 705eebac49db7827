"""The table of doses: its tests are there, take their doses, and the page shows it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import doses
import pytest
from named_tests import names_in

HELD = [held for promise in doses.TABLE for held in promise.held_by]


def test_promises_are_numbered_once_and_in_order() -> None:
    numbers = [promise.number for promise in doses.TABLE]
    assert numbers == sorted(set(numbers))
    assert len({held.test for held in HELD}) == len(HELD)


def test_every_test_of_the_table_is_there_and_takes_a_dose_where_it_has_one() -> None:
    for held in HELD:
        file, _, name = held.test.partition("::")
        assert name in names_in(file), held.test
        assert (name.rpartition("::")[2] in takers(file)) == bool(held.full), held.test
        assert held.ci <= held.full


@functools.cache
def takers(file: str) -> set[str]:
    """Functions of a file that take the fixture."""
    tree = ast.parse((doses.TESTS / file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if any(given.arg == "dose" for given in node.args.args)}


def test_no_test_takes_a_dose_that_the_table_does_not_have() -> None:
    known = {tuple(held.test.split("::")) for held in HELD if held.full}
    for path in doses.TESTS.rglob("test_*.py"):
        file = str(path.relative_to(doses.TESTS))
        if path != Path(__file__):
            tests = {name for name in takers(file) if name.startswith("test_")}
            assert not [name for name in tests if (file, name) not in known], file


def test_the_page_shows_the_table_and_the_last_runs() -> None:
    text = doses.PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition(doses.BEGIN)
    shown, end, _ = rest.partition(doses.END)
    assert end
    assert shown == doses.tables(), "python tests/run_doses.py --page writes it anew"


@pytest.mark.parametrize(
    ("chosen", "wanted"), [("ci", HELD[0].ci), ("full", HELD[0].full), ("3", 3), ("900", 200)]
)
def test_a_dose_is_that_of_ci_the_full_one_or_a_number_below(chosen: str, wanted: int) -> None:
    assert doses.of(HELD[0].test, chosen) == wanted
