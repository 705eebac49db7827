"""The block call on GPUs: its results stay as near exact ones as those of slabs do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_ways import Ways
from gpu.jobs.layouts import TRANSPORT, TRIAL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.ops.block import takes
from ep_runtime_client.ops.transports import nodes, nodes_plan

TOKENS, HIDDEN, INNER, TOP_K, LOCAL = 192, 256, 128, 3, 4  # tokens and experts of a rank
_AGAIN = 3  # the third run of a program is a command buffer's
DTYPES = ("bfloat16", "float32")
# Of an array's largest value: what another order of sums may make of it.
_ROUNDING = {"bfloat16": 0.02, "float32": 1e-4}
pytestmark = pytest.mark.skipif(TRANSPORT == "xla", reason="has no block calls")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Makes layers and programs on the GPUs that are here."""

    session: ep.Session
    mesh: Mesh
    ways: Ways

    def layer(self, name: str = "block", hidden: int = HIDDEN, **settings: Any) -> Any:
        group = self.session.create_group(
            name,
            self.mesh,
            ep_axis="ep",
            transport=TRANSPORT,
            num_experts=LOCAL * self.mesh.size,
            hidden_size=hidden,
            max_tokens_per_rank=TOKENS,
            max_top_k=TOP_K,
            max_token_dtype="float32",
            alignment=8,
            op_timeout_s=60.0,
            **settings,
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
        """Tokens, weights, and indices as `change` of (drawn ones, experts) has them."""
        count, experts = TOKENS * self.mesh.size, LOCAL * self.mesh.size
        rng = np.random.default_rng(7)
        idx = np.argsort(rng.random((count, experts)), axis=1)[:, :TOP_K].astype(np.int32)
        weights = rng.random((count, TOP_K), np.float32)
        x = rng.standard_normal((count, hidden), np.float32)
        rows = NamedSharding(self.mesh, PartitionSpec("ep"))
        given: Any = jax.device_put((x, weights, change(idx, experts)), rows)
        return given

    def call(self) -> None:
        """Programs take the block call from here on."""
        if TRIAL:
            self.ways.call()
        else:
            self.ways.as_users()


@pytest.fixture
def blocks(session: ep.Session, gpus: list[Any], ways: Ways) -> Blocks:
    return Blocks(session, Mesh(np.array(gpus), ("ep",)), ways)


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
    """(y, gradients of x, weights and params) in `dtype`; of weights in 8 bits where they come."""

    def block(x: Any, weights: Any, params: Any) -> Any:
        routing = ep.Routing(idx, weights, None)
        if params8 is not None:
            params = ep.straight_through(params, params8)
        return ep.moe(layer, x, params, routing=routing, compute_dtype=dtype, **options)[0]

    y, pull = jax.vjp(block, x, weights, params)
    return y, pull(jnp.cos(y))


def ran(run: Callable[..., Any], *operands: Any) -> Any:
    """What a program gives, which is the same bits each time."""
    compiled = jax.jit(lambda *given: run(*given))
    first = jax.device_get(compiled(*operands))
    for _ in range(_AGAIN):
        poison(operands[0])
        again = jax.device_get(compiled(*operands))
        jax.tree.map(np.testing.assert_array_equal, again, first)
    return first


def poison(like: Any) -> None:
    """Leaves NaN where a program's temporaries will lie."""
    shape = (4096, *like.shape[1:])
    jax.block_until_ready(
        jax.device_put(np.full(shape, np.nan, np.float32), like.sharding)
    ).delete()


def assert_as_near(got: Any, slabs: Any, exact: Any, dtype: Any) -> None:
    """Root mean squares of errors are at most a little more than those of slabs."""
    more = 2e-3 if jnp.dtype(dtype).itemsize == 2 else 1e-4  # tf32 has 10 bits behind the point
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(exact)]
    for path, *each in zip(paths, *map(jax.tree.leaves, (got, slabs, exact)), strict=True):
        mine, theirs, true = (np.asarray(x, np.float64) for x in each)
        assert np.isfinite(mine).all(), path
        scale = np.sqrt(np.square(true).mean()) + 1e-30
        errors = [np.sqrt(np.square(x - true).mean()) / scale for x in (mine, theirs)]
        assert errors[0] <= 1.5 * errors[1] + more, (path, errors)


def compare(blocks: Blocks, layer: Any, params: Any, given: Any, dtype: Any, **options: Any) -> Any:
    """What the call gives, held against slabs in the same dtype and in f32."""
    x, weights, idx = given
    operands = (x, weights, idx, params)
    blocks.ways.slabs()
    unrounded = {name: each for name, each in options.items() if name != "recipe"}
    with jax.default_matmul_precision("highest"):
        exact = jax.device_get(
            jax.jit(functools.partial(graded, layer, jnp.float32, **unrounded))(*operands)
        )
    run = functools.partial(graded, layer, jnp.dtype(dtype), **options)
    slabs = jax.device_get(jax.jit(lambda *given: run(*given))(*operands))
    blocks.call()
    got = ran(run, *operands)
    assert_as_near(got, slabs, exact, dtype)
    return got


TENSOR, TILES = ep.recipes.TensorScaling(), ep.recipes.BlockScaling()
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gated": ("bfloat16", {}, {}),
    "weights before wo": ("bfloat16", {}, {"apply_topk_weights_early": None}),
    "f16": ("float16", {}, {"apply_topk_weights_early": None, "keep": "nothing"}),
    "not gated": ("bfloat16", {"gated": False}, {"gated": False, "activation": "gelu"}),
    "a pair": ("bfloat16", {"separate": True}, {"keep": "nothing"}),
    "biases": ("bfloat16", {"use_bias": True}, {}),
    "biases of a pair": ("float16", {"use_bias": True, "separate": True}, {}),
    "drops": ("bfloat16", {}, {"capacity": 512}),
    "f32": ("float32", {}, {"keep_factor": 0.5}),
    "f32, weights in combine": ("float32", {}, {"apply_topk_weights_early": False}),
    "f32, not gated": ("float32", {"gated": False}, {"gated": False, "activation": "gelu"}),
    "f32, biases": ("float32", {"use_bias": True}, {}),
    "f32, biases of a pair": ("float32", {"use_bias": True, "separate": True}, {}),
    "f32, 16-bit weights and biases": (
        "float32",
        {"use_bias": True, "param_dtype": jnp.bfloat16},
        {"keep": "nothing"},
    ),
    "fp8, biases": ("bfloat16", {"use_bias": True, "separate": True}, {"recipe": TENSOR}),
    "fp8, late weights": (
        "bfloat16",
        {"gated": False},
        {"gated": False, "recipe": TENSOR, "apply_topk_weights_early": False, "keep": "nothing"},
    ),
    "fp8 by blocks, biases": ("bfloat16", {"use_bias": True}, {"recipe": TILES}),
    "fp8 by blocks sent, biases": ("bfloat16", {"use_bias": True}, {"recipe": TILES}),
}
# Rows of 512 values end with scales that fill whole copies: exchanges carry 8 bits then.
SENT = 512


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_as_near_as_those_of_slabs(blocks: Blocks, name: str) -> None:
    dtype, of_params, options = CASES[name]
    hidden = SENT if "sent" in name else HIDDEN
    layer = blocks.layer(hidden=hidden)
    given = blocks.drawn(lambda idx, experts: idx, hidden)
    compare(blocks, layer, blocks.params(layer, **of_params), given, dtype, **options)


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
    """Of a case by its name: copies are of at most 8 KiB."""
    return 17 * SENT if "two copies" in name else SENT if "sent" in name else HIDDEN


# Without a recipe: products of f32 rows are kernels of ours on either way.
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
def test_recipes_and_f32_have_the_bits_of_slabs(blocks: Blocks, name: str) -> None:
    """Where weights multiply activations: as many rows have one scale, and sums one order."""
    recipe, of_params, options = (RECIPES | F32)[name]
    layer = blocks.layer(hidden=hidden_of(name))
    params = blocks.params(layer, **of_params)
    x, weights, idx = blocks.drawn(lambda idx, experts: idx, hidden_of(name))
    early = {"recipe": recipe, "apply_topk_weights_early": True, **options}
    dtype = jnp.float32 if name in F32 else jnp.bfloat16
    run = functools.partial(graded, layer, dtype, **early)
    blocks.ways.slabs()
    slabs = jax.device_get(jax.jit(lambda *given: run(*given))(x, weights, idx, params))
    blocks.call()
    got = ran(run, x, weights, idx, params)
    jax.tree.map(np.testing.assert_array_equal, got, slabs)


MX: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "MX, a pair": (ep.recipes.MXFP8(), {"separate": True}, {})
}


@pytest.mark.parametrize("way", ["slabs", "call"])
@pytest.mark.parametrize("name", RECIPES | MX)
def test_weights_quantized_once_have_the_bits_of_the_recipe(
    blocks: Blocks, name: str, way: str
) -> None:
    """In the layouts that forward and backward products take, which nothing transposes again."""
    recipe, of_params, options = (RECIPES | MX)[name]
    layer = blocks.layer(hidden=hidden_of(name))
    params = blocks.params(layer, **of_params)
    x, weights, idx = blocks.drawn(lambda idx, experts: idx, hidden_of(name))
    (blocks.ways.slabs if way == "slabs" else blocks.call)()
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
    """Tensor scales are of a part's rows: results are as near f32, and not the same bits."""
    layer = blocks.layer(hidden=hidden, workspace=1e-6)
    given = blocks.drawn(lambda idx, experts: np.where(idx % 2 == 0, idx, idx % LOCAL), hidden)
    options = {"recipe": recipe, "keep_factor": 1.0}
    compare(blocks, layer, blocks.params(layer), given, "bfloat16", **options)


ROUTINGS: dict[str, Callable[[Any, int], Any]] = {
    "everything to one rank": lambda idx, experts: experts - 1 - np.arange(TOP_K) + 0 * idx,
    "everything to one expert": lambda idx, experts: (
        np.where(np.arange(TOP_K) == 0, 1, -1) + 0 * idx
    ),
    "nothing to the last rank": lambda idx, experts: np.where(idx >= experts - LOCAL, -1, idx),
    "unused slots": lambda idx, experts: np.where(idx % 3 == 0, -1, idx),
    "nothing": lambda idx, experts: np.full_like(idx, -1),
}
KEPT = {"fits nowhere": 0.01, "fits on some ranks": 1.0, "fits": 8.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", ["exact", "fp8"])
def test_sums_travel_as_the_group_says(blocks: Blocks, precision: str, dtype: str) -> None:
    layer = blocks.layer(combine_precision=precision, workspace=0.6)
    compare(blocks, layer, blocks.params(layer), blocks.drawn(lambda idx, experts: idx), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workspace", [1e-6, 0.6, "auto"], ids=str)
def test_any_routing_in_any_workspace(blocks: Blocks, workspace: Any, dtype: str) -> None:
    layer = blocks.layer(workspace=workspace)
    params = blocks.params(layer)
    x, weights, _ = blocks.drawn(lambda idx, experts: idx)
    rows = x.sharding
    blocks.ways.slabs()
    exact_run = jax.jit(functools.partial(graded, layer, jnp.float32))
    slabs_run = jax.jit(functools.partial(graded, layer, jnp.dtype(dtype)))
    each = {
        name: jax.device_put(blocks.drawn(change)[2], rows) for name, change in ROUTINGS.items()
    }
    with jax.default_matmul_precision("highest"):
        exact = {
            name: jax.device_get(exact_run(x, weights, idx, params)) for name, idx in each.items()
        }
    slabs = {name: jax.device_get(slabs_run(x, weights, idx, params)) for name, idx in each.items()}
    blocks.call()
    run = jax.jit(lambda *given: graded(layer, jnp.dtype(dtype), *given))
    for _ in range(2):  # the programs alternate, and leave each other's rows behind
        for name, idx in each.items():
            got = jax.device_get(run(x, weights, idx, params))
            assert_as_near(got, slabs[name], exact[name], dtype)
            jax.tree.map(
                np.testing.assert_array_equal, jax.device_get(run(x, weights, idx, params)), got
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_much_is_kept_and_held_changes_no_output(blocks: Blocks, dtype: str) -> None:
    given = blocks.drawn(lambda idx, experts: np.where(idx % 2 == 0, idx, idx % LOCAL))
    found = []
    blocks.call()
    for number, workspace in enumerate((1e-6, "auto", 1024.0)):
        layer = blocks.layer(f"group{number}", workspace=workspace)
        params = blocks.params(layer)
        for factor in KEPT.values():
            x, weights, idx = given
            run = functools.partial(graded, layer, jnp.dtype(dtype), keep_factor=factor)
            found.append(ran(run, x, weights, idx, params))
    first, *others = found
    for other in others:
        np.testing.assert_array_equal(other[0], first[0])
        for mine, theirs in zip(*map(jax.tree.leaves, (other[1], first[1])), strict=True):
            scale = np.abs(np.asarray(theirs, np.float64)).max()
            np.testing.assert_allclose(
                np.asarray(mine, np.float64) / scale,
                np.asarray(theirs, np.float64) / scale,
                atol=_ROUNDING[dtype],
            )


@pytest.mark.skipif(TRANSPORT != "nccl", reason="windows count nothing")
@pytest.mark.parametrize("workspace", [1e-6, "auto"], ids=str)
def test_rows_that_are_counted_before_they_cross(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, workspace: Any
) -> None:
    for module in (nodes_plan, nodes):
        monkeypatch.setattr(module, "counts_chunks", lambda call: True)
    layer = blocks.layer("counted", workspace=workspace)
    given = blocks.drawn(ROUTINGS["unused slots"])
    compare(blocks, layer, blocks.params(layer), given, "bfloat16")


def scanned(
    stack: Any,
    policy: tuple[str, ...] | None,
    dtype: Any,
    keep: Any,
    x: Any,
    weights: Any,
    idx: Any,
    params: Any,
) -> Any:
    """Gradients of x, weights and params of the stack's layers one after another."""

    def step(x: Any, own: Any) -> Any:
        number, params = own
        routing = ep.Routing((idx + number) % stack.group_spec.num_experts, weights, None)
        y = ep.moe(stack[number], x, params, routing=routing, compute_dtype=dtype, keep=keep)[0]
        return x + y, None

    body = step if policy is None else jax.checkpoint(step, policy=ep.remat_policy(policy))

    def loss(x: Any, weights: Any, params: Any) -> Any:
        return jnp.sin(jax.lax.scan(body, x, (jnp.arange(3), params))[0]).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(x, weights, params)


def of_all_layers(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, 0.9 * x, 1.1 * x]), params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", [None, ("ep_plan",), ("ep_plan", "ep_kept")], ids=str)
def test_scans_and_checkpoints(blocks: Blocks, policy: tuple[str, ...] | None, dtype: str) -> None:
    params = of_all_layers(blocks.params(blocks.layer()))
    run = functools.partial(scanned, ep.layer("block/moe"), policy)
    operands = (*blocks.drawn(lambda idx, experts: idx), params)
    blocks.ways.slabs()
    with jax.default_matmul_precision("highest"):
        exact = jax.device_get(jax.jit(functools.partial(run, jnp.float32, "first"))(*operands))
    slabs = jax.device_get(jax.jit(functools.partial(run, jnp.dtype(dtype), "first"))(*operands))
    blocks.call()
    for keep in ("first", "nothing"):
        got = ran(functools.partial(run, jnp.dtype(dtype), keep), *operands)
        assert_as_near(got, slabs, exact, dtype)


def test_overflow_in_error_mode_fails_the_step_and_nothing_else(
    blocks: Blocks, several_gpus: int
) -> None:
    layer = blocks.layer(on_overflow="error")
    x, weights, spread = blocks.drawn(lambda idx, experts: idx)
    crowded = blocks.drawn(ROUTINGS["everything to one rank"])[2]
    params, group = blocks.params(layer), blocks.session.group("block")
    capacity = TOKENS * TOP_K * 3 // 2  # of even shares
    blocks.call()
    run = jax.jit(functools.partial(graded, layer, jnp.bfloat16, capacity=capacity))
    for _ in range(_AGAIN):
        group.check(run(x, weights, spread, params))
        with pytest.raises(ep.CapacityOverflowError) as caught:
            group.check(run(x, weights, crowded, params))
        assert caught.value.fields["layer"] == "moe[1]"
        assert caught.value.fields["capacity"] == capacity


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workspace", ["auto", 0.6], ids=["one pass", "parts"])
@pytest.mark.parametrize("policy", [None, ("ep_plan",)], ids=str)
def test_overlap_changes_no_bit(
    blocks: Blocks, workspace: Any, policy: tuple[str, ...] | None, dtype: str
) -> None:
    given = blocks.drawn(lambda idx, experts: idx)
    found = []
    blocks.call()
    for overlap in (False, True):
        layer = blocks.layer(f"overlap {overlap}", workspace=workspace, overlap=overlap)
        params = blocks.params(layer)
        once = ran(functools.partial(graded, layer, jnp.dtype(dtype)), *given, params)
        stack = ep.layer(f"overlap {overlap}/moe")
        run = functools.partial(scanned, stack, policy, jnp.dtype(dtype), "first")
        found.append((once, ran(run, *given, of_all_layers(params))))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("hidden", [HIDDEN, SENT])
@pytest.mark.parametrize("recipe", [TENSOR, TILES], ids=lambda recipe: type(recipe).__name__)
def test_overlap_changes_no_bit_of_recipes(blocks: Blocks, recipe: Any, hidden: int) -> None:
    given = blocks.drawn(lambda idx, experts: idx, hidden)
    found = []
    blocks.call()
    for overlap in (False, True):
        layer = blocks.layer(f"overlap {overlap}", hidden, overlap=overlap)
        params = blocks.params(layer)
        for keep in ("first", "nothing"):
            run = functools.partial(graded, layer, jnp.bfloat16, recipe=recipe, keep=keep)
            found.append(ran(run, *given, params))
    first, *others = found
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


def test_programs_take_the_call(blocks: Blocks) -> None:
    layer = blocks.layer()
    params = blocks.params(layer)
    x, weights, idx = blocks.drawn(lambda idx, experts: idx)
    blocks.call()

    def told(dtype: Any, **options: Any) -> str:
        run = jax.jit(lambda *given: graded(layer, dtype, *given, **options)[0])
        (path,) = ep.explain(run, x, weights, idx, params).paths
        return path.why or path.path

    assert told(jnp.bfloat16) == told(jnp.float32) == "block call"
    if not TRIAL:
        assert told(jnp.float32, recipe=TENSOR) == takes.REASONS["quantized"]
        with jax.default_matmul_precision("highest"):
            assert told(jnp.bfloat16) == "block call"
            assert told(jnp.float32) == takes.REASONS["precision"]
