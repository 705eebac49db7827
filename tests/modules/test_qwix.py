"""The block inside a model that qwix quantizes: out of its reach, and said where it has a rule."""

from __future__ import annotations

import sys
import types
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ep_runtime as ep
from ep_runtime_client.ops.partitioning import roles


@pytest.fixture
def layer(make_group: fakes.MakeGroup) -> Any:
    group = make_group(mesh=fakes.mesh_of({"ep": 1}), num_experts=4, hidden_size=32)
    roles.say_once.cache_clear()
    return group.register_layer("blocks/moe", top_k=2)


class Model(nnx.Module):
    def __init__(self, layer: Any, **options: Any) -> None:
        self.linear = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        self.moe = ep.nnx.MoEBlock(layer, 32, rngs=nnx.Rngs(1), **options)

    def __call__(self, x: jax.Array) -> Any:
        return self.moe(self.linear(x))[0]


class Manager:
    """qwix's interception_manager."""

    def __init__(self) -> None:
        self.enabled = [1, 2]

    def disable_interception(self) -> list[int]:
        held, self.enabled = self.enabled, []
        return held

    def enable_interception(self, held: list[int]) -> None:
        self.enabled = held


def stand_in(monkeypatch: pytest.MonkeyPatch, ops: tuple[str, ...]) -> Manager:
    """Modules as qwix's, inside a model with a rule for `ops`."""
    rule = types.SimpleNamespace(module_path="moe", weight_qtype="int8")
    manager, config = Manager(), types.ModuleType("qconfig")
    config.get_current_rule = lambda op: rule if op in ops else None  # type: ignore[attr-defined]
    interception = types.ModuleType("interception")
    interception.interception_manager = manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "qwix._src.qconfig", config)
    monkeypatch.setitem(sys.modules, "qwix._src.interception", interception)
    return manager


CASES: dict[str, tuple[tuple[str, ...], Any, bool]] = {
    "a rule": (("einsum",), None, True),
    "no rule": ((), None, False),
    "a recipe": (("einsum",), ep.recipes.MXFP8(), False),
    "a recipe for wi alone": (("ragged_dot",), (ep.recipes.MXFP8(), None), True),
    "a recipe that only narrows": (("einsum",), ep.recipes.BF16(), True),
}


@pytest.mark.parametrize(("ops", "recipe", "said"), CASES.values(), ids=CASES)
def test_a_rule_that_passes_the_experts_by_is_said_with_the_layers_name(
    layer: Any,
    ops: tuple[str, ...],
    recipe: Any,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = ep.init_moe_params(jax.random.key(0), layer, 32)
    manager, seen = stand_in(monkeypatch, ops), []

    def activation(gate: Any) -> Any:
        seen.append(list(manager.enabled))
        return jax.nn.silu(gate)

    x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    for _ in range(2):
        jax.eval_shape(
            lambda x: ep.moe(layer, x, params, recipe=recipe, activation=activation)[0], x
        )
    texts = [r.message for r in caplog.records if "qwix" in r.message]
    assert len(texts) == int(said)
    assert not said or ("'blocks/moe'" in texts[0] and "recipe=" in texts[0])
    assert seen
    assert not any(seen)
    assert manager.enabled == [1, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_qwix_quantizes(layer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By command, where qwix is installed: the block computes what it computes without."""
    qwix = pytest.importorskip("qwix")
    model, x = Model(layer), jax.random.normal(jax.random.key(0), (16, 32))
    rules = [qwix.QtRule(module_path="moe", weight_qtype=jnp.int8)]
    quantized = qwix.quantize_model(model, qwix.QtProvider(rules), x)
    np.testing.assert_array_equal(quantized(x), model(x))
    assert sum("'blocks/moe'" in record.message for record in caplog.records) == 1
