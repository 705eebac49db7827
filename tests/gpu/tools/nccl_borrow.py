"""What XLA's own communicator costs a custom call that borrows it, beside the runtime's.

    python tests/gpu/tools/nccl_borrow.py [LIBRARY]

One process drives all GPUs, with JAX 0.11.2 or newer and a C++ compiler, or the LIBRARY that one
made of `nccl_borrow.cc`. Prints one line per
communicator that is borrowed: the time of its first run beyond compiling, GPU memory that went
with it, and an all-to-all's time; then how long the runtime's own take to form, and their memory.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu.tools.nccl_check import BUDGET_S, Check
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BLOCK_BYTES = 32 << 20  # between two GPUs
CALLS = 20


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def used_mib() -> int:
    """Memory in use on the first GPU, of all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout)


def build() -> str:
    """The handlers' library, compiled against this jaxlib's headers."""
    made = Path(tempfile.mkdtemp()) / "libnccl_borrow.so"
    source = Path(__file__).with_name("nccl_borrow.cc")
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir()]
    subprocess.run(["c++", *options, "-o", made, source, "-ldl"], check=True, timeout=120)
    return str(made)


def register() -> None:
    library = ctypes.CDLL(sys.argv[1] if len(sys.argv) > 1 else build())
    stages = {"prepare": library.BorrowPrepare, "execute": library.BorrowExchange}
    capsules = {stage: jax.ffi.pycapsule(handler) for stage, handler in stages.items()}
    jax.ffi.register_ffi_target("borrow_exchange", capsules, platform="CUDA")


def exchange(mesh: Mesh, number: int, calls: int) -> Any:
    """A program of `calls` all-to-alls, one after the other, on communicator `number`."""
    attributes = {"devices": np.int64(mesh.size), "id": np.int64(number)}

    def local(blocks: Any) -> Any:
        for _ in range(calls):
            shape = jax.ShapeDtypeStruct(blocks.shape, blocks.dtype)
            blocks = jax.ffi.ffi_call("borrow_exchange", shape)(blocks, **attributes)
        return blocks

    rows = PartitionSpec("ep")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))


def main() -> int:
    devices = jax.devices("cuda")
    mesh = Mesh(np.array(devices), ("ep",))
    count, size = len(devices), BLOCK_BYTES // 4
    place = NamedSharding(mesh, PartitionSpec("ep"))
    numbers = np.arange(count * count, dtype=np.float32).reshape(count * count, 1)
    spread = jax.jit(lambda x: jnp.broadcast_to(x, (count * count, size)), out_shardings=place)
    blocks = jax.block_until_ready(spread(numbers))
    register()
    for number in range(1, 4):
        before = used_mib()
        compiled = exchange(mesh, number, 1).lower(blocks).compile()
        started = time.perf_counter()
        got = jax.block_until_ready(compiled(blocks))
        first = time.perf_counter() - started
        want = numbers.reshape(count, count).T.reshape(-1)
        np.testing.assert_array_equal(np.asarray(got[:, 0]), want)
        many = exchange(mesh, number, CALLS).lower(blocks).compile()
        jax.block_until_ready(many(blocks))
        started = time.perf_counter()
        jax.block_until_ready(many(blocks))
        each = (time.perf_counter() - started) / CALLS
        say(
            f"borrowed {number}: first run {first:.3f} s, {used_mib() - before} MiB, "
            f"{1e6 * each:.0f} us of {(count - 1) * BLOCK_BYTES / each / 1e9:.0f} GB/s"
        )
    check, before = Check(), used_mib()
    for turn in range(2):
        group = check.group()
        started = time.perf_counter()
        group.init(BUDGET_S)
        say(f"own {turn}: {time.perf_counter() - started:.3f} s, {used_mib() - before} MiB")
        group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
