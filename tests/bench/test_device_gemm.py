"""The bench of grouped GEMM, on a CPU device."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest

from ep_runtime_bench import gemm
from ep_runtime_bench.base.options import BenchOptions

OPTIONS = BenchOptions(benches=("gemm",), tokens_per_rank=32, top_k=4, hidden=16, repeats=2)


def test_every_product_and_load_has_a_row_beside_dense_and_ragged_dot() -> None:
    found = [*gemm.measure(OPTIONS, gemm.HostTimer(), groups=(4,), inner=8)]
    assert [(r["in_features"], r["groups"], r["load"], r["product"]) for r in found] == [
        (k, 4, load, product) for k in (16, 8) for load in gemm.LOADS for product in gemm.PRODUCTS
    ]
    for row in found:
        assert row["rows"] == (64 if row["load"] == "half-empty" else 128)
        assert row["out_features"] == 16
        assert row["ms"] > 0
        assert min(row["dense_tflops"], row["ragged_dot_tflops"]) >= 0
        assert row["tokamax_tflops"] is None or importlib.util.find_spec("tokamax")


@pytest.mark.parametrize("refuses", [False, True])
def test_tokamax_has_a_column_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refuses: bool
) -> None:
    def ragged_dot(*operands: Any) -> Any:
        if refuses:
            raise NotImplementedError("not on this device")
        return jax.lax.ragged_dot(*operands)

    module = types.ModuleType("tokamax")
    module.__spec__ = importlib.machinery.ModuleSpec("tokamax", None)
    monkeypatch.setattr(module, "ragged_dot", ragged_dot, raising=False)
    monkeypatch.setitem(sys.modules, "tokamax", module)
    monkeypatch.setattr(gemm, "LOADS", ("zipf",))
    monkeypatch.setattr(gemm, "PRODUCTS", ("data grad",))
    found = [*gemm.measure(OPTIONS, gemm.HostTimer(), groups=(4,), inner=8)]
    assert len(found) == 2
    for row in found:
        assert (row["tokamax_tflops"] is None) == refuses
    assert (
        "Tokamax: NotImplementedError: not on this device" in capsys.readouterr().err
    ) == refuses


@pytest.mark.slow
def test_recipes_have_rows_of_their_own_beside_what_they_quantize(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemm, "LOADS", ("zipf",))
    options = dataclasses.replace(OPTIONS, hidden=32)
    measured = gemm.measure(options, gemm.HostTimer(), groups=(4,), inner=32, narrow=gemm.NARROW)
    found = [row for row in measured if row["out_features"] == 64]
    names = (None, *gemm.NARROW)
    assert [(row["recipe"], row["product"]) for row in found] == [
        (name, product) for name in names for product in gemm.PRODUCTS
    ]
    for row in found:
        assert (row["ratio_to_wide"] is None) == (row["recipe"] is None)
        assert {*row} == {column.key for column in gemm.COLUMNS}


@pytest.mark.parametrize("groups", [8, 32, 128])
@pytest.mark.parametrize(("name", "total"), [("uniform", 1), ("zipf", 1), ("half-empty", 0.5)])
def test_loads_fill_the_slab_as_they_say(groups: int, name: str, total: float) -> None:
    sizes = gemm.loads(name, groups, gemm.ROWS)
    assert (sizes.dtype, sizes.shape) == (np.dtype(np.int32), (groups,))
    assert sizes.sum() == total * gemm.ROWS
    assert (sizes % 128 == 0).all()
    spread = sizes.max() / gemm.ROWS * groups
    assert spread > 2 if name == "zipf" else spread == total
