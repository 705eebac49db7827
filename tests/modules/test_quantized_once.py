"""8-bit weights once per step in optimizers, checkpoints and flax's modules; and qwix."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime_client.ops.partitioning import roles

HIDDEN, EXPERTS, MLP, TOKENS = 64, 4, 32, 32
RECIPE = ep.recipes.MXFP8()
RULES = ep.sharding.rules("fsdp+ep", tp=None, dp=None)


@pytest.fixture
def open_layer(make_group: fakes.MakeGroup) -> Callable[..., Any]:
    def made(axes: dict[str, int], **settings: Any) -> tuple[fakes.LocalGroup, Any]:
        outer = tuple(axis for axis in axes if axis != "ep")
        sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS}
        group = make_group(
            axes=axes, outer_axes=outer, transport="memfd", alignment=32, **sizes, **settings
        )
        return group, group.register_layer("block", top_k=2)

    return made


def tokens(group: fakes.LocalGroup, *lead: int) -> jax.Array:
    x = jax.random.normal(jax.random.key(1), (*lead, TOKENS, HIDDEN))
    spec = P(*[None] * len(lead), group.spec.token_axes)
    return jax.device_put(x, NamedSharding(group.mesh, spec))


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((got, want)))


def loss_of(y: jax.Array) -> jax.Array:
    return jnp.square(y - 1).mean()


def test_an_optimizer_quantizes_what_it_updated_and_checkpoints_hold_masters(
    open_layer: Callable[..., Any], tmp_path: Path
) -> None:
    group, layer = open_layer({"fsdp": 2, "ep": 2})
    masters = {"moe": ep.init_moe_params(jax.random.key(0), layer, MLP), "gain": jnp.ones(HIDDEN)}
    masters = jax.device_put(masters, RULES.shardings(masters, group.mesh))
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    tx = ep.optax.quantizing(plain, RECIPE)
    batches = tokens(group, 3)

    def model(tree: Any, x: Any, recipe: Any = None) -> Any:
        return loss_of(ep.moe(layer, tree["gain"] * x, tree["moe"], recipe=recipe)[0])

    @jax.jit
    def step(masters: Any, params8: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda m: model(ep.straight_through(m, params8), x))(masters)
        updates, state = tx.update(grads, state, masters)
        return *tx.apply_updates(masters, updates), state

    @jax.jit
    def by_recipe(masters: Any, state: Any, x: Any) -> Any:
        updates, state = plain.update(jax.grad(model)(masters, x, RECIPE), state, masters)
        return optax.apply_updates(masters, updates), state

    params8, state = tx.quantize(masters), tx.init(masters)
    want, want_state = masters, plain.init(masters)
    for x in batches:
        masters, params8, state = step(masters, params8, state, x)
        want, want_state = by_recipe(want, want_state, x)
    same((masters, state), (want, want_state))
    assert params8["gain"] is None
    assert masters["moe"].wi.sharding.spec == P("ep", "fsdp")
    assert params8["moe"].wi.data.sharding.spec[:2] == ("ep", "fsdp")

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {"masters": masters, "optimizer": state})
        checkpointer.wait_until_finished()
        stored = checkpointer.metadata(tmp_path / "saved").item_metadata.tree
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(stored) if hasattr(leaf, "dtype")}
        assert dtypes <= {np.dtype("float32"), np.dtype("int32")}
        other, _ = open_layer({"ep": 4})
        saved = {"masters": masters, "optimizer": state}
        places = RULES.shardings(saved, other.mesh)
        target = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), saved, places
        )
        restored = checkpointer.restore(tmp_path / "saved", target)
    same(restored, saved)
    again = tx.quantize(restored["masters"])
    assert again["moe"].wi.data.sharding.mesh.axis_names == ("ep",)
    same(jax.tree.map(_bytes, again), jax.tree.map(_bytes, params8))


def _bytes(x: jax.Array) -> Any:
    return np.asarray(x).view(np.uint8)


def test_the_wrapper_refuses_what_quantize_params_refuses() -> None:
    with pytest.raises(ep.InvalidArgumentError, match="must not be delayed"):
        ep.optax.quantizing(optax.sgd(0.1), ep.recipes.TensorScaling(delayed=True))


def test_an_nnx_block_takes_them_and_its_params_are_the_masters(
    open_layer: Callable[..., Any],
) -> None:
    group, layer = open_layer({"ep": 2})
    x = tokens(group)

    def made(**options: Any) -> Any:
        return ep.nnx.MoEBlock(layer, MLP, rngs=nnx.Rngs(0), separate=True, **options)

    @nnx.jit
    @nnx.value_and_grad
    def graded(block: Any, x: Any, params8: Any = None) -> Any:
        return loss_of(block(x, params8=params8)[0])

    block = made()
    params8 = ep.quantize_params(block.params, RECIPE, weights_only=True)
    same(graded(block, x, params8), graded(made(recipe=RECIPE), x))


def test_a_linen_block_takes_them_too(open_layer: Callable[..., Any]) -> None:
    group, layer = open_layer({"ep": 2})
    x = tokens(group)
    block = ep.linen.MoEBlock(layer, MLP)
    variables = linen.unbox(block.init(jax.random.key(0), x))
    params8 = ep.quantize_params(ep.MoEParams(**variables["params"]), RECIPE, weights_only=True)

    def graded(block: Any, **options: Any) -> Any:
        run = jax.value_and_grad(lambda v: loss_of(block.apply(v, x, **options)[0]))
        return jax.jit(run)(variables)

    same(graded(block, params8=params8), graded(block.clone(recipe=RECIPE)))


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
    """Stands for qwix's interception_manager."""

    def __init__(self) -> None:
        self.enabled = [1, 2]

    def disable_interception(self) -> list[int]:
        held, self.enabled = self.enabled, []
        return held

    def enable_interception(self, held: list[int]) -> None:
        self.enabled = held


def stand_in(monkeypatch: pytest.MonkeyPatch, ops: tuple[str, ...]) -> Manager:
    """Installs modules named like qwix's, as inside a model with a rule for `ops`."""
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
    """Runs by command where qwix is installed: the block's results are the same without qwix."""
    qwix = pytest.importorskip("qwix")
    model, x = Model(layer), jax.random.normal(jax.random.key(0), (16, 32))
    rules = [qwix.QtRule(module_path="moe", weight_qtype=jnp.int8)]
    quantized = qwix.quantize_model(model, qwix.QtProvider(rules), x)
    np.testing.assert_array_equal(quantized(x), model(x))
    assert sum("'blocks/moe'" in record.message for record in caplog.records) == 1
