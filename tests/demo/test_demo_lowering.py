"""The demo's training step as a program for GPUs, made without one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import pytest

import ep_runtime as ep
from ep_runtime_client.base import meshes
from ep_runtime_client.demo.config import RECIPES, DemoConfig
from ep_runtime_client.demo.trainer import Trainer, make_mesh
from ep_runtime_client.ops.transports import windows as transports_windows

CALLS = {
    "ep_prepare_v1",
    "ep_dispatch_v1",
    "ep_combine_v1",
    "ep_dispatch_bwd_v1",
    "ep_combine_bwd_v1",
}


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ep.Session]:
    """Groups are of transport nvlink, though nothing can run them."""
    monkeypatch.setattr(meshes, "resolve_transport", lambda *args, **kwargs: "nvlink")
    monkeypatch.setattr(transports_windows, "ensure_registered", lambda platform: None)
    with ep.connect("none") as made:
        yield made


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[] if name == "fp8-block" else pytest.mark.slow) for name in RECIPES],
)
def test_the_training_step_lowers_for_gpus(session: ep.Session, recipe: str) -> None:
    config = DemoConfig(devices=4, batch=4, seq=32, recipe=recipe).checked()
    trainer = Trainer(
        config, session, make_mesh(config), name="demo", transport="auto", recipe=recipe
    )
    step, *shapes = trainer.program()
    exported = jax.export.export(step, platforms=["cuda"], disabled_checks=ep.export_checks())(
        *shapes
    )
    assert set(re.findall(r"custom_call @(ep_\w+)", exported.mlir_module())) >= CALLS
    trainer.close()
