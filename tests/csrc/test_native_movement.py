"""Compares prepare, dispatch, combine and their backward passes with NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest
from native_group import PLAN_NAMES, NativeGroup
from references import movement

from ep_runtime import native

jax.config.update("jax_enable_x64", False)


def random_idx(rng, ranks, tokens, top_k, num_experts, *, unused=0.1, duplicates=False):
    """[ranks, tokens, top_k]: by default distinct experts per token; some slots are unused."""
    shape = (ranks, tokens, top_k)
    if duplicates or top_k > num_experts:
        idx = rng.integers(0, num_experts, shape)
    else:
        idx = np.argsort(rng.random((ranks, tokens, num_experts)), -1)[..., :top_k]
    return np.where(rng.random(shape) < unused, -1, idx).astype(np.int32)


def floats(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def check_all(
    group, idx, dtype=np.float32, *, capacity=None, weighted=True, seed=0, row_alignment=None
):
    """Runs all five calls on every EP domain and compares every defined number exactly."""
    spec = group.spec
    rng = np.random.default_rng(seed)
    world, tokens, top_k = idx.shape
    rows, hidden = capacity or spec.recv_capacity_per_rank, spec.hidden_size
    x = floats(rng, dtype, world, tokens, hidden)
    w = floats(rng, np.float32, world, tokens, top_k) if weighted else None
    y = floats(rng, dtype, world, rows, hidden)
    rw = floats(rng, np.float32, world, rows) if weighted else None
    g = floats(rng, dtype, world, tokens, hidden)
    dw = floats(rng, np.float32, world, rows)

    def program(idx, x, w, y, rw, g, dw):
        given = {} if row_alignment is None else {"row_alignment": np.int64(row_alignment)}
        plan = group.prepare(idx, capacity, **given)
        return (
            plan,
            group.dispatch(x, w, plan),
            group.combine(y, rw, plan),
            group.dispatch_bwd(y, dw, plan),
            group.combine_bwd(g, y if weighted else None, rw, plan),
        )

    args = jax.tree.map(group.put, (idx, x, w, y, rw, g, dw))
    got = jax.tree.map(np.asarray, group.sharded(program)(*args))
    n = spec.ep_size
    for domain in range(spec.num_domains):
        ranks = slice(domain * n, (domain + 1) * n)
        part = jax.tree.map(lambda a, ranks=ranks: a[ranks], (got, args))
        check_domain(group, *part, rows, weighted, row_alignment)


def routed_of(idx, capacity, alignment=1, row_alignment=None, num_experts=16):
    more = {"alignment": alignment, "row_alignment": row_alignment, "capacity": capacity}
    return movement.plan(idx, num_experts=num_experts, ep_size=len(idx), **more)


def check_domain(group, got, args, rows, weighted, row_alignment):
    precision = group.spec.combine_precision
    idx, x, w, y, rw, g, dw = jax.tree.map(np.asarray, args)
    plan, (recv, recv_weights), combined, (d_x, d_w), (d_y, d_rw) = got
    routed = routed_of(idx, rows, group.alignment, row_alignment, group.spec.num_experts)
    for name, mine in zip(PLAN_NAMES, plan, strict=True):
        np.testing.assert_array_equal(mine, routed.arrays[name], err_msg=name)
    defined = routed.in_zone
    want_recv, want_weights = reference.dispatch(routed, x, w)
    equal(recv[defined], want_recv[defined])
    equal(recv_weights, want_weights)
    equal(combined, reference.combine(routed, y, rw, precision))
    want_d_x, want_d_w = reference.dispatch_bwd(routed, y, dw, precision)
    equal(d_x, want_d_x)
    equal(d_w, want_d_w)
    want_d_y, want_d_rw = reference.combine_bwd(routed, g, y if weighted else None, rw)
    equal(d_y, want_d_y)
    if weighted:
        equal(d_rw, want_d_rw)


def equal(got, want):
    assert got.dtype == want.dtype
    kind = np.float64 if got.dtype == np.float64 else np.float32
    np.testing.assert_array_equal(got.astype(kind), want.astype(kind))


def small_group(axes=None, **settings):
    values = {
        "num_experts": 16,
        "hidden_size": 24,
        "max_tokens_per_rank": 9,
        "max_token_dtype": "float32",
    }
    return NativeGroup(axes or {"ep": 8}, **(values | settings))


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("alignment", [1, 8, 16, 128])
def test_random_routing(top_k, alignment):
    rng = np.random.default_rng(top_k * 1000 + alignment)
    with small_group(top_k=top_k, alignment=alignment) as group:
        check_all(group, random_idx(rng, 8, 9, top_k, 16))


@pytest.mark.parametrize("capacity_cut", [0, 1, 17])
@pytest.mark.parametrize(("alignment", "row_alignment"), [(1, None), (8, None), (8, 1), (8, 2)])
def test_rows_over_capacity_are_dropped(alignment, row_alignment, capacity_cut):
    """Slabs follow the layer's alignment, however densely saved rows are packed."""
    rng = np.random.default_rng(capacity_cut)
    idx = random_idx(rng, 8, 9, 4, 16, unused=0)
    full = routed_of(idx, 10_000, alignment).arrays["num_recv"].max()
    with small_group(top_k=4, alignment=alignment) as group:
        check_all(group, idx, capacity=int(full) - capacity_cut, row_alignment=row_alignment)


@pytest.mark.parametrize("row_alignment", [-1, 3, 16])
def test_a_row_alignment_that_does_not_divide_the_layers_is_refused(row_alignment):
    with (
        small_group(top_k=2, alignment=8) as group,
        pytest.raises(
            Exception, match=f"row_alignment must divide alignment=8, got {row_alignment}"
        ),
    ):
        check_all(group, np.zeros((8, 9, 2), np.int32), row_alignment=row_alignment)


def test_a_slab_smaller_than_one_block_keeps_nothing():
    rng = np.random.default_rng(1)
    with small_group(top_k=2, alignment=8) as group:
        check_all(group, random_idx(rng, 8, 9, 2, 16), capacity=5)


@pytest.mark.parametrize("expert", [0, 5, 15])
def test_all_tokens_to_one_expert(expert):
    with small_group(top_k=1, alignment=8, num_experts=16) as group:
        check_all(group, np.full((8, 9, 1), expert, np.int32))


def test_duplicate_and_unused_and_foreign_experts():
    rng = np.random.default_rng(3)
    idx = random_idx(rng, 8, 9, 4, 16, unused=0.3, duplicates=True)
    idx[0, 0], idx[1, 1], idx[2, :] = 16, -7, -1
    with small_group(top_k=4, capacity_factor=None, recv_capacity_per_rank=9 * 8 * 4) as group:
        check_all(group, idx)


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("precision", ["fast", "exact", "fp8"])
def test_few_tokens(tokens, precision):
    if tokens == 0 and jax.__version_info__[:2] == (0, 11):
        pytest.skip("XLA of JAX 0.11 crashes on shard_map of arrays without elements, ours or not")
    rng = np.random.default_rng(tokens)
    with small_group(
        max_tokens_per_rank=5, top_k=2, combine_precision=precision, max_token_dtype="bfloat16"
    ) as group:
        check_all(group, random_idx(rng, 8, tokens, 2, 16), ml_dtypes.bfloat16)


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_rank_alone(tokens):
    rng = np.random.default_rng(4)
    with small_group({"ep": 1}, top_k=3, alignment=8) as group:
        check_all(group, random_idx(rng, 1, tokens, 3, 16))


@pytest.mark.parametrize("axes", [{"dp": 2, "ep": 4}, {"dp": 2, "fsdp": 2, "ep": 2}])
def test_domains_do_not_mix(axes):
    rng = np.random.default_rng(5)
    with small_group(axes, top_k=3, alignment=8) as group:
        check_all(group, random_idx(rng, 8, 9, 3, 16))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("precision", ["fast", "exact", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_and_precisions(dtype, precision, weighted):
    rng = np.random.default_rng(6)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    with small_group(
        top_k=4, combine_precision=precision, max_token_dtype=dtype, hidden_size=1030
    ) as group:
        check_all(group, random_idx(rng, 8, 9, 4, 16), kind, weighted=weighted)


@pytest.fixture(params=native.ROW_OPS)
def row_ops(request):
    if not native.library().use_row_ops(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield
    native.library().use_row_ops("best")


@pytest.mark.usefixtures("row_ops")
@pytest.mark.parametrize("precision", ["fast", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_instruction_set_gives_the_same_bits(dtype, precision):
    rng = np.random.default_rng(13)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    with small_group(
        top_k=4, max_token_dtype=dtype, hidden_size=1030, combine_precision=precision
    ) as group:
        check_all(group, random_idx(rng, 8, 9, 4, 16), kind)


@pytest.mark.usefixtures("row_ops")
@pytest.mark.parametrize("precision", ["fast", "fp8"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_of_any_number_of_rows_keep_the_bits_of_special_values(dtype, weighted, precision):
    rng = np.random.default_rng(14)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    limits = ml_dtypes.finfo(kind)
    special = [0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, limits.max, -limits.max]
    special += [limits.smallest_subnormal, -limits.smallest_subnormal]
    top_k, hidden = 10, 70
    # Token t has t rows, so every number of rows is summed; most numbers have a separate loop.
    idx = np.tile(np.arange(top_k, dtype=np.int32), (1, top_k + 1, 1))
    idx = np.where(np.arange(top_k) < np.arange(top_k + 1)[:, None], idx, -1)
    with small_group(
        {"ep": 1},
        top_k=top_k,
        max_tokens_per_rank=11,
        max_token_dtype=dtype,
        hidden_size=hidden,
        combine_precision=precision,
    ) as group:
        rows = group.spec.recv_capacity_per_rank
        y = rng.choice(np.array(special, np.float64), (1, rows, hidden)).astype(kind)
        w = rng.choice(np.float32([1, -1, 0.5]), (1, rows)) if weighted else None
        run = group.sharded(lambda idx, y, w: group.combine(y, w, group.prepare(idx)))
        got = np.asarray(run(*jax.tree.map(group.put, (idx, y, w))))
    routed = routed_of(idx, rows)
    if dtype != "float16":  # fp32 sums flush subnormals to zero, like XLA's
        y = np.where(np.abs(y.astype(np.float32)) < limits.tiny, kind.type(0), y)
    with np.errstate(all="ignore"):
        want = reference.combine(routed, y, w, precision)
    numbers = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(~np.isnan(got.astype(np.float32)), numbers)
    bits = np.dtype(f"u{kind.itemsize}")
    np.testing.assert_array_equal(got.view(bits)[numbers], want.view(bits)[numbers])


@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_doubles(precision):
    rng = np.random.default_rng(7)
    with (
        jax.enable_x64(True),
        small_group(top_k=4, combine_precision=precision, max_token_dtype="float64") as group,
    ):
        check_all(group, random_idx(rng, 8, 9, 4, 16), np.float64)


@pytest.mark.parametrize("hidden", [1, 2, 3, 7, 513])
def test_odd_widths(hidden):
    rng = np.random.default_rng(hidden)
    with small_group(top_k=2, hidden_size=hidden, max_token_dtype="bfloat16") as group:
        check_all(group, random_idx(rng, 8, 9, 2, 16), ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_one_byte_rows_only_travel(dtype):
    rng = np.random.default_rng(8)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    idx = random_idx(rng, 8, 9, 2, 16)
    x = rng.integers(0, 255, (8, 9, 24), np.uint8).view(kind)
    with small_group(top_k=2, max_token_dtype=dtype) as group:
        run = group.sharded(lambda idx, x: group.dispatch(x, None, group.prepare(idx)))
        recv, weights = jax.tree.map(np.asarray, run(group.put(idx), group.put(x)))
    routed = routed_of(idx, group.spec.recv_capacity_per_rank)
    want, want_weights = reference.dispatch(routed, x.view(np.uint8), None)
    defined = routed.in_zone
    np.testing.assert_array_equal(recv.view(np.uint8)[defined], want[defined])
    np.testing.assert_array_equal(weights, want_weights)


def test_smaller_batches_run_in_a_larger_group():
    rng = np.random.default_rng(9)
    with small_group(top_k=2, alignment=8) as group:
        for tokens in (1, 9, 4):
            check_all(group, random_idx(rng, 8, tokens, 2, 16), seed=tokens)


def test_debug_mode_shows_undefined_rows_and_gives_the_same_results():
    rng = np.random.default_rng(10)
    idx = random_idx(rng, 8, 9, 2, 16)
    with small_group(top_k=2, alignment=8, debug=True, recv_capacity_per_rank=200) as group:
        check_all(group, idx)
        run = group.sharded(lambda idx, x: group.dispatch(x, None, group.prepare(idx))[0])
        recv = np.asarray(run(group.put(idx), group.put(np.zeros((8, 9, 24), np.float32))))
    slack = ~routed_of(idx, 200, 8).in_zone
    assert slack.any()
    assert np.isnan(recv[slack]).all()


def test_results_repeat_bit_for_bit_whatever_the_windows_hold():
    rng = np.random.default_rng(11)
    with small_group(top_k=4, alignment=8, max_token_dtype="bfloat16") as group:
        idx = random_idx(rng, 8, 9, 4, 16)
        for byte in (0x00, 0xFF, 0x5A):
            native.library().poison_staging(group.number, byte)
            check_all(group, idx, ml_dtypes.bfloat16)


def test_layers_of_a_stack_run_in_a_scan():
    rng = np.random.default_rng(12)
    idx = random_idx(rng, 8, 9, 2, 16, unused=0)
    x = floats(rng, np.float32, 8, 9, 24)
    with small_group(top_k=2, num_layers=5, combine_precision="exact") as group:

        def step(x, layer, idx):
            plan = group.prepare(idx, index=layer)
            recv, _ = group.dispatch(x, None, plan, index=layer)
            return group.combine(recv, None, plan, index=layer) * 0.5

        def program(idx, x):
            return jax.lax.scan(
                lambda x, layer: (step(x, layer, idx), None), x, jnp.arange(5, dtype=jnp.int32)
            )[0]

        out = np.asarray(group.sharded(program)(group.put(idx), group.put(x)))
    np.testing.assert_array_equal(out, x)  # every slot comes back: 2 x 0.5
