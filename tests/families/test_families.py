"""Every function of docs/families.md against its model's formula in plain numpy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fakes
import models
import pytest
import random_block
from models import CASES, MODELS

TOLERANCE = 1e-5  # f32 against f64


def test_the_page_lists_every_model(functions: dict[str, Callable[..., Any]]) -> None:
    assert [*functions] == [*MODELS]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_model_equals_its_formula(
    group: fakes.LocalGroup, functions: dict[str, Callable[..., Any]], name: str, number: int
) -> None:
    config = SimpleNamespace(**MODELS[name].configs[number])
    case = models.Case(name, functions[name], config)
    assert random_block.error(case.run(group), case.oracle()) < TOLERANCE
