"""moe with block scales sends tokens of 8 bits: the bits of tokens that are sent as they are."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.moe import resolve as moe_call
from ep_runtime_client.ops.kernels import serve

BLOCK = ep.recipes.BlockScaling()
HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 136, 40, 8, 3, 8
SPEC = PartitionSpec(("dp", "ep"))


def make(make_group: MakeGroup, **settings: Any) -> fakes.LocalGroup:
    wanted: dict[str, Any] = {
        "outer_axes": "dp",
        "transport": "memfd",
        "debug": True,
        "num_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "max_top_k": TOP_K,
        "max_tokens_per_rank": TOKENS,
    }
    if "mesh" not in settings:
        wanted["axes"] = {"dp": 2, "ep": 4}
    return make_group(**(wanted | settings))


def draw() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (8 * TOKENS, HIDDEN))


def normed(x: jax.Array, dtype: Any) -> jax.Array:
    """What XLA would like to fuse with the ops around it, as users' programs are compiled. Without
    most optimizations it rounds a norm's own gradient by what else it compiles."""
    return (x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * 0.7).astype(dtype)


def loss_of(y: jax.Array, x: jax.Array) -> jax.Array:
    return (jnp.sin(y.astype(jnp.float32)) * x).sum()


def plain(group: fakes.LocalGroup, dtype: Any = None, **options: Any) -> Any:
    """One block: (loss, its arguments); with a norm before it where a dtype is given."""
    layer = group.register_layer("moe", top_k=TOP_K)
    separate = options.pop("separate", False)
    params = ep.init_moe_params(jax.random.key(0), layer, INNER, separate=separate)

    def loss(x: Any, params: Any) -> Any:
        tokens = x if dtype is None else normed(x, dtype)
        y, _, stats = ep.moe(layer, tokens, params, recipe=BLOCK, return_stats=True, **options)
        return loss_of(y, x), (y, stats)

    return loss, (draw(), params)


def scanned(group: fakes.LocalGroup) -> Any:
    """Three layers of a stack under remat that keeps plans and rows."""
    stack = group.register_layer_stack("stack", 3, top_k=TOP_K)
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.vmap(lambda key: ep.init_moe_params(key, stack[0], INNER))(keys)

    @functools.partial(jax.checkpoint, policy=ep.remat_policy(("ep_plan", "ep_recv", "ep_wi")))
    def block(x: Any, layer: Any) -> Any:
        index, own = layer
        return x + ep.moe(stack[index], x, own, recipe=BLOCK)[0], None

    def loss(x: Any, params: Any) -> Any:
        y, _ = lax.scan(block, x, (jnp.arange(3), params))
        return loss_of(y, x), y

    return loss, (draw(), params)


def graded(loss: Any, arguments: Any) -> tuple[Any, str]:
    """Loss, results and gradients; and the compiled program."""
    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    made = jax.jit(both).lower(*arguments).compile()
    return made(*arguments), made.as_text()


def rows_sent(text: str) -> list[str]:
    """Types of the rows in each dispatch of a compiled program."""
    return re.findall(r"= \((\w+)\[.* custom-call\(.*\"ep_dispatch_v1\"", text)


def assert_same(got: Any, want: Any) -> None:
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A context in which tokens are sent as they are, and quantized where they arrive."""

    @contextlib.contextmanager
    def patched() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(moe_call, "_sent_by", lambda *_: None)
            jax.clear_caches()  # of what was traced otherwise
            yield
        jax.clear_caches()

    return patched


@pytest.mark.usefixtures("optimized")
def test_results_and_gradients_are_those_of_tokens_sent_as_they_are(
    make_group: MakeGroup, behind: Callable[[], Any]
) -> None:
    """Weights before wo, a pair, drops."""
    options: Any = {"weights_at": "hidden", "separate": True, "capacity": 32}
    check_both(*plain(make(make_group), jnp.float32, **options), behind)


def test_so_they_are_in_a_scan_with_remat(make_group: MakeGroup, behind: Callable[[], Any]) -> None:
    check_both(*scanned(make(make_group)), behind)


def check_both(loss: Any, arguments: Any, behind: Any) -> None:
    """The same numbers, of as many calls."""
    got, text = graded(loss, arguments)
    with behind():
        want, text_behind = graded(loss, arguments)
    assert_same(got, want)
    assert {*rows_sent(text)} == {"u8"}
    assert "u8" not in rows_sent(text_behind)
    # Gradients are sent as they are in both, and nothing is sent twice.
    assert len(rows_sent(text)) == len(rows_sent(text_behind))


def test_explicit_axes(make_group: MakeGroup, behind: Callable[[], Any]) -> None:
    group = make(make_group, mesh=fakes.mesh_of({"dp": 2, "ep": 4}, explicit=True))
    loss, (x, params) = plain(group)
    arguments = (jax.device_put(x, NamedSharding(group.mesh, SPEC)), params)
    with jax.set_mesh(group.mesh):
        got, text = graded(loss, arguments)
        with behind():
            assert_same(got, graded(loss, arguments)[0])
    assert rows_sent(text)[0] == "u8"


def test_inside_a_shard_map_of_the_user(make_group: MakeGroup, behind: Callable[[], Any]) -> None:
    group = make(make_group)
    layer = group.register_layer("moe", top_k=TOP_K)
    params = ep.init_moe_params(jax.random.key(0), layer, INNER)
    experts = PartitionSpec("ep")
    specs = ep.MoEParams(PartitionSpec(), experts, experts)

    def block(x: Any, params: Any) -> Any:
        return ep.moe(layer, x, params, recipe=BLOCK)[0]

    mapped = jax.shard_map(block, mesh=group.mesh, in_specs=(SPEC, specs), out_specs=SPEC)

    def loss(x: Any, params: Any) -> Any:
        y = mapped(x, params)
        return loss_of(y, x), y

    got, text = graded(loss, (draw(), params))
    with behind():
        assert_same(got, graded(loss, (draw(), params))[0])
    assert rows_sent(text)[0] == "u8"


@pytest.mark.usefixtures("forgotten")
def test_tokens_are_sent_as_they_are_where_bits_or_speed_say_so(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other recipes, weights that multiply what arrives, and GPUs."""

    def sent(group: fakes.LocalGroup, **options: Any) -> str:
        layer = group.register_layer("moe", top_k=TOP_K)
        params = jax.eval_shape(lambda: ep.init_moe_params(jax.random.key(0), layer, 64))
        program = jax.jit(lambda x, p: ep.moe(layer, x, p, **options)[0])
        return str(program.trace(jax.ShapeDtypeStruct((64, 128), jnp.float32), params).jaxpr)

    group = make(make_group, hidden_size=128, partitioning="shard_map")
    bytes_ = "u8[8,144]"  # of a device's tokens: 128 values, a scale, and what pads them
    assert bytes_ in sent(group, recipe=BLOCK)
    assert bytes_ in sent(group, recipe=(BLOCK, None))
    assert bytes_ not in sent(group, recipe=(None, BLOCK))
    assert bytes_ not in sent(group, recipe=ep.recipes.MXFP8())
    assert bytes_ not in sent(group, recipe=ep.recipes.TensorScaling())
    assert bytes_ not in sent(group, recipe=BLOCK, weights_at="input")
    over_xla = make(
        make_group, hidden_size=128, transport="xla", debug=False, partitioning="shard_map"
    )
    assert bytes_ in sent(over_xla, recipe=BLOCK)
    monkeypatch.setattr(serve, "available", lambda: True)
    assert bytes_ not in sent(over_xla, recipe=BLOCK)
