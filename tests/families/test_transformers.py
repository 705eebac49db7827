"""`pytest -m transformers -s tests/families`: models against transformers' layers, on torch's CPU.

The functions of docs/families.md and the oracles get the config objects of transformers themselves;
docs/results.md has the table that this prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra families")

import fakes
import models
import random_block
import torch
import torch_layers
import transformers

pytestmark = pytest.mark.transformers

TOLERANCE = 1e-5  # f32 on both sides


@pytest.fixture(scope="module")
def errors(functions: dict[str, Callable[..., Any]]) -> Iterator[dict[str, list[Any]]]:
    """By model and config, differences of the page's function and of the oracle. The table of
    docs/results.md is printed after the last test.
    """
    found: dict[str, list[Any]] = {}
    yield found
    rows = [f"transformers {transformers.__version__}, torch {torch.__version__}", ""]
    rows += ["| model | its layer | configs | lines | `ep.moe` | plain numpy |", "|---" * 6 + "|"]
    for name, pairs in found.items():
        ours, oracle = map(max, zip(*pairs, strict=True))
        cells = (name, torch_layers.LAYERS[name].block, len(pairs))
        lines = models.lines_of(functions[name])
        rows.append(f"| {' | '.join(map(str, cells))} | {lines} | {ours:.1e} | {oracle:.1e} |")
    sys.stdout.write("\n" + "\n".join(rows) + "\n")


@pytest.mark.parametrize(("name", "number"), models.CASES)
def test_a_model_equals_its_layer(
    group: fakes.LocalGroup,
    functions: dict[str, Callable[..., Any]],
    errors: dict[str, list[Any]],
    name: str,
    number: int,
) -> None:
    place = torch_layers.LAYERS[name]
    whole = torch_layers.config_of(place, models.MODELS[name].configs[number])
    config = whole
    if place.module == "dbrx":
        config = SimpleNamespace(model_type="dbrx", **whole.ffn_config.to_dict())
    case = models.Case(name, functions[name], config)
    wanted = torch_layers.run(name, torch_layers.block_of(place, whole, case.w), case.w)
    pair = [random_block.error(y, wanted) for y in (case.run(group), case.oracle())]
    errors.setdefault(name, []).append(pair)
    assert max(pair) < TOLERANCE
