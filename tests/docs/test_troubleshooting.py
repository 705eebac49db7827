"""Provokes the errors that docs/troubleshooting.md quotes, and compares their messages.

Messages that need several processes are compared with the page by the tests of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import doc_pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_page
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

SIZES: dict[str, Any] = {"ep_axis": "ep", "num_experts": 8, "hidden_size": 64, "max_top_k": 2}
SIZES |= {"max_tokens_per_rank": 128, "max_token_dtype": "float32"}


def raised(call: Callable[[], object]) -> str:
    """Returns the text of the error that the call raises."""
    with pytest.raises((ep.EpRuntimeError, NotImplementedError, jax.errors.JaxRuntimeError)) as e:
        call()
    return str(ep.error_of(e.value) or e.value)


def dispatched(group: ep.Group, choice: list[int]) -> jax.Array:
    """A dispatch in which every token chooses those experts."""
    layer = group.register_layer("block0", top_k=2)
    rows = NamedSharding(group.mesh, PartitionSpec("ep"))
    tokens = jax.device_put(jnp.ones((512, 64)), rows)
    idx = jax.device_put(jnp.tile(jnp.int32(choice), (512, 1)), rows)
    sent = jax.jit(lambda tokens, idx: ep.dispatch(layer, tokens, idx))(tokens, idx)
    return jax.block_until_ready(sent.num_recv)


def provoked(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """(name on the page, message)."""
    yield "no daemon", raised(lambda: ep.connect(f"unix://{nowhere}", timeout_s=0.5))
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("ep",))
    with ep.connect("embedded") as session:

        def create(name: str, **settings: Any) -> ep.Group:
            return session.create_group(name, mesh, **{**SIZES, **settings})

        group = create("moe")
        layer = group.register_layer("block0", top_k=2)
        yield "group again", raised(lambda: create("moe", max_tokens_per_rank=256))
        yield "layer again", raised(lambda: group.register_layer("block0", top_k=1))
        yield "traced", raised(jax.jit(lambda: create("other").capacity_per_rank))
        huge = {"max_tokens_per_rank": 1 << 20, "hidden_size": 1 << 16}
        yield "pool", raised(lambda: create("huge", **huge))
        yield "no nccl", raised(lambda: create("n", transport="nccl"))
        strict = create("strict", on_overflow="error", capacity_factor=1.0, alignment=8)
        yield "overflow", raised(lambda: dispatched(strict, [0, 1]))
        monkeypatch.setenv("EP_RUNTIME_DEBUG", "1")
        yield "index", raised(lambda: dispatched(create("checked"), [0, 8]))
        group.close()
        tokens, idx = jnp.ones((512, 64)), jnp.zeros((512, 2), jnp.int32)
        yield "stale", raised(lambda: ep.dispatch(layer, tokens, idx))


def test_messages_are_as_the_page_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = dict(provoked(tmp_path, monkeypatch))
    with ep.connect("none") as session:
        large = {**SIZES, "max_tokens_per_rank": 1 << 16, "hidden_size": 1 << 13}
        session.create_group("moe", Mesh(np.array(jax.devices("cpu")[:4]), ("ep",)), **large)
    found["memory"] = caplog.messages[-1]
    for name, text in found.items():
        doc_pages.check_said(name, text)
    files = [path.read_text("utf-8") for path in doc_pages.TESTS.rglob("test_*.py")]
    elsewhere = {name for text in files for name in re.findall(r'check_said\("([\w ]+)"', text)}
    shown = [block.said("says:") for block in doc_pages.blocks(doc_pages.TROUBLESHOOTING)]
    assert {name for name in shown if name} == {*found, *elsewhere}
    with pytest.raises(AssertionError, match="layer again"):
        doc_pages.check_said("layer again", found["group again"])


def test_the_first_look_works(address: str, environment: dict[str, str]) -> None:
    (look,) = [b for b in doc_pages.blocks(doc_pages.TROUBLESHOOTING) if "beside" in b.markers]
    shown = run_page.beside(look, address, environment)
    assert "SERVING" in shown
