"""Computes how far copies of experts even out rows over ranks, for a trained router and others.

    PYTHONPATH=.:server:client:tests:tests/ops python tests/bench/recorded_routing.py FILE

If there is no FILE (.npz), trains the demo's model with 64 experts, 8 per token, for some minutes,
and records the experts of the last steps there. Prints rows of the fullest rank over the
mean before and after the plan of `ep.moe`, with as many slots as a rank has experts: for the
recorded calls, the worst one, and for the workloads of `tests/ops/test_copies.py`. Ends with 1 if
the plan leaves more than MOST.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from ops.test_copies import BALANCED, rows_after, workloads

import ep_runtime as ep
from ep_runtime_client.demo import job, transformer
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.trainer import Trainer, make_mesh

RANKS = (2, 4, 8, 16, 32)
MOST = 1.04
RECORDED_STEPS = 8
SIZES = {"num_experts": 64, "top_k": 8, "mlp_dim": 64, "num_layers": 4}
Ints = npt.NDArray[np.int64]


def record(steps: int) -> npt.NDArray[np.int32]:
    """Trains, and returns experts of the last steps' tokens, [calls, tokens, K]."""
    config = DemoConfig(steps=steps, devices=1, **SIZES).checked()
    text = job.load_text()
    batches = job.training_batches(text, batch=config.batch, seq=config.seq, seed=config.seed)
    found = []
    with ep.connect("embedded") as session:
        trainer = Trainer(config, session, make_mesh(config), name="demo", transport="auto")
        trainer.compile()

        def chosen(params: Any, window: Any) -> jax.Array:
            seen = []

            def moe(*args: Any, **how: Any) -> Any:
                made = ep.moe(*args, **how)
                seen.append(made[2].routing.topk_idx)
                return made

            with mock.patch.object(transformer, "ep", SimpleNamespace(moe=moe)):
                trainer._loss_fn(params, window)
            return jnp.stack(seen)

        recorded = jax.jit(chosen)
        for number, window in enumerate(itertools.islice(batches, steps)):
            if number >= steps - RECORDED_STEPS:
                found.append(np.asarray(recorded(trainer.state[0], window)))
            result = trainer.step(window)
            if number % 50 == 0 or number == steps - 1:
                sys.stderr.write(f"step {number + 1}/{steps}  loss {result.loss:.3f}\n")
    return np.concatenate(found).reshape(-1, config.tokens_per_step, config.top_k)


def imbalance(demand: Ints, ranks: int) -> tuple[float, float]:
    """Returns rows of the fullest rank over the mean, before and after the plan."""
    made = BALANCED(jnp.asarray(demand, jnp.int32), ranks, len(demand) // ranks)
    before = demand.reshape(ranks, -1).sum(1)
    after = rows_after(demand, np.asarray(made.expert), np.asarray(made.rows, np.int64))
    mean = max(float(before.mean()), 1.0)
    return before.max() / mean, after.max() / mean


def demands(topk_idx: npt.NDArray[np.int32], ranks: int) -> dict[str, list[Ints]]:
    """Returns rows of the experts by workload, one or more calls."""
    experts = SIZES["num_experts"]
    unused = np.where(np.random.default_rng(0).random(topk_idx.shape) < 0.1, -1, topk_idx)
    recorded = {
        name: [np.bincount(idx[idx >= 0], minlength=experts) for idx in calls]
        for name, calls in (("trained", topk_idx), ("trained, a tenth unused", unused))
    }
    return recorded | {name: [rows] for name, rows in workloads(ranks, experts).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=DemoConfig.steps)
    options = parser.parse_args()
    if not options.file.exists():
        np.savez_compressed(options.file, topk_idx=record(options.steps).astype(np.uint8))
    with np.load(options.file) as saved:
        topk_idx = saved["topk_idx"].astype(np.int32)
    table: dict[str, list[Sequence[float]]] = collections.defaultdict(list)
    for ranks in RANKS:
        for name, calls in demands(topk_idx, ranks).items():
            found = np.array([imbalance(demand, ranks) for demand in calls])
            table[name].append(found.max(0))
    _say("fullest rank, before and after", *map(str, RANKS))
    _say(*["---"] * (1 + len(RANKS)))
    for name, values in table.items():
        _say(name, *[f"{before:.2f}, {after:.3f}" for before, after in values])
    return int(max(after for values in table.values() for _, after in values) > MOST)


def _say(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    sys.exit(main())
