"""Copies of experts: compares the plan with plain Python, and `ep.moe` with and without copies."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from dense_moe import Dense, graded, worst_error
from fakes import MakeGroup
from moe_layouts import EXPERTS, LAYOUTS, TOKENS, TOP_K, make_params, open_group, place

import ep_runtime as ep
from ep_runtime import board, board_records, device_layout, layout
from ep_runtime_client.moe import bodies, copies
from ep_runtime_client.moe.api import moe
from ep_runtime_client.ops.movement.prepare import call_of_plan
from ep_runtime_client.ops.tracing import scopes
from ep_runtime_client.programs.explain import explain_text

Ints = npt.NDArray[np.int64]
SPARE = 2


def reference(demand: Ints, ranks: int, spare: int) -> tuple[Ints, Ints]:
    """Returns (expert, rows) [N, S] of each slot for a copy; -1 and 0 for unused slots."""
    own = demand.reshape(ranks, -1)
    load = own.sum(1)
    even = -(-int(load.sum()) // ranks)
    above = even + 3 * even // 100
    givers = sorted((r for r in range(ranks) if load[r] > above), key=lambda r: -load[r])
    takers = sorted((r for r in range(ranks) if load[r] < even), key=lambda r: load[r])
    left = {giver: int(load[giver]) - even for giver in givers}
    total, at = sum(left.values()), 0
    grants: list[tuple[int, int, int]] = []  # taker, giver, rows
    for taker in takers:
        rows = min(even - int(load[taker]), total)
        if rows == 0:
            break
        grants.append((taker, givers[at], rows))
        left[givers[at]] -= rows
        total -= rows
        while left[givers[at]] <= 0 and at + 1 < len(givers):
            missing = -left[givers[at]]
            if missing:
                grants.append((givers[at], givers[at + 1], missing))
                left[givers[at + 1]] -= missing
            at += 1
    pieces: dict[int, list[tuple[int, int]]] = {}
    short: set[int] = set()  # givers that gave too little, for lack of slots
    for giver in givers:
        pile = sorted(enumerate(own[giver].tolist()), key=lambda each: -each[1])
        for taker, _, rows in (grant for grant in grants if grant[1] == giver):
            found, wanted = [], rows
            while wanted:
                expert, here = pile.pop(0)
                part = min(here, wanted)
                wanted -= part
                if here > part:
                    pile.insert(0, (expert, here - part))
                found.append((giver * own.shape[1] + expert, part))
            pieces[taker] = sorted(found, key=lambda each: -each[1])[:spare]
            if taker in short:  # it still has rows to give away
                pieces[taker] = []
            if sum(part for _, part in pieces[taker]) < rows:
                short.add(giver)
    expert, rows_of = np.full((ranks, spare), -1), np.zeros((ranks, spare), np.int64)
    for taker, found in pieces.items():
        for slot, (which, part) in enumerate(found):
            expert[taker, slot], rows_of[taker, slot] = which, part
    return expert, rows_of


def workloads(ranks: int, experts: int) -> dict[str, Ints]:
    """Returns the rows of each expert, by the name of a routing."""
    rng = np.random.default_rng(ranks)
    local = experts // ranks

    def drawn(odds: Any) -> Ints:
        return rng.multinomial(ranks * 2048, odds / odds.sum())

    def first(count: int, times: float) -> Any:
        odds = np.ones(experts)
        odds[: count * local] *= times
        return odds

    order = np.arange(1.0, experts + 1)
    return {
        "even": drawn(first(0, 1)),
        "zipf 0.5": drawn(rng.permutation(order**-0.5)),
        "zipf 1": drawn(rng.permutation(order**-1)),
        "zipf 1 in order": drawn(order**-1),
        "all to one expert": np.eye(experts, dtype=np.int64)[experts // 2] * ranks * 2048,
        "all to one rank": drawn(first(1, 1e9)),
        "half to two ranks": drawn(first(2, max(ranks / 2 - 1, 1))),
        "20 to 1": drawn(first(1, 20)),
        "one rank empty": drawn(first(1, 0)),
        "one rank equally full": np.repeat(np.arange(ranks) == 1, local) * 4096,
        "half of the ranks equally full": np.repeat(np.arange(ranks) <= ranks // 2, local) * 64,
        "unused slots": drawn(rng.random(experts) ** 4) // 3,
        "nothing": np.zeros(experts, np.int64),
        "one row": np.eye(experts, dtype=np.int64)[-1],
    }


def rows_after(demand: Ints, expert: Ints, rows: Ints) -> Ints:
    """Returns each rank's rows, given the expert and the rows of each slot, [N, S]."""
    away = np.zeros_like(demand)
    np.add.at(away, expert[rows > 0], rows[rows > 0])
    assert (away <= demand).all()
    return (demand - away).reshape(len(rows), -1).sum(1) + rows.sum(1)


BALANCED = jax.jit(copies.balanced, static_argnums=(1, 2))


@pytest.mark.parametrize(("ranks", "spare"), [(2, 1), (2, 32), (4, 20), (8, 2), (8, 8), (32, 2)])
def test_the_plan_is_the_plain_one_and_evens_out_what_slots_allow(ranks: int, spare: int) -> None:
    local = 64 // ranks
    for name, demand in workloads(ranks, 64).items():
        expert, rows = reference(demand, ranks, spare)
        found = BALANCED(jnp.asarray(demand, jnp.int32), ranks, spare)
        np.testing.assert_array_equal(found.rows, rows, err_msg=name)
        np.testing.assert_array_equal(np.where(rows > 0, found.expert, -1), expert, err_msg=name)
        load = demand.reshape(ranks, -1).sum(1)
        even = -(-demand.sum() // ranks)
        after = rows_after(demand, expert, rows)
        np.testing.assert_array_less(after, np.maximum(load, even) + 1, err_msg=name)
        if spare >= local:
            assert after.max() <= even + 3 * even // 100, name
        if load.max() <= even + 3 * even // 100:
            assert not rows.any(), name


def test_rows_stay_at_home_first_and_then_go_to_copies_by_position() -> None:
    for ranks, spare in ((2, 32), (8, 2)):
        place_of = jax.jit(copies.physical_experts)
        for name, demand in workloads(ranks, 64).items():
            expert, rows = reference(demand, ranks, spare)
            made = copies.Copies(
                *(jnp.asarray(x, jnp.int32) for x in (np.maximum(expert, 0), rows))
            )
            which = np.repeat(np.arange(64), demand)
            position = np.concatenate([np.arange(count) for count in demand])
            picked = np.linspace(0, max(len(which) - 1, 0), 997).astype(int)[: len(which)]
            slots = (jnp.asarray(x[picked], jnp.int32) for x in (which, position))
            found = place_of(*slots, jnp.asarray(demand, jnp.int32), made)
            np.testing.assert_array_equal(
                found,
                [
                    _home_or_copy(e, p, demand, expert, rows)
                    for e, p in zip(which[picked], position[picked], strict=True)
                ],
                err_msg=name,
            )


def _home_or_copy(which: int, position: int, demand: Ints, expert: Ints, rows: Ints) -> int:
    """Finds the physical expert of one row by counting slot by slot."""
    ranks, spare = rows.shape
    local = len(demand) // ranks
    places = [
        (rank, slot) for rank, slot in np.ndindex(ranks, spare) if expert[rank, slot] == which
    ]
    end = demand[which] - sum(rows[place] for place in places)
    if position < end:
        return int(which // local * (local + spare) + which % local)
    for rank, slot in places:
        end += rows[rank, slot]
        if position < end:
            return int(rank * (local + spare) + local + slot)
    raise AssertionError((which, position))


SIGMOID = ep.Router("sigmoid")
# Most tokens choose experts of the first rank.
BIAS = np.asarray([0.5, 0.4, 0.1, 0, 0, 0, 0.1, 0], np.float32)
SKEWED: dict[str, Any] = {"router": SIGMOID, "expert_bias": jnp.asarray(BIAS)}
DENSE = Dense(TOP_K, router=SIGMOID, expert_bias=BIAS)


def skewed_idx(slabs: int) -> jax.Array:
    """Draws topk_idx [T, K], of which a tenth is unused."""
    rng = np.random.default_rng(1)
    odds = 1.0 / np.arange(1, EXPERTS + 1) ** 2
    rows = (rng.choice(EXPERTS, TOP_K, False, odds / odds.sum()) for _ in range(8 * slabs))
    idx = np.stack([*rows]).astype(np.int32)
    return jnp.asarray(np.where(rng.random(idx.shape) < 0.1, -1, idx))


@pytest.mark.parametrize("capacity", [None, 24])
def test_every_rank_has_the_plan_of_what_is_kept(
    make_group: MakeGroup, transport: str, capacity: int | None
) -> None:
    """Each domain has its own plan, and its copies hold all rows."""
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "max_top_k": TOP_K, "spare_experts": SPARE}
    axes = {"axes": {"dp": 2, "ep": 4}, "outer_axes": "dp"}
    group = make_group(transport=transport, **sizes, **axes)
    layer, idx = group.register_layer("moe", top_k=TOP_K), skewed_idx(8)
    plan = ep.prepare(layer, idx, capacity=capacity)
    call = call_of_plan(layer, group.mesh, plan)
    call, arrays, _, experts = copies.spread(call, jnp.zeros(1, jnp.int32), idx)
    kept = np.asarray(plan.arrays.kept).reshape(2, 4 * 2)
    physical = np.asarray(arrays.kept).reshape(2, 4, 2 + SPARE)
    assert call.capacity == layout.spread_capacity(
        plan.capacity, slots=16, experts=2, spare_experts=SPARE, alignment=8
    )
    for domain, found in enumerate(np.asarray(experts).reshape(2, 4, 4, SPARE)):
        expert, rows = reference(kept[domain].astype(int), 4, SPARE)
        assert rows.any()
        for rank in found:
            np.testing.assert_array_equal(rank, expert)
        np.testing.assert_array_equal(physical[domain, :, 2:], rows)
    # The used slots and the number of rows do not change.
    np.testing.assert_array_equal(arrays.dst_row >= 0, plan.arrays.dst_row >= 0)
    np.testing.assert_array_equal(arrays.num_recv, plan.arrays.num_recv)
    assert physical.sum() == kept.sum()
    assert (capacity is None) == bool(
        (np.asarray(plan.arrays.dst_row) >= 0).sum() == (idx >= 0).sum()
    )


def opened(make_group: MakeGroup, name: str, **settings: Any) -> Any:
    """Returns (group, layer, x, parameters) of a layout, by default with slots for copies."""
    layout = LAYOUTS[name]
    group = open_group(make_group, layout, **({"spare_experts": SPARE} | settings))
    layer = group.register_layer("moe", top_k=TOP_K)
    return group, layer, *place(group, layout, make_params(layer, settings.get("hidden_size", 8)))


def test_values_gradients_and_statistics_are_those_without_copies(make_group: MakeGroup) -> None:
    """Bits, statistics and drops are the same on every transport and in every run. The board counts
    the rows that ranks compute.
    """
    results, computed = [], []
    for settings in ({"spare_experts": 0}, {}, {"transport": "xla"}):
        group, layer, x, params = opened(make_group, "dp2 ep4", **settings)
        mask = jnp.arange(TOKENS) % 5 > 0

        def run(x: Any, params: Any, layer: Any = layer, mask: Any = mask) -> Any:
            options = {"token_mask": mask, "capacity": 24, "return_stats": True}
            found: list[Any] = []

            def block(x: Any, params: Any) -> Any:
                y, aux, stats = moe(layer, x, params, **SKEWED, **options)
                found.append((stats.tokens_per_expert, stats.dropped, stats.num_recv))
                return y, aux

            return graded(block)(x, params), found[0]

        step = jax.jit(run)
        results.append(jax.device_get(step(x, params)))
        for left, right in zip(*map(jax.tree.leaves, (results[-1], step(x, params))), strict=True):
            np.testing.assert_array_equal(left, right)
        if group.board is not None:
            ranks = board_records.read_ranks(group.board, board.board_layout(group.spec))
            computed.append(np.array([rank.rows for rank in ranks]))
    assert computed[0].sum() == computed[1].sum()
    assert computed[0].max() > 1.5 * computed[0].mean() > computed[1].max()
    (without, counts), *others = results
    assert counts[1] > 0
    for values, stats in others:
        assert worst_error(values, without) < 1e-6
        jax.tree.map(np.testing.assert_array_equal, stats, counts)
    jax.tree.map(np.testing.assert_array_equal, *others)


def test_a_call_of_few_rows_is_that_of_a_group_without_slots(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels copy experts. One more token of each rank has enough rows."""
    monkeypatch.setattr(device_layout, "block_copies", lambda spec: spec.spare_experts > 0)
    monkeypatch.setattr(device_layout, "LEAST_ROWS_COPIED", 4)
    found = []
    for spare, tokens in ((0, 3), (SPARE, 3), (SPARE, 4)):
        given = {"spare_experts": spare, "transport": "memfd"}
        _, layer, x, params = opened(make_group, "dp2 ep4", **given)
        x = jax.device_put(x[: 8 * tokens], x.sharding)
        with bodies.forced(bodies.COMPOSED):
            run = jax.jit(graded(functools.partial(moe, layer, **SKEWED)))
            program = run.lower(x, params).compile()
        (path,) = explain_text(program.as_text()).paths
        spreads = tokens == 4
        assert (path.spare_experts == SPARE) == (scopes.COPIED in program.as_text()) == spreads
        found.append(jax.device_get(program(x, params)))
    jax.tree.map(np.testing.assert_array_equal, *found[:2])


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("fsdp2 ep2 tp2", "rule"),
        ("fsdp2 ep2 tp2", "manual"),
        ("experts on ep and fsdp", "shard_map"),
    ],
)
def test_weights_in_any_layout(make_group: MakeGroup, name: str, way: str) -> None:
    partitioning = "auto" if way == "manual" else way
    group, layer, x, params = opened(make_group, name, partitioning=partitioning)
    layout = LAYOUTS[name]
    known = None if way == "rule" else layout.specs
    block = functools.partial(moe, layer, aux_loss_coeff=0.1, params_spec=known, **SKEWED)
    if way == "manual":
        specs = {"in_specs": (layout.tokens, layout.specs), "out_specs": (layout.tokens, jax.P())}
        block = jax.shard_map(block, mesh=group.mesh, **specs)
    program = jax.jit(graded(block)).lower(x, params).compile()
    assert worst_error(program(x, params), DENSE.graded(x, params)) < 2e-5
    seen = explain_text(program.as_text())
    assert [str(path) for path in seen.paths] == [
        "ep.moe of 'moe': composed: kernels are for GPUs, over windows and NCCL; "
        f"{SPARE} slots of a rank for copies"
    ]
    moved = [one for one in seen.collectives if one.kind == "all-to-all"]
    assert {one.op for one in moved} == {"block", "block_bwd"}
    assert {one.cause for one in moved} == {"own"}


# (recipe, worst error): e4m3 has 3 fraction bits, and some operands have 2.
RECIPES = {
    "tensor": (ep.recipes.TensorScaling(), 0.2),
    "block": (ep.recipes.BlockScaling(), 0.2),
    "mxfp8": (ep.recipes.MXFP8(), 0.2),
    "delayed": (ep.recipes.TensorScaling(delayed=True), 0.2),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_stay_near_f64_and_states_are_those_without_copies(
    make_group: MakeGroup, name: str
) -> None:
    recipe, tolerance = RECIPES[name]
    states = []
    for spare in (0, SPARE) if name == "delayed" else (SPARE,):
        sizes = {"alignment": 32, "hidden_size": 32, "spare_experts": spare}
        _, layer, x, params = opened(make_group, "fsdp2 ep4", **sizes)
        state = recipe.init_state(EXPERTS) if name == "delayed" else None

        def block(x: Any, params: Any, layer: Any = layer, state: Any = state) -> Any:
            made = moe(layer, x, params, aux_loss_coeff=0.1, recipe=recipe, state=state, **SKEWED)
            return made[:2], made[2:]

        def run(x: Any, params: Any, block: Any = block) -> Any:
            return graded(lambda x, p: block(x, p)[0])(x, params), block(x, params)[1]

        got, after = jax.jit(run)(x, params)
        states.append(after)
        if name != "delayed":
            assert worst_error(got, DENSE.graded(x, params)) < tolerance
    if name == "delayed":
        for left, right in zip(*map(jax.tree.leaves, states), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6)


def test_a_scanned_stack_under_remat_with_donated_weights(make_group: MakeGroup) -> None:
    found = []
    for spare in (0, SPARE):
        group, layer, x, params = opened(make_group, "fsdp2 ep4", spare_experts=spare)
        stack = group.register_layer_stack("blocks", 2, top_k=TOP_K)
        layers = jax.tree.map(lambda w: jnp.stack([w, w + 0.01]), params)

        def run(x: Any, layers: Any, stack: Any = stack) -> Any:
            def layer_of(x: Any, given: Any) -> Any:
                return x + moe(stack[given[0]], x, given[1], **SKEWED)[0], None

            body = jax.checkpoint(layer_of, policy=ep.remat_policy(save=("ep_plan",)))
            return jnp.sin(jax.lax.scan(body, x, (jnp.arange(2), layers))[0]).sum()

        step = jax.jit(jax.value_and_grad(run, argnums=(0, 1)), donate_argnums=1)
        found.append(jax.device_get(step(x, layers)))
    assert worst_error(found[1], found[0]) < 1e-5
