"""Settings of groups on GPUs: SMs, and the checks that EP_RUNTIME_DEBUG=1 turns on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from child_programs import run_python
from gpu.jobs import layouts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

TOKENS, HIDDEN, EXPERTS = 32, 128, 16
_LIMIT_S = 120.0


def make_group(session: ep.Session, gpus: list[Any], **settings: Any) -> ep.Group:
    return session.create_group(
        "g",
        Mesh(np.array(gpus), ["ep"]),
        ep_axis="ep",
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=2,
        max_token_dtype="float32",
        transport=layouts.TRANSPORT,
        op_timeout_s=60.0,
        replace=True,
        **settings,
    )


def round_trip(group: ep.Group, topk_idx: Any) -> Any:
    """Sends tokens of ones there and back; each returns as its number of slots."""
    layer = group.register_layer("moe", top_k=2)
    sharding = NamedSharding(group.mesh, PartitionSpec("ep"))

    @jax.jit
    def step(tokens: Any, idx: Any) -> Any:
        sent = ep.dispatch(layer, tokens, idx)
        return ep.combine(layer, sent, sent.tokens)

    tokens = jax.device_put(np.ones((len(topk_idx), HIDDEN), np.float32), sharding)
    return np.asarray(step(tokens, jax.device_put(topk_idx, sharding)))


def indices(gpus: list[Any]) -> Any:
    rng = np.random.default_rng(0)
    return rng.integers(0, EXPERTS, (TOKENS * len(gpus), 2)).astype(np.int32)


@pytest.mark.parametrize("num_sms", [2, 3, 24, 132])
def test_any_number_of_sms_moves_the_same_rows(
    session: ep.Session, gpus: list[Any], num_sms: int
) -> None:
    group = make_group(session, gpus, num_sms=num_sms)
    np.testing.assert_array_equal(round_trip(group, indices(gpus)), 2.0)
    group.check()


@pytest.mark.skipif(layouts.TRIAL, reason="CPU devices have no SMs")
def test_more_sms_than_the_gpu_has_are_refused_with_both_numbers(
    session: ep.Session, gpus: list[Any]
) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=r"num_sms .* at most \d+, .* got 256"):
        make_group(session, gpus, num_sms=256)
    np.testing.assert_array_equal(round_trip(make_group(session, gpus), indices(gpus)), 2.0)


@pytest.fixture
def mps(tmp_path: Path, gpus: list[Any]) -> Iterator[dict[str, str]]:
    """Environment of processes that share GPUs through MPS."""
    control = shutil.which("nvidia-cuda-mps-control")
    if layouts.TRIAL or control is None:
        pytest.skip("no nvidia-cuda-mps-control here")
    folders = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path)}
    environment = {**os.environ, **folders}
    if subprocess.run([control, "-d"], env=environment, timeout=_LIMIT_S).returncode:
        pytest.skip("MPS does not start here")
    yield environment
    subprocess.run([control], input="quit", text=True, env=environment, timeout=_LIMIT_S)


@pytest.mark.parametrize(
    ("share", "message"), [(40, ""), (20, r"prepare runs 33 blocks .* may use \d+ SMs")]
)
def test_a_share_of_the_sms_is_enough_or_refused_with_both_numbers(
    mps: dict[str, str], share: int, message: str
) -> None:
    environment = {**mps, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}
    program = "import gpu.test_gpu_settings as test; test.move_rows()"
    done = run_python("-c", program, code=None, limit_s=_LIMIT_S, env=environment)
    assert (done.returncode == 0) == (not message), done.stderr
    assert re.search(message, done.stderr)


def move_rows() -> None:
    """Child process: runs the grids of both kinds of calls on all SMs that it may use."""
    gpus = jax.devices("gpu")
    with ep.connect("embedded", timeout_s=_LIMIT_S) as session:
        group = make_group(session, gpus, retain_s=0)
        np.testing.assert_array_equal(round_trip(group, indices(gpus)), 2.0)
        layer = group.register_layer("block", top_k=2)
        params = ep.init_moe_params(jax.random.key(0), layer, HIDDEN)
        x = np.ones((TOKENS * len(gpus), HIDDEN), np.float32)
        x = jax.device_put(x, NamedSharding(group.mesh, PartitionSpec("ep")))
        gradient = jax.jit(jax.grad(lambda x: ep.moe(layer, x, params)[0].sum()))(x)
        assert np.isfinite(np.asarray(gradient)).all()
        group.check()


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_RUNTIME_DEBUG", "1")


@pytest.mark.skipif(layouts.TRIAL, reason="on CPU the call itself fails")
@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("value", [EXPERTS, -2, 1 << 30])
def test_an_index_that_names_no_expert_is_an_error_with_its_place(
    session: ep.Session, gpus: list[Any], value: int
) -> None:
    group = make_group(session, gpus)
    idx = indices(gpus)
    idx[-3, 1] = value  # token 29 of the last rank
    assert not np.isfinite(round_trip(group, idx)[-TOKENS:]).any()
    text = rf"layer moe: topk_idx must be in \[-1, 16\), got {value} at token 29 slot 1"
    with pytest.raises(ep.InvalidArgumentError, match=text):
        group.check()
    with pytest.raises(ep.InvalidArgumentError, match=text), ep.translate_errors():
        round_trip(group, idx)
    group.close()
    np.testing.assert_array_equal(round_trip(make_group(session, gpus), indices(gpus)), 2.0)


@pytest.mark.usefixtures("debug")
def test_unused_slots_are_no_error(session: ep.Session, gpus: list[Any]) -> None:
    group = make_group(session, gpus)
    idx = indices(gpus)
    idx[::2, 1] = -1
    np.testing.assert_array_equal(round_trip(group, idx)[::2], 1.0)
    group.check()


def test_without_the_switch_such_an_index_is_an_unused_slot(
    session: ep.Session, gpus: list[Any]
) -> None:
    group = make_group(session, gpus)
    idx = indices(gpus)
    idx[3, 0] = EXPERTS
    out = round_trip(group, idx)
    np.testing.assert_array_equal(np.delete(out, 3, axis=0), 2.0)
    np.testing.assert_array_equal(out[3], 1.0)
    group.check()
