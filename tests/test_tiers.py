"""The lists of `tiers`: each line names an existing test, and is needed."""

from __future__ import annotations

import pytest
import tiers
from named_tests import TESTS, names_in


@pytest.mark.parametrize("name", ["long", "static", "telling"])
def test_every_line_names_a_test(name: str) -> None:
    text = (tiers.FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert text.splitlines() == sorted(tiers.lines(name))
    for line in tiers.lines(name):
        file, _, test = line.partition("[")[0].removeprefix("tests/").partition("::")
        assert (TESTS / file).is_file(), line
        assert not test or test in names_in(file), line


def test_telling_tests_are_long_ones() -> None:
    for line in tiers.lines("telling"):
        assert {line, line.partition("[")[0], line.partition("::")[0]} & tiers.lines("long"), line
