"""`train_maxtext.py COORDINATOR INDEX PROCESSES NAME=VALUE...`: MaxText in one process of a job.

Eight CPU devices, shared out. MaxText leaves jax.distributed as it finds it. The word REPLAYED
gives every batch routed experts of its own, as MaxText's trainers of RL do.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from integrations import maxtext_stubs
from integrations.maxtext_sources import CONFIG

from ep_runtime_client.jobs.members import Member, start_jax

TRAINER = "maxtext.trainers.pre_train.train"
DEVICES = 8
REPLAYED = "REPLAYED"


def replayed(trainer: Any) -> None:
    """Gives the loss [B, S, 2] experts of each token, of which the first of 5 tokens uses one."""
    import jax.numpy as jnp

    loss_fn = trainer.loss_fn

    def with_experts(
        model: Any, config: Any, data: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        tokens = jnp.arange(data["inputs"].size).reshape(data["inputs"].shape)
        first, second = tokens % config.num_experts, (tokens * 3 + 1) % config.num_experts
        second = jnp.where((tokens % 5 == 0) | (first == second), -1, second)
        data = {**data, "forced_routed_experts": jnp.stack([first, second], -1)}
        return loss_fn(model, config, data, *args, **kwargs)

    trainer.loss_fn = with_experts


def main(coordinator: str, index: str, processes: str, *words: str) -> None:
    maxtext_stubs.install()
    start_jax(DEVICES, Member(int(index), int(processes), coordinator))
    trainer = importlib.import_module(TRAINER)
    if REPLAYED in words:
        replayed(trainer)
    trainer.main(["", CONFIG, *(word for word in words if word != REPLAYED)])


if __name__ == "__main__":
    main(*sys.argv[1:])
