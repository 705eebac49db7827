"""Processes of PyTorch, one for each device, that measure one order together.

Our devices share one process; PyTorch trainers have one process per GPU, under torch.distributed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_runtime_bench.base import clients, energy


@dataclasses.dataclass(frozen=True)
class Rank:
    """A process's rank in the job, and its device."""

    index: int
    count: int
    device: Any

    @property
    def on_gpu(self) -> bool:
        return str(self.device.type) == "cuda"

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Compiles with torch.compile; on CPU returns the function itself, because compilation
        takes a minute."""
        return torch.compile(function, **options) if self.on_gpu else function

    def wait(self) -> None:
        """Waits until this device has finished its work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, step: Callable[[], object], steps: int) -> float:
        """Returns the slowest rank's seconds of a step, averaged over `steps` of them."""
        dist.barrier()
        self.wait()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        self.wait()
        return self.largest((time.perf_counter() - started) / steps)

    def joules(self, step: Callable[[], object], step_s: float) -> float | None:
        """Returns the joules that all GPUs use in a step."""
        devices = self.count if self.on_gpu else 0
        return energy.joules_per_step(devices, lambda steps: self.timed(step, steps), step_s)

    def largest(self, value: float) -> float:
        """Returns the largest `value` of all ranks."""
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def peak_bytes(self) -> int | None:
        """Returns the most bytes that the fullest device held so far; None on CPU."""
        if not self.on_gpu:
            return None
        return int(self.largest(torch.cuda.max_memory_allocated()))


def main(measure: Callable[[Rank, Any], Any], order: Any) -> int:
    """Starts a rank for each device and writes the results of the first one.

    Args:
        measure: a function of a module, because new processes import it; returns a dataclass.
        order: the order; its `devices` and `platform` decide the ranks.
    """
    clients.tell(clients.READY)
    clients.tell(clients.COMPILED)  # ranks compile as they go
    with tempfile.TemporaryDirectory(prefix="ep-bench-torch-") as folder:
        torch.multiprocessing.spawn(_rank, (measure, order, folder), nprocs=order.devices)
        sys.stdout.write(Path(folder, "found").read_text() + "\n")
    return 0


def _rank(index: int, measure: Callable[[Rank, Any], Any], order: Any, folder: str) -> None:
    on_gpu = order.platform == "gpu"
    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=index,
        world_size=order.devices,
        device_id=device if on_gpu else None,
    )
    try:
        found = measure(Rank(index, order.devices, device), order)
    finally:
        dist.destroy_process_group()
    if index == 0:
        Path(folder, "found").write_text(json.dumps(dataclasses.asdict(found)))
