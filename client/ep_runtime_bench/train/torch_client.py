"""`python -m ep_runtime_bench.train.torch_client`: the model as PyTorch trainers write it.

It uses `scaled_dot_product_attention`, the layer of `moe/torch_client.py`, fused AdamW, and
torch.compile for the dense parts; weights outside the experts are replicated.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ep_runtime_bench.base import torch_ranks, train_cases
from ep_runtime_bench.moe.torch_client import drawn, expert_weights, make_layer

LEARNING_RATE = 1e-5
WEIGHT_DECAY = 1e-4  # optax's default

Tensor = Any


class _Layer(NamedTuple):
    """Weights of one layer; wi and wo have only this rank's experts."""

    qkv: Tensor
    out: Tensor
    router: Tensor
    wi: Tensor
    wo: Tensor
    norms: tuple[Tensor, Tensor]


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def _before(x: Tensor, norm: Tensor, qkv: Tensor) -> Tensor:
    return _normed(x, norm) @ qkv


def _after(x: Tensor, mixed: Tensor, out: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    x = x + mixed @ out
    return x, _normed(x, norm)


def _head(x: Tensor, embedding: Tensor, words: Tensor) -> Tensor:
    logits = (x @ embedding.t()).float()
    return F.cross_entropy(logits.view(-1, embedding.shape[0]), words.reshape(-1))


class _Training:
    """Weights, optimizer and batches of one rank."""

    def __init__(self, rank: torch_ranks.Rank, order: train_cases.TrainOrder) -> None:
        model = order.model
        self._rank, self._model = rank, model
        torch.manual_seed(0)
        self._embedding = drawn(rank, order.dtype, 2500, model.vocabulary, model.hidden)
        self._layers = [self._drawn_layer(order.dtype) for _ in range(model.layers)]
        of_experts = [weight for layer in self._layers for weight in (layer.wi, layer.wo)]
        self._shared = [self._embedding] + [
            weight
            for layer in self._layers
            for weight in (layer.qkv, layer.out, layer.router, *layer.norms)
        ]
        self._optimizer = torch.optim.AdamW(
            self._shared + of_experts,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            fused=rank.on_gpu,
        )
        self._batches = itertools.cycle(
            [self._mine(batch) for batch in train_cases.batches(model, rank.count)]
        )
        experts = train_cases.expert_ids(model, order.routing, rank.count, rank.count)
        self._experts = None if experts is None else self._mine(experts).flatten(0, 1)
        self._moe = make_layer(rank, model.case)
        dense = [rank.compiled(function) for function in (_before, _after, _head)]
        self._before, self._after, self._head = dense

    def _mine(self, array: Any) -> Tensor:
        """Returns this rank's part of an array that every rank has whole, as int64."""
        part = np.array_split(array, self._rank.count)[self._rank.index]
        return torch.tensor(part, device=self._rank.device, dtype=torch.int64)

    def _drawn_layer(self, dtype: str) -> _Layer:
        rank, hidden = self._rank, self._model.hidden
        norms = [torch.ones(hidden, device=rank.device, dtype=getattr(torch, dtype)) for _ in "ab"]
        qkv = drawn(rank, dtype, hidden, hidden, 3 * hidden)
        out = drawn(rank, dtype, hidden, hidden, hidden)
        router, wi, wo = expert_weights(rank, dtype, self._model.case)
        pair = norms[0].requires_grad_(), norms[1].requires_grad_()
        return _Layer(qkv, out, router, wi, wo, pair)

    def _loss(self, words: Tensor) -> Tensor:
        x = self._embedding[words[:, :-1]]
        for layer in self._layers:
            mixed = self._mixed(self._before(x, layer.norms[0], layer.qkv))
            x, normed = self._after(x, mixed, layer.out, layer.norms[1])
            flat = normed.reshape(-1, normed.shape[-1])
            y = self._moe(flat, layer.router, layer.wi, layer.wo, self._experts)
            x = x + y.view_as(x)
        return self._head(x, self._embedding, words[:, 1:])

    def _mixed(self, qkv: Tensor) -> Tensor:
        """Computes causal attention of [B, S, 3H]."""
        heads = qkv.unflatten(-1, (3, self._model.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return out.transpose(1, 2).flatten(2)

    def step(self) -> Tensor:
        """Enqueues one step; returns its loss."""
        loss = self._loss(next(self._batches))
        loss.backward()
        mean = dist.ReduceOp.AVG if self._rank.on_gpu else dist.ReduceOp.SUM  # gloo has no AVG
        works = [dist.all_reduce(w.grad, op=mean, async_op=True) for w in self._shared]
        for work in works:
            work.wait()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def measure(rank: torch_ranks.Rank, order: train_cases.TrainOrder) -> train_cases.Trained:
    """Trains one model."""
    training = _Training(rank, order)
    losses = torch.stack([training.step() for _ in range(train_cases.FIRST)])
    dist.all_reduce(losses)
    step_s = [rank.timed(training.step, train_cases.ROUND) for _ in range(order.repeats)]
    joules = rank.joules(training.step, step_s[-1])
    told = [float(loss) / rank.count for loss in losses]
    return train_cases.Trained(step_s, told, rank.peak_bytes(), 0, 0, joules=joules)


if __name__ == "__main__":
    sys.exit(torch_ranks.main(measure, train_cases.TrainOrder.from_dict(json.loads(sys.argv[1]))))
