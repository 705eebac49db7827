"""What a communicator costs by its channels: time to join, memory of a GPU, an all-reduce.

    python tests/gpu/tools/nccl_sweep.py

Without JAX and without a daemon. Every line is a fresh process that drives all GPUs and makes one
group after another: `start` is what the first one costs beyond that, once in a process (NCCL's
kernels), the rest what each costs. "rows" connects to every peer at once, as groups do whose rows
travel over NCCL; "beside" as those whose rows go through windows.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu.tools.nccl_check import BUDGET_S, Check

from ep_runtime_bench.control import beside_cost

# (what for, channels at most, NCCL_NVLS_ENABLE or NCCL's choice)
CASES = (
    ("beside", 1, "0"),
    ("beside", 1, ""),
    ("beside", 2, "0"),
    ("beside", 4, "0"),
    ("beside", 8, "0"),
    ("beside", 0, "0"),
    ("rows", 1, "0"),
    ("rows", 4, "0"),
    ("rows", 0, "0"),
)
LINE_TIMEOUT_S = 120
HEADS = ("for", "channels", "NVLS", "start ms", "start MiB", "join ms", "MiB", "sum ms", "sum MiB")


def contexts() -> None:
    """On every GPU, as a process with JAX has them: they cost half a gigabyte each."""
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0
    count = ctypes.c_int()
    assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    for device in range(count.value):
        context, memory = ctypes.c_void_p(), ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert driver.cuCtxSetCurrent(context) == 0
        assert driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0


def measured(purpose: str, channels: int) -> dict[str, Any]:
    """In a process of its own: the costs of two groups and their sums, in ms and MiB."""
    contexts()
    check, found = Check(), {}
    check.version()
    made = []
    for turn in ("first", "second"):
        group = check.group(carries_rows=purpose == "rows", max_channels=channels)
        for name, step in (("join", group.init), ("sum", group.try_sum)):
            before, started = beside_cost.used_mib(), time.monotonic()
            step(BUDGET_S)
            found[f"{turn} {name} ms"] = round((time.monotonic() - started) * 1e3)
            found[f"{turn} {name} MiB"] = beside_cost.grown_mib(before, beside_cost.used_mib())
        made.append(group)
    for group in made:
        check.close(group)
    return found


def line(purpose: str, channels: int, nvls: str, folder: Path) -> str:
    """Runs one process; its figures, and the channels that NCCL says it made."""
    log = folder / "nccl.log"
    environment = {**os.environ, **beside_cost.told(log)}
    if nvls:
        environment["NCCL_NVLS_ENABLE"] = nvls
    words = [sys.executable, __file__, purpose, str(channels)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=LINE_TIMEOUT_S, env=environment, check=False
    )
    if done.returncode:
        return f"{purpose:8}{channels:10}  WRONG: {done.stderr.strip().splitlines()[-1:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    once = [
        found[f"first {name} {unit}"] - found[f"second {name} {unit}"]
        for name, unit in (("join", "ms"), ("join", "MiB"))
    ]
    each = [found[f"second {name} {unit}"] for name in ("join", "sum") for unit in ("ms", "MiB")]
    said = beside_cost.channels(log)
    cells = [purpose, channels or "NCCL's", nvls or "NCCL's", *once, *each]
    return "".join(f"{cell!s:>10}" for cell in cells) + f"  {said}"


def main() -> int:
    if len(sys.argv) == 3:
        print(json.dumps(measured(sys.argv[1], int(sys.argv[2]))))  # noqa: T201
        return 0
    print("".join(f"{head:>10}" for head in HEADS), flush=True)  # noqa: T201
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            text = line(*case, Path(folder))
            wrong += "WRONG" in text
            print(text, flush=True)  # noqa: T201
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
