"""`python -m ep_runtime_bench.moe.torch_client`: the MoE layer as PyTorch trainers write it.

Tokens are sorted by expert and sent by `all_to_all_single`, whose sizes the host reads; experts use
`torch._grouped_mm`; activation and combine are compiled by torch.compile. No DeepEP. It drops
nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ep_runtime_bench.base import torch_ranks
from ep_runtime_bench.base.moe_cases import ENQUEUED, ROUNDS, Case, LayerOrder, Measured, Step

WARMUP = 6

Tensor = Any
Layer = Callable[..., Tensor]


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """Sends rows to the other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = received, sent
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grads[0], *ctx.sizes), None, None


class _Plan(NamedTuple):
    """The exchange of rows: sizes by rank, and the order of received rows by expert."""

    sent: list[int]
    received: list[int]
    by_expert: Tensor  # [rows] index of the next received row
    place: Tensor  # [rows] the inverse of by_expert
    ends: Tensor  # int32 [L]: where each local expert's rows end


def _activated(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _combined(rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Sums the rows of each token's slots, weighted: [T, H]."""
    of_slots = rows[slots].view(*weights.shape, -1)
    return (of_slots * weights.to(rows.dtype).unsqueeze(-1)).sum(1)


def _plan(experts: Tensor, num_experts: int, ranks: int) -> _Plan:
    local = num_experts // ranks
    counts = torch.bincount(experts, minlength=num_experts)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    theirs = theirs.view(ranks, local)
    sizes = torch.stack([counts.view(ranks, local).sum(1), theirs.sum(1)])
    sent, received = sizes.tolist()  # the host waits here
    flat = theirs.t().reshape(-1)
    starts = (flat.cumsum(0) - flat).view(local, ranks).t().reshape(-1)
    by_source = theirs.reshape(-1)
    total = sum(received)
    segment = torch.repeat_interleave(
        torch.arange(num_experts, device=experts.device), by_source, output_size=total
    )
    row = torch.arange(total, device=experts.device)
    place = starts[segment] + row - (by_source.cumsum(0) - by_source)[segment]
    by_expert = torch.empty_like(place)
    by_expert[place] = row
    return _Plan(sent, received, by_expert, place, theirs.sum(0).cumsum(0).to(torch.int32))


def make_layer(rank: torch_ranks.Rank, case: Case) -> Layer:
    """Makes f(x, router, wi, wo, experts) -> y [T, H]; experts [T, K], or None for the router's."""
    activated = rank.compiled(_activated, dynamic=True)
    combined = rank.compiled(_combined, dynamic=True)

    def layer(
        x: Tensor, router: Tensor, wi: Tensor, wo: Tensor, experts: Tensor | None = None
    ) -> Tensor:
        shares = (x @ router).float().softmax(-1)
        if experts is None:
            weights, experts = shares.topk(case.top_k, -1)
        else:
            weights = shares.gather(-1, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = experts.reshape(-1)
        order = flat.argsort(stable=True)
        plan = _plan(flat, case.num_experts, rank.count)
        rows = _Exchange.apply(x[order // case.top_k], plan.sent, plan.received)
        hidden = torch._grouped_mm(rows[plan.by_expert], wi, offs=plan.ends)
        out = torch._grouped_mm(activated(hidden), wo, offs=plan.ends)
        back = _Exchange.apply(out[plan.place], plan.received, plan.sent)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(order.numel(), device=order.device)
        return combined(back, slots, weights)

    return layer


def drawn(rank: torch_ranks.Rank, dtype: str, fan_in: float, *shape: int) -> Tensor:
    """Draws a weight of variance 1 / fan_in."""
    kind = getattr(torch, dtype)
    values = torch.randn(*shape, device=rank.device, dtype=kind) * fan_in**-0.5
    return values.requires_grad_()


def expert_weights(rank: torch_ranks.Rank, dtype: str, case: Case) -> list[Tensor]:
    """Draws router, wi and wo, the latter two for this rank's experts."""
    local, hidden, inner = case.num_experts // rank.count, case.hidden, case.inner
    shapes = ((hidden, case.num_experts), (local, hidden, 2 * inner), (local, inner, hidden))
    return [drawn(rank, dtype, shape[-2], *shape) for shape in shapes]


def measure(rank: torch_ranks.Rank, order: LayerOrder) -> Measured:
    """Times one case, forward and backward."""
    case = order.case
    torch.manual_seed(rank.index)
    x = drawn(rank, order.dtype, 1.0, case.tokens, case.hidden)
    operands = [x, *expert_weights(rank, order.dtype, case)]
    layer = make_layer(rank, case)

    def step() -> object:
        loss = layer(*operands).float().square().sum()
        return torch.autograd.grad(loss, operands)

    for _ in range(WARMUP):
        step()
    step_s = [rank.timed(step, 1) for _ in range(order.repeats)]
    enqueued_s = median(rank.timed(step, ENQUEUED) for _ in range(ROUNDS))
    joules = rank.joules(step, enqueued_s)
    return Measured([Step("", step_s, enqueued_s, rank.peak_bytes(), 0, joules)], dropped=0)


if __name__ == "__main__":
    sys.exit(torch_ranks.main(measure, LayerOrder.from_dict(json.loads(sys.argv[1]))))
