"""GPU memory has no room for windows: a clean error, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from daemon_fixtures import start_daemon, wait_until
from gpu.jobs import gpu_steps
from gpu.jobs.layouts import TRIAL

import ep_runtime as ep
from ep_runtime_client.cli.daemon import source
from ep_runtime_server.memory.cuda_device import BindingsDriver
from ep_runtime_server.sockets import descriptor_child

_HELD_BYTES = 32 << 30
_HIDDEN = 16384


def _settings(ranks: int, window_bytes: int) -> dict[str, Any]:
    """Arguments of a group whose windows have about that size."""
    lanes, row_bytes = 2, 4 * _HIDDEN
    # Rows of the other ranks; 8 bytes of a slot and a flag for each rank.
    token_bytes = (ranks - 1) * row_bytes + ranks * (8 + 4)
    return {
        "num_experts": ranks,
        "hidden_size": _HIDDEN,
        "max_tokens_per_rank": window_bytes // (lanes * token_bytes),
        "max_top_k": 1,
        "capacity_factor": 1.0,
    }


def _memory_bytes(ordinal: int) -> int:
    from cuda.bindings import driver

    (started,) = driver.cuInit(0)
    result, total = driver.cuDeviceTotalMem(ordinal)
    assert started == result == driver.CUresult.CUDA_SUCCESS, result.name
    return int(total)


@pytest.mark.skipif(TRIAL, reason="CPU devices have no memory of their own")
@pytest.mark.parametrize("share", [0.85, 4.0], ids=["what XLA holds is missing", "never"])
def test_windows_without_room_are_refused_with_sizes_and_a_hint(
    session: ep.Session, gpus: list[Any], share: float
) -> None:
    total = _memory_bytes(gpus[0].local_hardware_id)
    held = jax.block_until_ready(jnp.ones(_HELD_BYTES // 4, jnp.float32, device=gpus[0]))
    with pytest.raises(ep.PoolExhaustedError, match="asked for") as caught:
        gpu_steps.Steps(session, "large", gpus, **_settings(len(gpus), int(share * total)))
    assert int(caught.value.fields["asked_bytes"]) > 0.8 * share * total
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in str(caught.value) or share > 1
    held.delete()
    gpu_steps.Steps(session, "small", gpus).run()


@pytest.mark.skipif(TRIAL, reason="CPU devices have no memory of their own")
def test_what_a_daemon_exports_is_memory_where_it_comes_back(gpus: list[Any]) -> None:
    driver = BindingsDriver()
    handle = driver.create(0, driver.granularity(0))
    fd = driver.export_fd(handle)
    try:
        assert descriptor_child.is_memory(fd), os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
        driver.release(handle)


def _windows(directory: Path) -> list[tuple[Any, ...]]:
    """Returns what the daemon holds for READY groups; empty if it has none."""
    with source.open_source(f"unix://{directory}", timeout_s=60.0) as admin:
        if any(row["state"] != "READY" for row in admin.groups()):
            return []
        return sorted((row["group"], row["kind"], row["bytes"]) for row in admin.buffers())


def test_a_daemon_that_is_started_again_takes_windows_back(
    directory: Path, gpus: list[Any]
) -> None:
    started = start_daemon(directory)
    with ep.connect(f"unix://{directory}", job="again", timeout_s=60.0) as session:
        steps = gpu_steps.Steps(session, "kept", gpus)
        steps.run()
        held = wait_until(lambda: _windows(directory), "the group is ready")
        os.kill(started.pid, signal.SIGKILL)
        assert started.stop() == -signal.SIGKILL
        steps.run()  # without one
        started = start_daemon(directory)
        wait_until(lambda: _windows(directory) == held, "the new daemon has the windows")
        steps.run()
    assert started.stop() == 0
