"""The block call on GPUs with 8-bit rows and weights quantized once: the composed body's bits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.block_programs import (
    HIDDEN,
    LOCAL,
    SENT,
    TENSOR,
    TILES,
    Blocks,
    compare,
    graded,
    ran,
)
from gpu.jobs.layouts import TRANSPORT, TRIAL

import ep_runtime as ep

pytestmark = pytest.mark.skipif(TRANSPORT == "xla", reason="has no block calls")

RECIPES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "tensor scales": (TENSOR, {}, {}),
    "tensor scales, a pair": (TENSOR, {"separate": True}, {"keep": "nothing"}),
    "tensor scales, 16-bit weights": (
        ep.recipes.TensorScaling(gradient_dtype="float8_e4m3fn"),
        {"param_dtype": jnp.bfloat16, "gated": False},
        {"gated": False, "keep_factor": 0.5},
    ),
    "blocks": (TILES, {}, {"capacity": 512}),
    "blocks, sent": (TILES, {}, {"capacity": 512}),
    "blocks, sent, e5m2": (
        ep.recipes.BlockScaling(power_of_two_scales=True, gradient_dtype="float8_e5m2"),
        {"gated": False},
        {"gated": False, "keep": "nothing"},
    ),
    "blocks, sent in two copies": (TILES, {}, {"keep_factor": 0.5}),
    "blocks by powers of two": (
        ep.recipes.BlockScaling(power_of_two_scales=True, gradient_dtype="float8_e5m2"),
        {"separate": True},
        {"keep": "nothing"},
    ),
}


def hidden_of(name: str) -> int:
    """Returns a case's hidden size; one copy takes at most 8 KiB."""
    return 17 * SENT if "two copies" in name else SENT if "sent" in name else HIDDEN


# Without a recipe, products of f32 rows use our kernels in both bodies.
F32: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "f32": (None, {}, {"capacity": 512}),
    "f32, a pair": (None, {"separate": True}, {"keep": "nothing"}),
    "f32, not gated": (
        None,
        {"gated": False},
        {"gated": False, "activation": "relu", "keep_factor": 0.5},
    ),
}


@pytest.mark.parametrize("name", RECIPES | F32)
def test_recipes_and_f32_have_the_bits_of_the_composed_body(blocks: Blocks, name: str) -> None:
    """Weights multiply activations: as many rows share a scale, and sums have the same order."""
    recipe, of_params, options = (RECIPES | F32)[name]
    layer = blocks.layer(hidden=hidden_of(name))
    params = blocks.params(layer, **of_params)
    x, weights, idx = blocks.drawn(lambda idx, experts: idx, hidden_of(name))
    early = {"recipe": recipe, "weights_at": "hidden", **options}
    dtype = jnp.float32 if name in F32 else jnp.bfloat16
    run = functools.partial(graded, layer, dtype, **early)
    blocks.ways.body("composed")
    composed = jax.device_get(jax.jit(lambda *given: run(*given))(x, weights, idx, params))
    blocks.call()
    got = ran(run, x, weights, idx, params)
    jax.tree.map(np.testing.assert_array_equal, got, composed)


MX: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "MX, a pair": (ep.recipes.MXFP8(), {"separate": True}, {})
}


@pytest.mark.parametrize("way", ["composed", "call"])
@pytest.mark.parametrize("name", RECIPES | MX)
def test_weights_quantized_once_have_the_bits_of_the_recipe(
    blocks: Blocks, name: str, way: str
) -> None:
    """Weights are in the layouts that forward and backward products read, without transposing."""
    recipe, of_params, options = (RECIPES | MX)[name]
    layer = blocks.layer(hidden=hidden_of(name))
    params = blocks.params(layer, **of_params)
    x, weights, idx = blocks.drawn(lambda idx, experts: idx, hidden_of(name))
    if way == "composed":
        blocks.ways.body(way)
    else:
        blocks.call()
    by_recipe = functools.partial(graded, layer, jnp.bfloat16, recipe=recipe, **options)
    once = functools.partial(graded, layer, jnp.bfloat16, **options)
    params8 = jax.jit(
        lambda params: ep.quantize_params(params, recipe, layer=layer, weights_only=True)
    )(params)
    assert TRIAL or "MX" in name or params8.wi.transposed is not None
    want = jax.device_get(jax.jit(lambda *given: by_recipe(*given))(x, weights, idx, params))
    got = ran(once, x, weights, idx, params, params8)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("hidden", [HIDDEN, SENT])
@pytest.mark.parametrize("recipe", [TENSOR, TILES], ids=lambda recipe: type(recipe).__name__)
def test_recipes_in_parts(blocks: Blocks, recipe: Any, hidden: int) -> None:
    """A tensor scale covers one chunk's rows: results are as near f32, but other bits."""
    layer = blocks.layer(hidden=hidden, workspace=1e-6)
    given = blocks.drawn(lambda idx, experts: np.where(idx % 2 == 0, idx, idx % LOCAL), hidden)
    options = {"recipe": recipe, "keep_factor": 1.0}
    compare(blocks, layer, blocks.params(layer), given, "bfloat16", **options)


@pytest.mark.parametrize("hidden", [HIDDEN, SENT])
@pytest.mark.parametrize("recipe", [TENSOR, TILES], ids=lambda recipe: type(recipe).__name__)
def test_overlap_changes_no_bit_of_recipes(blocks: Blocks, recipe: Any, hidden: int) -> None:
    given = blocks.drawn(lambda idx, experts: idx, hidden)
    found = []
    blocks.call()
    for overlap in (False, True):
        layer = blocks.layer(f"overlap-{overlap}", hidden, overlap=overlap)
        params = blocks.params(layer)
        for keep in ("first", "nothing"):
            run = functools.partial(graded, layer, jnp.bfloat16, recipe=recipe, keep=keep)
            found.append(ran(run, *given, params))
    first, *others = found
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)
