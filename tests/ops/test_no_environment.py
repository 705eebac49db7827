"""No environment variable is read while a program is traced or lowered.

Processes of a job may have different environments, and what is read so is in no fingerprint: they
would run different programs. What changes a program is a group's setting or an argument.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fakes import MakeGroup

import ep_runtime
import ep_runtime as ep
import ep_runtime_client
from ep_runtime import env
from ep_runtime_client.moe.api import init_moe_params, moe
from ep_runtime_client.ops.kernels import serve
from ep_runtime_client.ops.quantize.formats import recipes
from ep_runtime_client.ops.transports import windows as transports_windows

TOKENS, HIDDEN, INNER = 32, 128, 128


class Unreadable:
    """Replaces os.environ."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("the environment was read while a program was traced")

    __getitem__ = __contains__ = __iter__ = __getattr__


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces for GPUs on any machine; forgets programs that hold the kernels."""
    monkeypatch.setattr(transports_windows, "ensure_registered", lambda platform: None)
    jax.clear_caches()
    yield
    jax.clear_caches()


def take_kernels(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """Traces as on GPUs that have the kernels, or as on other devices."""
    monkeypatch.setattr(serve, "installed", lambda: wanted)
    monkeypatch.setattr(serve, "available", lambda: wanted)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "os", types.SimpleNamespace(**{**vars(os), "environ": Unreadable()}))
    with pytest.raises(AssertionError, match="was read"):
        env.debug()


def lowered(step: Callable[..., Any], *operands: Any) -> str:
    return jax.jit(step).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("recipe", "kernels", "node_size"),
    [
        (None, True, 0),
        (recipes.TensorScaling(), True, 0),
        (recipes.BlockScaling(), True, 4),
        (recipes.MXFP8(), True, 4),
        (None, False, 4),
    ],
    ids=["plain", "tensor", "blocks on nodes", "mx on nodes", "without kernels on nodes"],
)
def test_a_block_with_its_gradient_reads_none(
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
    recipe: Any,
    kernels: bool,
    node_size: int,
) -> None:
    take_kernels(monkeypatch, kernels)
    group = make_group(
        transport="nccl" if node_size else "nvlink",
        node_size=node_size,
        num_experts=16,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=2,
        partitioning="shard_map",  # so that everything is lowered here
    )
    layer = group.register_layer("moe", top_k=2)
    params = jax.eval_shape(lambda key: init_moe_params(key, layer, INNER), jax.random.key(0))
    x = jax.ShapeDtypeStruct((group.spec.ep_size * TOKENS, HIDDEN), jnp.float32)
    forbid(monkeypatch)
    text = lowered(jax.grad(lambda p, x: moe(layer, x, p, recipe=recipe)[0].sum()), params, x)
    one_call = recipe is None and not node_size
    assert ("ep_block_bwd_v1" if one_call else "ep_dispatch_v1") in text


def test_operations_on_their_own_read_none(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(transport="nvlink", num_experts=16, hidden_size=HIDDEN, max_top_k=2)
    layer = group.register_layer("moe", top_k=2)
    x = jax.ShapeDtypeStruct((8 * 16, HIDDEN), jnp.bfloat16)
    idx = jax.ShapeDtypeStruct((8 * 16, 2), jnp.int32)
    take_kernels(monkeypatch, True)
    forbid(monkeypatch)

    def round_trip(x: Any, idx: Any) -> Any:
        sent = ep.dispatch(layer, x, idx)
        return ep.combine(layer, sent, sent.tokens)

    lowered(round_trip, x, idx)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    kernel = jax.ShapeDtypeStruct((8, HIDDEN, 64), jnp.bfloat16)
    lowered(ep.grouped_gemm, x, kernel, sizes)


def test_one_file_reads_the_environment() -> None:
    readers = [
        path.name
        for package in (ep_runtime, ep_runtime_client)
        for folder in package.__path__
        for path in Path(folder).rglob("*.py")
        if re.search(r"os\.environ\b|os\.getenv\b", path.read_text())
    ]
    assert readers == ["env.py"]
