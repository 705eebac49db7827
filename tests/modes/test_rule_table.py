"""Every row of the sharding rules: the collectives of the compiled program, and its values.

Each case compiles one forward and backward of grouped_gemm under plain jit, counts what moves, and
compares with one device, bit for bit with the shard_map form, and with what "rule" compiles.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any

import collectives
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from rule_rows import DP_FSDP_EP, EP_TP, FSDP_EP, GATHER, ROWS, SCATTER, SLOW_ROWS, SUM, Row

import ep_runtime as ep
from ep_runtime import errors
from ep_runtime_client.moe.params import MoEParams, init_moe_params
from ep_runtime_client.ops.partitioning import roles
from ep_runtime_client.ops.quantize.formats import recipes

ALL_ROWS = [
    *(pytest.param(row, id=name) for name, row in ROWS.items()),
    *(pytest.param(row, id=name, marks=pytest.mark.slow) for name, row in SLOW_ROWS.items()),
]


class Program:
    """Forward and backward of one grouped_gemm on a mesh and on one device."""

    def __init__(self, make_group: MakeGroup, row: Row, partitioning: str, experts: int = 8):
        self.row = row
        group = make_group(
            axes=row.axes,
            outer_axes=tuple(axis for axis in ("dp", "fsdp") if axis in row.axes),
            transport="xla",
            partitioning=partitioning,
            num_experts=experts,
            hidden_size=row.k,
        )
        self.group, self.layer = group, group.register_layer("moe", top_k=2)
        self.slab = PartitionSpec(group.spec.token_axes)
        self.arrays = self._draw(experts)
        # The group decides the partitioning; the twin must be given the layout that the rule finds.
        self.spec = PartitionSpec(*row.weight) if partitioning == "shard_map" else None

    def _draw(self, experts: int) -> list[Any]:
        rng = np.random.default_rng(0)
        row, slabs = self.row, self.group.spec.num_slabs
        groups = experts // self.group.spec.ep_size
        sizes = rng.integers(0, 32 // groups + 1, (slabs, groups)).astype(np.int32)
        shapes = [(slabs, 32, row.k), (experts, row.k, *row.n), (slabs, 32, *row.n)]
        lhs, rhs, grad = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        bias = rng.standard_normal((experts, *row.n)).astype(np.float32) if row.bias else None
        weight: Any = (rhs[:, :, 0], rhs[:, :, 1]) if row.pair else rhs
        return [lhs, weight, bias, sizes, grad]

    def placed(self) -> list[Any]:
        return [
            jax.device_put(array, NamedSharding(self.group.mesh, spec))
            for array, spec in zip(self.arrays, self.row.specs(self.slab), strict=True)
        ]

    def lowered(self) -> Any:
        run = functools.partial(self.row.step, self.layer, rhs_spec=self.spec)
        return jax.jit(run).lower(*self.placed())

    def compiled(self) -> Any:
        return self.lowered().compile()

    def on_one_device(self) -> Any:
        return jax.jit(functools.partial(self.row.step, None))(*self.arrays)

    def defined(self, results: Any) -> list[Any]:
        """Returns results without the rows past the last group."""
        rows = np.arange(32) < self.arrays[3].sum(-1)[:, None]
        out, d_lhs, *others = map(np.array, jax.tree.leaves(results))
        return [out[rows], d_lhs[rows], *others]


@pytest.mark.parametrize("row", ALL_ROWS)
def test_a_row_moves_what_the_table_says_and_equals_one_device(
    make_group: MakeGroup, row: Row
) -> None:
    program = Program(make_group, row, "auto")
    lowered = program.lowered()
    ruled = Program(make_group, row, "rule").lowered()
    assert collectives.unnamed(lowered.as_text()) == collectives.unnamed(ruled.as_text())
    compiled = lowered.compile()
    assert collectives.count(compiled) == Counter(row.moved)
    results = compiled(*program.placed())
    out, d_lhs, d_rhs = results[:3]
    slab = NamedSharding(program.group.mesh, program.slab)
    if "tp" not in row.axes:
        assert out.sharding.is_equivalent_to(slab, out.ndim)
        assert d_lhs.sharding.is_equivalent_to(slab, d_lhs.ndim)
    for got, want in zip(*map(jax.tree.leaves, (d_rhs, program.placed()[1])), strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    found = program.defined(results)
    for got, want in zip(found, program.defined(program.on_one_device()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    twin = Program(make_group, row, "shard_map")
    mapped = twin.compiled()
    assert {*collectives.count(mapped)} == {*row.moved}
    same = twin.defined(mapped(*twin.placed()))
    for got, want in zip(found, same, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("axes", "weight", "words"),
    [
        # ep is merged before fsdp only; an axis without a meaning there is replicated.
        (FSDP_EP, ("fsdp",), "('ep', 'fsdp')"),
        (EP_TP, ("tp",), "tp=2 on the expert dim"),
        (FSDP_EP, (("fsdp", "ep"),), "('ep', 'fsdp') (fsdp=4, ep=2)"),
    ],
)
def test_another_layout_of_the_experts_is_taken_and_said_once(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture, axes: Any, weight: Any, words: str
) -> None:
    roles.say_once.cache_clear()
    caplog.set_level(logging.WARNING, "ep_runtime")
    program = Program(make_group, Row(axes, weight, {}), "auto")
    results = program.compiled()(*program.placed())
    assert results[2].sharding.spec[0] == weight[0]
    for got, want in zip(
        program.defined(results), program.defined(program.on_one_device()), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    texts = [r.getMessage() for r in caplog.records if r.name == "ep_runtime"]
    assert sum(words in text for text in texts) == 1


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (("fsdp",), ["12 experts", "ep=2, fsdp=4"]),
        ((None, "ep"), ["ep=2", "dim 1", "'moe'"]),
        ((None, None, "ep"), ["ep=2", "dim 2", "'moe'"]),
    ],
)
def test_what_has_no_meaning_is_an_error_with_axes_and_sizes(
    make_group: MakeGroup, weight: Any, words: list[str]
) -> None:
    program = Program(make_group, Row(FSDP_EP, weight, {}), "auto", experts=12)
    with pytest.raises(ep.InvalidArgumentError) as caught, ep.translate_errors():
        program.compiled()
    for word in words:
        assert word in str(caught.value)
    lhs, rhs, _, sizes, _ = program.placed()
    twin = Program(make_group, Row(FSDP_EP, weight, {}), "auto", experts=12)
    with pytest.raises(ValueError, match=words[0]):
        ep.grouped_gemm(lhs, rhs, sizes, layer=twin.layer)


def test_fsdp_in_front_of_tp_is_refused_where_rows_would_be_gathered(
    make_group: MakeGroup,
) -> None:
    axes = {"fsdp": 2, "ep": 2, "tp": 2}
    for weight in (("ep", None, ("fsdp", "tp")), ("ep", ("fsdp", "tp"))):
        program = Program(make_group, Row(axes, weight, {}), "auto")
        with pytest.raises(ep.InvalidArgumentError) as caught, ep.translate_errors():
            program.compiled()
        for words in ("tp=2 before fsdp=2", f"dim {len(weight) - 1}", "over ('tp', 'fsdp')"):
            assert words in str(caught.value)
    # A given layout moves shards of the weight, and the arrays that the other order moves.
    told = [
        Program(make_group, Row(axes, ("ep", None, names), {}), "shard_map").compiled()
        for names in (("fsdp", "tp"), ("tp", "fsdp"))
    ]
    gathered = [collectives.moved_bytes(compiled, GATHER) for compiled in told]
    assert gathered == [4 * 16 * 4 * 4] * 2


@pytest.mark.parametrize(
    ("told", "recipe"),
    [(False, None), (False, recipes.TensorScaling()), (True, None)],
    ids=["rule", "rule, 8-bit", "params_spec"],
)
def test_rows_of_the_block_that_tp_cuts_are_said_once(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture, told: bool, recipe: Any
) -> None:
    roles.say_once.cache_clear()
    caplog.set_level(logging.WARNING, "ep_runtime")
    group = make_group(axes={"ep": 2, "tp": 2}, transport="xla", num_experts=4, hidden_size=16)
    layer = group.register_layer("moe", top_k=2)
    specs = ep.MoEParams(
        PartitionSpec(), PartitionSpec("ep", "tp"), PartitionSpec("ep", None, "tp")
    )
    params = jax.tree.map(
        lambda array, spec: jax.device_put(array, NamedSharding(group.mesh, spec)),
        ep.init_moe_params(jax.random.key(0), layer, 8),
        specs,
    )
    x = np.ones((16, 16), np.float32)
    options: Any = {"params_spec": specs if told else None, "recipe": recipe}
    step = jax.jit(lambda *args: ep.moe(layer, *args, **options)[0])
    lowered = step.lower(x, params)
    if not told:
        lowered.compile()
    texts = [r.getMessage() for r in caplog.records if r.name == "ep_runtime"]
    (text,) = texts
    assert "weights of layer 'moe' are sharded over tp=2 on H, and rows are not" in text


@pytest.mark.parametrize("partitioning", ["auto", "shard_map"])
def test_amax_is_the_global_one_over_what_splits_a_group_and_nothing_else(
    make_group: MakeGroup, partitioning: str
) -> None:
    row = Row(DP_FSDP_EP, (("ep", "fsdp"),), {}, recipes.TensorScaling())
    program = Program(make_group, row, partitioning)
    lhs, rhs, _, sizes, _ = program.placed()
    rows = jax.jit(lambda x, s: ep.grouped_quantize(x, s, row.recipe, layer=program.layer))
    kernels = jax.jit(lambda w: ep.grouped_quantize(w, None, row.recipe, layer=program.layer))
    found = rows.lower(lhs, sizes).compile()
    assert collectives.count(found) == Counter({(SUM, "f32"): 1})
    plain, counts = program.arrays[0], program.arrays[3]
    wanted = np.zeros(8, np.float32)
    for slab in range(len(plain)):
        ends = np.cumsum(counts[slab])
        for group, (first, last) in enumerate(zip(ends - counts[slab], ends, strict=True)):
            expert = (slab * 4 + group) % 8
            wanted[expert] = max(wanted[expert], np.abs(plain[slab, first:last]).max(initial=0))
    np.testing.assert_array_equal(found(lhs, sizes).amax, np.tile(wanted.reshape(2, 4), (4, 1)))
    whole = kernels.lower(rhs).compile()
    if partitioning == "auto":
        assert collectives.count(whole) == Counter()
    np.testing.assert_array_equal(whole(rhs).amax, np.abs(program.arrays[1]).max((1, 2)))
    split = jax.device_put(rhs, NamedSharding(program.group.mesh, PartitionSpec("ep", "fsdp")))
    again = kernels.lower(split).compile()
    if partitioning == "auto":
        assert collectives.count(again) == Counter({(SUM, "f32"): 1})
    np.testing.assert_array_equal(again(split).amax, whole(rhs).amax)


def test_shards_without_whole_blocks_are_gathered_before_and_that_is_said_once(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    roles.say_once.cache_clear()
    caplog.set_level(logging.WARNING, "ep_runtime")
    # Half of 192 is not a multiple of 128: one all-gather of the plain weight; its data stays.
    row = Row(FSDP_EP | {"fsdp": 2}, ("ep", "fsdp"), {}, recipes.BlockScaling(), k=192, n=(32,))
    program = Program(make_group, row, "auto")
    compiled = program.compiled()
    assert collectives.count(compiled) == Counter({(GATHER, "f32"): 1, (SCATTER, "f32"): 1})
    results = compiled(*program.placed())
    found, wanted = program.defined(results), program.defined(program.on_one_device())
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    texts = [r.getMessage() for r in caplog.records if r.name == "ep_runtime"]
    assert len(texts) == 1
    assert "fsdp=2 is gathered before the op" in texts[0]


EXPERTS, TOKENS, TOP_K = 4, 32, 2
BLOCKS = ep.recipes.BlockScaling()
SPLIT = {"fsdp": 2, "ep": 2, "tp": 2}  # 96 of 192 on a shard
SPLIT_SPECS = MoEParams(P(), P("ep", "fsdp", None, "tp"), P("ep", "tp", "fsdp"), None, None, None)
DEEP = {"fsdp": 4, "ep": 2}  # 64 of 256 on a shard, and 256 would leave whole blocks of 1,024
DEEP_SPECS = MoEParams(P(), P("ep", "fsdp"), P("ep", None, "fsdp"), None, None, None)
TOKENS_SPEC = P(("fsdp", "ep"))


def trained(
    make_group: MakeGroup,
    axes: dict[str, int],
    specs: MoEParams,
    size: int,
    *,
    explicit: bool = False,
    manual: bool = False,
) -> Any:
    """Loss and gradients of a block whose rows and experts are `size` wide."""
    mesh = fakes.mesh_of(axes, explicit=explicit)
    shards = axes["fsdp"] * axes["ep"]
    settings = {
        "hidden_size": size,
        "num_experts": EXPERTS,
        "max_tokens_per_rank": TOKENS // shards,
    }
    group = make_group(
        transport="memfd", mesh=mesh, outer_axes=("fsdp",), max_top_k=TOP_K, **settings
    )
    layer = group.register_layer("moe", top_k=TOP_K)
    fresh = init_moe_params(jax.random.key(0), layer, size)
    params = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), fresh, specs)
    x = jax.random.normal(jax.random.key(1), (TOKENS, size), jnp.float32)
    x = jax.device_put(x, NamedSharding(mesh, TOKENS_SPEC))

    def block(params: Any, x: jax.Array) -> jax.Array:
        given = {"params_spec": specs} if manual else {}
        return ep.moe(layer, x, params, recipe=BLOCKS, **given)[0]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        run: Any = block
        if manual:
            where = {"mesh": mesh, "in_specs": (specs, TOKENS_SPEC), "out_specs": TOKENS_SPEC}
            run = jax.shard_map(block, check_vma=False, **where)
        return jnp.sin(run(params, x)).sum()

    return jax.jit(jax.value_and_grad(loss))(params, x)


def check_same(found: Any, wanted: Any) -> None:
    (loss, grads), (wanted_loss, wanted_grads) = found, wanted
    for name in ("wi", "wo"):
        np.testing.assert_array_equal(getattr(grads, name), getattr(wanted_grads, name))
    # Summed over all tokens; each mode has its own order.
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(grads.router, wanted_grads.router, rtol=1e-4, atol=1e-4)


def test_explicit_axes_have_the_gradients_of_the_rule(make_group: MakeGroup) -> None:
    wanted = trained(make_group, SPLIT, SPLIT_SPECS, 192)
    found = trained(make_group, SPLIT, SPLIT_SPECS, 192, explicit=True)
    check_same(found, wanted)
    assert jax.typeof(found[1].wi).sharding.spec == SPLIT_SPECS.wi


def test_a_manual_region_gathers_a_weight_once(make_group: MakeGroup) -> None:
    wanted = trained(make_group, DEEP, DEEP_SPECS, 256)
    check_same(trained(make_group, DEEP, DEEP_SPECS, 256, manual=True), wanted)


def test_a_manual_axis_that_cuts_blocks_and_rows_is_refused(make_group: MakeGroup) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"dim 3 .* of 128.* tp=2, got size 192"):
        trained(make_group, SPLIT, SPLIT_SPECS, 192, manual=True)
