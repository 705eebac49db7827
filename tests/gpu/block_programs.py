"""Layers and programs of the block call's tests, and comparisons of their results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from block_ways import Ways
from gpu.jobs.layouts import TRANSPORT, TRIAL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

TOKENS, HIDDEN, INNER, TOP_K, LOCAL = 192, 256, 128, 3, 4  # tokens and experts of a rank
AGAIN = 3  # from the third run on, a program runs as a command buffer
DTYPES = ("bfloat16", "float32")
# Rows of 512 values end with scales that fill whole copies: exchanges carry 8 bits then.
SENT = 512
TENSOR, TILES = ep.recipes.TensorScaling(), ep.recipes.BlockScaling()


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Makes layers and programs on this machine's GPUs."""

    session: ep.Session
    mesh: Mesh
    ways: Ways

    def layer(self, name: str = "block", hidden: int = HIDDEN, **settings: Any) -> Any:
        group = self.session.create_group(
            name,
            self.mesh,
            ep_axis="ep",
            num_experts=LOCAL * self.mesh.size,
            hidden_size=hidden,
            max_tokens_per_rank=TOKENS,
            max_top_k=TOP_K,
            max_token_dtype="float32",
            op_timeout_s=60.0,
            **{"alignment": 8, "transport": TRANSPORT} | settings,
        )
        return group.register_layer_stack("moe", 3, top_k=TOP_K)[1]

    def params(self, layer: Any, **options: Any) -> ep.MoEParams:
        made = ep.init_moe_params(jax.random.key(0), layer, INNER, **options)
        made = dataclasses.replace(made, router=None)
        if not options.get("use_bias"):
            return made
        leaves, tree = jax.tree.flatten((made.wi_bias, made.wo_bias))
        keys = map(jax.random.key, range(len(leaves)))
        drawn = [
            0.1 * jax.random.normal(key, x.shape, x.dtype)
            for key, x in zip(keys, leaves, strict=True)
        ]
        wi_bias, wo_bias = jax.tree.unflatten(tree, drawn)
        return dataclasses.replace(made, wi_bias=wi_bias, wo_bias=wo_bias)

    def drawn(
        self, change: Callable[[Any, int], Any], hidden: int = HIDDEN
    ) -> tuple[Any, Any, Any]:
        """Returns tokens, weights, and indices as `change(drawn indices, experts)` gives them."""
        count, experts = TOKENS * self.mesh.size, LOCAL * self.mesh.size
        rng = np.random.default_rng(7)
        idx = np.argsort(rng.random((count, experts)), axis=1)[:, :TOP_K].astype(np.int32)
        weights = rng.random((count, TOP_K), np.float32)
        x = rng.standard_normal((count, hidden), np.float32)
        rows = NamedSharding(self.mesh, PartitionSpec("ep"))
        return jax.device_put((x, weights, change(idx, experts)), rows)

    def call(self) -> None:
        """Programs use the block call from now on."""
        if TRIAL:
            self.ways.emulated()
        else:
            self.ways.as_users()


def graded(
    layer: Any,
    dtype: Any,
    x: Any,
    weights: Any,
    idx: Any,
    params: Any,
    params8: Any = None,
    **options: Any,
) -> Any:
    """Returns (y, gradients of x, weights and params) in `dtype`, or in 8 bits for
    8-bit weights.
    """

    def block(x: Any, weights: Any, params: Any) -> Any:
        routing = ep.Routing(idx, weights, None)
        if params8 is not None:
            params = ep.straight_through(params, params8)
        return ep.moe(layer, x, params, routing=routing, compute_dtype=dtype, **options)[0]

    y, pull = jax.vjp(block, x, weights, params)
    return y, pull(jnp.cos(y))


def ran(run: Callable[..., Any], *operands: Any) -> Any:
    """Runs a program several times; checks that results are the same bits, and returns them."""
    compiled = jax.jit(lambda *given: run(*given))
    first = jax.device_get(compiled(*operands))
    for _ in range(AGAIN):
        poison(operands[0])
        again = jax.device_get(compiled(*operands))
        jax.tree.map(np.testing.assert_array_equal, again, first)
    return first


def poison(like: Any) -> None:
    """Fills the memory of a program's temporaries with NaN."""
    shape = (4096, *like.shape[1:])
    jax.block_until_ready(
        jax.device_put(np.full(shape, np.nan, np.float32), like.sharding)
    ).delete()


def assert_as_near(got: Any, composed: Any, exact: Any, dtype: Any) -> None:
    """Checks that errors' root mean squares are at most slightly above the composed body's."""
    more = 2e-3 if jnp.dtype(dtype).itemsize == 2 else 1e-4  # tf32 has 10 fraction bits
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(exact)]
    for path, *each in zip(paths, *map(jax.tree.leaves, (got, composed, exact)), strict=True):
        mine, theirs, true = (np.asarray(x, np.float64) for x in each)
        assert np.isfinite(mine).all(), path
        scale = np.sqrt(np.square(true).mean()) + 1e-30
        errors = [np.sqrt(np.square(x - true).mean()) / scale for x in (mine, theirs)]
        assert errors[0] <= 1.5 * errors[1] + more, (path, errors)


def compare(blocks: Blocks, layer: Any, params: Any, given: Any, dtype: Any, **options: Any) -> Any:
    """Compares the call's results with the composed body in the same dtype and in f32."""
    x, weights, idx = given
    operands = (x, weights, idx, params)
    blocks.ways.body("composed")
    unrounded = {name: each for name, each in options.items() if name != "recipe"}
    with jax.default_matmul_precision("highest"):
        exact = jax.device_get(
            jax.jit(functools.partial(graded, layer, jnp.float32, **unrounded))(*operands)
        )
    run = functools.partial(graded, layer, jnp.dtype(dtype), **options)
    composed = jax.device_get(jax.jit(lambda *given: run(*given))(*operands))
    blocks.call()
    got = ran(run, *operands)
    assert_as_near(got, composed, exact, dtype)
    return got
