"""The PyTorch peer of the bench, on CPU, computes the layer that the bench times."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra torch")

from ep_runtime_bench.base import clients, torch_ranks, train_cases  # noqa: E402
from ep_runtime_bench.base.moe_cases import TORCH, Case, LayerOrder, Measured  # noqa: E402
from ep_runtime_bench.moe import torch_client as moe_client  # noqa: E402
from ep_runtime_bench.train import torch_client as train_client  # noqa: E402

RANKS = 2
CASE = Case(tokens=8, hidden=16, inner=8, num_experts=4, top_k=2)
HOW = {"devices": RANKS, "platform": "cpu", "dtype": "float32", "repeats": 2, "address": ""}
ORDER = LayerOrder(subject=TORCH, name="tiny", case=CASE, **HOW)


@dataclasses.dataclass(frozen=True)
class Computed:
    """Largest differences of the result and of each gradient, relative to its largest value."""

    differences: list[float]


def dense(x: Any, router: Any, wi: Any, wo: Any) -> Any:
    """The layer with every expert for every token."""
    weights, experts = (x @ router).softmax(-1).topk(CASE.top_k, -1)
    mixed = torch.zeros(len(x), CASE.num_experts).scatter(1, experts, weights)
    mixed = mixed / mixed.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,ehm->etm", x, wi).chunk(2, -1)
    out = torch.einsum("etm,emh->eth", torch.nn.functional.silu(gate) * up, wo)
    return (out * mixed.t().unsqueeze(-1)).sum(0)


def compute(rank: torch_ranks.Rank, order: LayerOrder) -> Computed:
    torch.manual_seed(0)
    sizes = (CASE.hidden, CASE.num_experts), (CASE.num_experts, CASE.hidden, 2 * CASE.inner)
    shapes = ((RANKS * CASE.tokens, CASE.hidden), *sizes, (CASE.num_experts, CASE.inner, 16))
    whole = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    parts = [array.detach().chunk(RANKS)[rank.index] for array in whole]
    parts[1] = whole[1].detach()  # every rank has the whole router
    mine = [part.clone().requires_grad_() for part in parts]
    y, expected = moe_client.make_layer(rank, CASE)(*mine), dense(*whole)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.distributed.all_reduce(mine[1].grad)
    pairs = [(y, expected.chunk(RANKS)[rank.index]), (mine[1].grad, whole[1].grad)]
    for number in (0, 2, 3):
        pairs.append((mine[number].grad, whole[number].grad.chunk(RANKS)[rank.index]))
    with torch.no_grad():
        return Computed([rank.largest((a - b).abs().max() / b.abs().max()) for a, b in pairs])


def found_by(measure: Any, order: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(clients, "tell", lambda stage: None)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert torch_ranks.main(measure, order) == 0
    return json.loads(out.getvalue())


def test_the_layer_and_its_gradients_are_those_of_all_experts_dense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = found_by(compute, ORDER, monkeypatch)
    np.testing.assert_allclose(found["differences"], np.zeros(5), atol=1e-5)


def test_the_layer_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Measured.from_dict(found_by(moe_client.measure, ORDER, monkeypatch))
    (step,) = found.steps
    assert (len(step.step_s), step.peak_bytes, step.joules, found.dropped) == (2, None, None, 0)
    assert step.enqueued_s > 0


@pytest.mark.parametrize("routing", ["router", "zipf"])
def test_the_model_learns(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(train_cases.CPU_MODELS["8-layers"], sequence=8, vocabulary=32)
    how = {**HOW, "model": model, "routing": routing}
    order = train_cases.TrainOrder(subject=TORCH, name="tiny", **how)
    found = found_by(train_client.measure, order, monkeypatch)
    assert found["losses"][-1] < found["losses"][0]
    assert len(found["step_s"]) == 2
