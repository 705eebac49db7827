"""`train_maxtext.py COORDINATOR INDEX PROCESSES NAME=VALUE...`: MaxText in one process of a job.

Eight CPU devices, shared out. MaxText leaves jax.distributed as it finds it.
"""

from __future__ import annotations

import importlib
import sys

from integrations.maxtext_sources import CONFIG, TRAINER

from ep_runtime_client.jobs.members import Member, start_jax

DEVICES = 8


def main(coordinator: str, index: str, processes: str, *words: str) -> None:
    start_jax(DEVICES, Member(int(index), int(processes), coordinator))
    importlib.import_module(TRAINER).main(["", CONFIG, *words])


if __name__ == "__main__":
    main(*sys.argv[1:])
