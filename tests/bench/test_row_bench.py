"""The benches of rows without a GPU: their subjects on a CPU device."""

from __future__ import annotations

import pytest

from ep_runtime_bench.base.options import BenchOptions
from ep_runtime_bench.one_device import permute, quantize
from ep_runtime_bench.one_device import rows as one_device_rows
from ep_runtime_bench.one_device.gpu_gemm import LOADS

OPTIONS = BenchOptions(tokens_per_rank=64, top_k=2, hidden=64, num_experts=8, repeats=1)


class CountingTimer:
    """Runs what it is given, and says that it took 2 us."""

    def call_us(self, program: object, operands: tuple[object, ...], repeats: int) -> float:
        assert callable(program)
        program(*operands)
        return 2.0


@pytest.mark.parametrize("bench", [pytest.param(quantize, marks=pytest.mark.slow), permute])
def test_every_subject_stands_beside_a_copy(bench: object) -> None:
    sizes = one_device_rows.sizes_of(OPTIONS)
    assert sizes == one_device_rows.RowSizes(128, 64)
    subjects = bench.make_subjects(OPTIONS, sizes)
    found = [*one_device_rows.measure(OPTIONS, CountingTimer(), subjects)]
    copied = 2 * 128 * 64 * 2 / 2 / 1e3
    assert [row["gb_s"] for row in found[:2]] == [round(copied, 1)] * 2
    for row in found[2:]:
        if row["subject"] == "plan":
            assert (row["gb_s"], row["ratio_to_copy"]) == (None, None)
        else:
            assert row["ratio_to_copy"] == pytest.approx(row["gb_s"] / copied, rel=0.1)
    names = {row["subject"] for row in found}
    if bench is quantize:
        assert {row["load"] for row in found} == {"", *LOADS}
        assert {f"rows, {name}" for name in quantize.RECIPES} < names
    else:
        assert {"plan", "permute", "unpermute", "unpermute, weighted", "its gradients"} < names
