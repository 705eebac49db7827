"""Estimates a group's memory before the group exists."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import SMALL
from jax.sharding import AbstractMesh

import ep_runtime as ep
from ep_runtime import board, device_layout, specs, workspace
from ep_runtime_client.groups import estimate
from ep_runtime_server.groups import claims

_ROOT = Path(__file__).parents[2]
_MESH = AbstractMesh((2, 4), ("dp", "ep"))
_SLOTS: tuple[dict[str, Any], ...] = ({}, {"spare_experts": 16}, {"spare_experts": 0})
_ARGUMENTS = SMALL | {"outer_axes": "dp", "hidden_size": 64, "max_tokens_per_rank": 32}


def test_estimate_needs_no_session_and_counts_window_and_rows() -> None:
    found = ep.estimate_memory("g", _MESH, **_ARGUMENTS)
    spec = specs.make_group_spec(name="g", mesh_axes=(("dp", 2), ("ep", 4)), **_ARGUMENTS)
    assert found.staging_bytes_per_rank == board.window_bytes(spec)
    assert found.capacity_per_rank == spec.recv_capacity_per_rank
    assert found.dispatched_bytes_per_layer == found.capacity_per_rank * (64 * 2 + 4)


def test_estimate_of_xla_stages_nothing() -> None:
    found = ep.estimate_memory("g", _MESH, transport="xla", **_ARGUMENTS)
    assert found.staging_bytes_per_rank == 0


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (64, {"num_experts": 64}, r"ep_axis: .*nvlink.* at most 32 ranks .*, got 64"),
        (72, {"num_experts": 72, "transport": "nccl", "node_size": 36}, r"ep_axis: .* got 36"),
        (32, {"num_experts": 2080}, r"num_experts: .* at most 2048 experts .*, got 2080"),
        (4, {"max_top_k": 33, "num_experts": 64}, r"max_top_k: .* at most 32 .*, got 33"),
        (4, {"lanes": 1}, r"lanes must be at least 2 .*, got 1"),
    ],
)
def test_what_no_kernel_takes_is_refused_before_anything_is_made(
    ranks: int, changes: dict[str, Any], message: str
) -> None:
    arguments = {**_ARGUMENTS, "outer_axes": (), "transport": "nvlink", **changes}
    with pytest.raises(ep.InvalidArgumentError, match=message):
        ep.estimate_memory("g", AbstractMesh((ranks,), ("ep",)), **arguments)
    spec = specs.make_group_spec(name="g", mesh_axes=(("ep", ranks),), **arguments)
    with pytest.raises(ep.InvalidArgumentError, match=message):
        claims.check_new_spec(spec)


def test_limits_are_those_of_the_kernels() -> None:
    header = (_ROOT / "csrc/cuda/device/device_group.h").read_text()
    for name in ("MAX_RANKS", "MAX_TOP_K", "MAX_EXPERTS", "MAX_PREPARE_BLOCKS"):
        constant = "k" + name.title().replace("_", "")
        assert f"constexpr int {constant} = {getattr(device_layout, name)};" in header
    header = (_ROOT / "csrc/cuda/movement/copies/copy_experts.h").read_text()
    assert f"constexpr int kMaxSpare = {device_layout.MAX_SPARE};" in header


def test_a_block_call_takes_what_it_takes_whatever_the_alignment() -> None:
    arguments = {**_ARGUMENTS, "max_tokens_per_rank": 1000}
    found = [
        ep.estimate_memory("g", _MESH, mlp_dim=128, **{**arguments, "alignment": rows})
        for rows in (1, 128)
    ]
    small, large = ((x.saved_bytes_per_layer, x.workspace_bytes_per_device) for x in found)
    assert small == large
    assert found[0].capacity_per_rank < found[1].capacity_per_rank


def test_slots_for_copies_take_weights_and_bound_the_slab() -> None:
    arguments = {**_ARGUMENTS, "max_tokens_per_rank": 1024, "mlp_dim": 128}
    found = [ep.estimate_memory("g", _MESH, spare_experts=n, **arguments) for n in (0, 1, 2)]
    none, one, as_many_as_experts = found
    assert none.copies_bytes_per_device == 0
    assert one.workspace_bytes_per_device is None  # the composed body runs
    each = 3 * 64 * 128 * 4
    assert one.copies_bytes_per_device == (2 + 1 + 2 * 4) * each
    # Block calls store the slots in their workspaces.
    assert as_many_as_experts.copies_bytes_per_device == 0
    settings = {**_ARGUMENTS, "max_tokens_per_rank": 1024, "spare_experts": 2}
    spec = specs.make_group_spec(name="g", mesh_axes=(("dp", 2), ("ep", 4)), **settings)
    sizes = estimate.block_sizes(spec, 128, gated=True)
    assert sizes.experts == 2 + 2
    slots = 2 * 3 * 64 * 128 * 2
    without = dataclasses.replace(sizes, spare=0)
    rows = sizes.capacity
    assert workspace.forward_bytes(sizes, rows, 0) == slots + workspace.forward_bytes(
        without, rows, 0
    )
    largest = workspace.largest_bytes(sizes, rows)
    assert as_many_as_experts.workspace_bytes_per_device == largest
    assert none.dispatched_bytes_per_layer == one.dispatched_bytes_per_layer
    # A lane for 32 tokens of each rank has no room for a chunk of weights.
    few = ep.estimate_memory("g", _MESH, spare_experts=2, **arguments | {"max_tokens_per_rank": 32})
    assert few.workspace_bytes_per_device is None
    assert few.copies_bytes_per_device == (2 + 2 + 2 * 2 * 4) * each
    # No rank holds more than 1.03 even shares plus the padding of four zones.
    rows = as_many_as_experts.dispatched_bytes_per_layer // (64 * 2 + 4)
    assert 2 * 1024 * 1.03 < rows < 2 * 1024 * 1.03 + 5 * 8
    assert as_many_as_experts.plan_bytes_per_layer < none.plan_bytes_per_layer


def test_auto_counts_the_slots_that_gpus_get() -> None:
    wide = {**_ARGUMENTS, "max_tokens_per_rank": 8192, "num_experts": 64, "max_top_k": 8}
    estimated = functools.partial(ep.estimate_memory, "g", _MESH, mlp_dim=128, **wide)
    by_default, slots, none = (estimated(transport="nvlink", **n) for n in _SLOTS)
    assert by_default == slots
    assert by_default.workspace_bytes_per_device != none.workspace_bytes_per_device
    # Only block calls spread rows, so other calls' slabs have room for the worst case.
    assert slots.dispatched_bytes_per_layer == none.dispatched_bytes_per_layer
    unknown = estimated()
    assert unknown.workspace_bytes_per_device == by_default.workspace_bytes_per_device
    assert unknown.saved_bytes_per_layer == by_default.saved_bytes_per_layer
    assert unknown.plan_bytes_per_layer == none.plan_bytes_per_layer
    assert unknown.copies_bytes_per_device == 0
    # These recipes have no block calls.
    slots, none = (
        estimated(transport="nvlink", recipe=ep.recipes.MXFP8(), **n) for n in _SLOTS[1:]
    )
    assert slots == dataclasses.replace(none, staging_bytes_per_rank=slots.staging_bytes_per_rank)


def _prepared_bytes(layer: Any, ranks: int) -> int:
    """Returns bytes of the plan's arrays on all ranks, with _ARGUMENTS's tokens and top_k."""
    topk_idx = jax.ShapeDtypeStruct((ranks * 32, 2), jnp.int32)
    plan = jax.eval_shape(lambda idx: ep.prepare(layer, idx), topk_idx)
    arrays = jax.tree.leaves(plan.arrays)
    return sum(array.size * array.dtype.itemsize for array in arrays)


def test_a_plan_takes_what_prepare_returns(mesh: Any) -> None:
    with ep.connect("none", job="tests") as session:
        group = session.create_group("g", mesh, **_ARGUMENTS)
        prepared = _prepared_bytes(group.register_layer("a", top_k=2), 8)
    assert prepared == 8 * ep.estimate_memory("g", mesh, **_ARGUMENTS).plan_bytes_per_layer


@pytest.mark.parametrize("transport", ["memfd", "memfd/2", "memfd/1"])
def test_a_plan_takes_what_prepare_returns_between_nodes_too(
    make_group: Any, transport: str
) -> None:
    group = make_group(**{**_ARGUMENTS, "outer_axes": ()}, axes={"ep": 4}, transport=transport)
    prepared = _prepared_bytes(group.register_layer("a", top_k=2), 4)
    assert prepared == 4 * estimate.of_spec(group.spec).plan_bytes_per_layer


def test_between_nodes_rows_that_cross_are_counted() -> None:
    arguments = {**_ARGUMENTS, "max_tokens_per_rank": 8192, "num_experts": 64, "max_top_k": 8}

    def of(node_size: int, **more: Any) -> ep.MemoryEstimate:
        said = {"transport": "nccl", "node_size": node_size, "mlp_dim": 128}
        return ep.estimate_memory("g", _MESH, **said, **arguments, **more)

    def workspace_of(node_size: int, **more: Any) -> int:
        found = of(node_size, **more).workspace_bytes_per_device
        assert found is not None
        mesh_axes = (("dp", 2), ("ep", 4))
        spec = specs.make_group_spec(
            name="g",
            mesh_axes=mesh_axes,
            transport="nccl",
            node_size=node_size,
            **arguments,
            **more,
        )
        block = workspace.of_block(estimate.block_sizes(spec, 128, gated=True))
        return found - block.backward_bytes

    row = 64 * 2
    assert workspace_of(4) == 0
    assert workspace_of(2) == 2 * 8192 * 3 * row  # tokens, their gradients, sums
    assert workspace_of(1) == 4 * 8192 * 3 * row
    assert workspace_of(1, combine_precision="exact") == 4 * 8192 * 4 * row
    assert of(1).staging_bytes_per_rank < of(2).staging_bytes_per_rank
    with pytest.raises(ep.InvalidArgumentError, match="node_size must be 0 or divide the ep size"):
        of(3)


def test_between_nodes_rows_are_counted_in_8_bits_where_they_cross_so() -> None:
    """With tensor scales rows cross wide; with blocks' scales no node quantizes them again."""
    wide = {**_ARGUMENTS, "hidden_size": 512, "max_tokens_per_rank": 8192, "num_experts": 64}

    def beside(node_size: int, scaling: workspace.Scaling, recipe: Any) -> int:
        of = {**wide, "transport": "nccl", "node_size": node_size}
        spec = specs.make_group_spec(name="g", mesh_axes=(("dp", 2), ("ep", 4)), **of)
        sizes = estimate.block_sizes(spec, 512, gated=True, scaling=scaling)
        found = ep.estimate_memory("g", _MESH, mlp_dim=512, recipe=recipe, **of)
        assert found.workspace_bytes_per_device is not None
        alone = dataclasses.replace(sizes, nodes=1)
        saved = workspace.backward_bytes(alone, 1024) - workspace.backward_bytes(sizes, 1024)
        packed = sizes.tokens * (512 + 16) if scaling == "block" else 0
        assert saved == (packed if node_size < 4 else 0)
        return found.workspace_bytes_per_device - workspace.of_block(sizes).backward_bytes

    tensor, block = ep.recipes.TensorScaling(), ep.recipes.BlockScaling()
    assert beside(4, "block", block) == 0
    assert beside(2, "block", block) == 2 * 8192 * (2 * (512 + 16) + 1024)
    assert beside(2, "tensor", tensor) == 2 * 8192 * 3 * 1024


@pytest.mark.parametrize(
    ("tokens", "recipe", "more", "chunks"),
    [
        (131072, None, {}, 8),
        (32768, None, {}, 4),
        (32768 + 2, None, {}, 2),
        (16384, None, {}, 2),
        (4096, None, {}, 1),
        (16384, None, {"hidden_size": 2048}, 4),
        (16384 - 4, None, {"hidden_size": 2048}, 2),  # 2,047 rows of an expert in four chunks
        (32768, None, {"hidden_size": 128}, 1),
        (32768, ep.recipes.BlockScaling(), {"hidden_size": 512}, 2),
        (32768, ep.recipes.TensorScaling(), {}, 1),
        # Adding up gradients of many weights takes longer than the network that it hides.
        (32768, None, {"mlp_dim": 16384}, 2),
        (32768, None, {"mlp_dim": 65536}, 1),
        (32768, None, {"on_overflow": "error"}, 1),
    ],
)
def test_between_nodes_chunks_share_a_workspace_and_add_f32_gradients(
    tokens: int, recipe: Any, more: dict[str, Any], chunks: int
) -> None:
    arguments = {"hidden_size": 1024, "num_experts": 16, "max_top_k": 4, "transport": "nccl"}
    arguments |= {"mlp_dim": 128, "recipe": recipe, "max_tokens_per_rank": tokens, **more}
    mesh = AbstractMesh((2,), ("ep",))
    found = ep.estimate_memory("g", mesh, ep_axis="ep", node_size=1, **arguments)
    mlp_dim = arguments.pop("mlp_dim")
    del arguments["recipe"]
    spec = specs.make_group_spec(
        name="g", mesh_axes=(("ep", 2),), ep_axis="ep", node_size=1, **arguments
    )
    scaling = estimate._scaling_of(recipe)
    sizes = estimate.block_sizes(spec, mlp_dim, gated=True, scaling=scaling or "none")
    block = workspace.of_block(dataclasses.replace(sizes, tokens=sizes.tokens // chunks))
    assert found.saved_bytes_per_layer == chunks * block.kept_bytes
    row = sizes.packed_bytes or 2 * spec.hidden_size
    crossing = 2 * tokens * (2 * row * min(2, chunks) // chunks + 2 * spec.hidden_size)
    added = 4 * 8 * spec.hidden_size * 3 * mlp_dim if chunks > 1 else 0
    assert found.workspace_bytes_per_device == block.backward_bytes + crossing + added


@pytest.mark.parametrize(
    ("tokens", "hidden", "mlp_dim", "experts"),
    [(8192, 7168, 2048, 256), (4096, 7168, 2048, 64), (8192, 2048, 1024, 64)],
)
def test_memory_of_a_layer_grows_little_with_ranks(
    tokens: int, hidden: int, mlp_dim: int, experts: int
) -> None:
    sizes = {"num_experts": experts, "hidden_size": hidden, "max_tokens_per_rank": tokens}

    def held(ranks: int) -> int:
        found = ep.estimate_memory(
            "g",
            AbstractMesh((ranks,), ("ep",)),
            ep_axis="ep",
            transport="nvlink",
            mlp_dim=mlp_dim,
            max_top_k=8,
            **sizes,
        )
        block = (found.workspace_bytes_per_device or 0) + (found.saved_bytes_per_layer or 0)
        return found.staging_bytes_per_rank + found.plan_bytes_per_layer + block

    assert held(32) < 1.25 * held(4)


@pytest.mark.parametrize(("nodes", "gib"), [(4, 1.6), (16, 2.0), (72, 3.0)])
def test_windows_grow_little_with_nodes(nodes: int, gib: float) -> None:
    """4,096 tokens of 7,168 values a rank, nodes of 8. Room for all would take 3.1 to 55 GiB."""
    mesh = AbstractMesh((8 * nodes,), ("ep",))
    sizes = {"num_experts": 576 if nodes > 32 else 256, "hidden_size": 7168, "max_top_k": 8}
    sizes |= {"max_tokens_per_rank": 4096, "node_size": 8}
    found = ep.estimate_memory("g", mesh, ep_axis="ep", transport="nccl", **sizes)
    assert found.staging_bytes_per_rank < gib * 2**30


def test_lanes_have_room_for_all_rows_where_all_cross() -> None:
    """Three slots a node and more. Those plans have no counts of pairs, small calls' need none."""

    def of(nodes: int, transport: Any = "nccl") -> specs.GroupSpec:
        more = {"outer_axes": (), "num_experts": 8 * nodes, "max_top_k": 6, "transport": transport}
        return specs.make_group_spec(
            name="g", mesh_axes=(("ep", 8 * nodes),), node_size=8, **(_ARGUMENTS | more)
        )

    rows = 32 * 6 * 3 // 2
    assert [device_layout.lane_rows(of(nodes)) for nodes in (2, 3, 8)] == [7 * 2 * 32, rows, rows]
    assert device_layout.lane_rows(of(8, "memfd")) == 8 * 8 * 32
    columns = functools.partial(device_layout.count_columns, of(3))
    assert (columns(3 * 32), columns(40)) == (4 + 16 + 3 * 16, 4)
    assert device_layout.count_columns(of(2), 64) == 4


def test_a_plan_has_counts_of_all_pairs_where_lanes_hold_less_than_all_rows() -> None:
    def columns(ranks: int, tokens: int, transport: Any = "nvlink") -> int:
        spec = specs.make_group_spec(
            name="g",
            mesh_axes=(("ep", ranks),),
            **(_ARGUMENTS | {"outer_axes": (), "num_experts": 4 * ranks, "transport": transport}),
        )
        return device_layout.count_columns(spec, tokens)

    assert columns(8, 32) == 4 + 2 * 8
    assert columns(8, 18) == 4  # smaller calls fit
    assert columns(5, 32) == 4
    assert columns(8, 32, "memfd") == 4


# Bytes of an element of rows, if tokens have elements of at most that many bytes.
_ELEMENTS = {"bfloat16": 2, "float8_e4m3fn": 2, "float32": 4, "float64": 4}


@pytest.mark.parametrize("dtype", _ELEMENTS)
def test_estimate_of_block_calls_is_of_the_workspace(dtype: str) -> None:
    wide = {**_ARGUMENTS, "max_tokens_per_rank": 8192, "num_experts": 64, "max_top_k": 8}
    wide |= {"max_token_dtype": dtype, "spare_experts": 0}
    spec = specs.make_group_spec(name="g", mesh_axes=(("dp", 2), ("ep", 4)), **wide)
    sizes = estimate.block_sizes(spec, 128, gated=True)
    found = ep.estimate_memory("g", _MESH, mlp_dim=128, **wide)
    block = workspace.of_block(sizes)
    assert (sizes.tokens, sizes.top_k, sizes.ep_size, sizes.experts) == (8192, 8, 4, 16)
    assert sizes.element_bytes == _ELEMENTS[dtype]
    assert sizes.capacity == spec.recv_capacity_per_rank == found.capacity_per_rank
    assert found.workspace_bytes_per_device == block.backward_bytes > block.forward_bytes
    assert found.saved_bytes_per_layer == block.kept_rows * 256 * _ELEMENTS[dtype]
    # Rows follow the setting; saved rows follow their own.
    larger = ep.estimate_memory("g", _MESH, mlp_dim=128, workspace=3.0, keep="nothing", **wide)
    assert larger.workspace_bytes_per_device > 1.9 * found.workspace_bytes_per_device
    assert larger.saved_bytes_per_layer == 0
    plain = ep.estimate_memory("g", _MESH, mlp_dim=128, gated=False, keep_factor=0.5, **wide)
    assert plain.saved_bytes_per_layer < found.saved_bytes_per_layer / 4


def test_estimate_of_recipes_is_of_their_workspace() -> None:
    wide = {**_ARGUMENTS, "max_token_dtype": "float32"}
    spec = specs.make_group_spec(name="g", mesh_axes=(("dp", 2), ("ep", 4)), **wide)
    recipes: dict[workspace.Scaling, Any] = {
        "tensor": ep.recipes.TensorScaling(),
        "block": (ep.recipes.BlockScaling(), ep.recipes.BlockScaling()),
        "none": ep.recipes.BF16(),
    }
    for scaling, recipe in recipes.items():
        sizes = estimate.block_sizes(spec, 128, gated=True, scaling=scaling)
        assert sizes.element_bytes == (4 if scaling == "none" else 2)
        block = workspace.of_block(sizes)
        found = ep.estimate_memory("g", _MESH, mlp_dim=128, recipe=recipe, **wide)
        largest = max(block.forward_bytes, block.backward_bytes)
        assert found.workspace_bytes_per_device == largest


_MX = {"mlp_dim": 128, "recipe": ep.recipes.MXFP8()}


@pytest.mark.parametrize("said", [{}, {"mlp_dim": 128, "transport": "xla"}, _MX])
def test_no_workspace_where_there_are_no_block_calls(said: dict[str, Any]) -> None:
    found = ep.estimate_memory("g", _MESH, **said, **_ARGUMENTS)
    assert (found.workspace_bytes_per_device, found.saved_bytes_per_layer) == (None, None)


def test_estimate_refuses_what_block_calls_refuse() -> None:
    for said, words in (
        ({"mlp_dim": 0}, "mlp_dim must be at least 1, got 0"),
        ({"mlp_dim": 8, "workspace": 5000}, "workspace=5000 bytes hold no block call"),
        ({"keep": "all"}, "keep must be one of .* got 'all'"),
    ):
        with pytest.raises(ep.InvalidArgumentError, match=words):
            ep.estimate_memory("g", _MESH, **said, **_ARGUMENTS)


def test_estimate_refuses_what_create_group_refuses() -> None:
    with pytest.raises(ep.InvalidArgumentError, match="num_experts=9 does not divide.*4"):
        ep.estimate_memory("g", _MESH, **{**_ARGUMENTS, "num_experts": 9})


_BLOCK = {"transport": "nvlink", "max_tokens_per_rank": 2048}


@pytest.mark.parametrize(
    ("changes", "memory", "warned", "said"),
    [
        ({}, 1 << 40, False, "capacity 256 rows per rank"),
        ({}, 1 << 16, True, "make the one smaller, capacity_factor the other"),
        (_BLOCK, 30 << 20, False, "per layer and rank without block calls"),
        (_BLOCK, 1 << 20, True, "make it smaller"),
    ],
)
def test_the_report_warns_above_a_tenth_of_the_memory(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    memory: int,
    warned: bool,
    said: str,
) -> None:
    """Counts windows and a slab, or windows alone if block calls run."""
    arguments = {**_ARGUMENTS, **changes}
    spec = specs.make_group_spec(name="g", mesh_axes=(("dp", 2), ("ep", 4)), **arguments)
    sizes = estimate.of_spec(spec)
    used = sizes.staging_bytes_per_rank, sizes.dispatched_bytes_per_layer
    assert not changes or used[0] < 0.1 * (30 << 20) < sum(used)
    monkeypatch.setattr(estimate, "device_memory_bytes", lambda device, count: memory)
    with caplog.at_level(logging.INFO, "ep_runtime"):
        estimate.report(spec, None, 8)
    lines = [record for record in caplog.records if record.name == "ep_runtime"]
    assert [line.levelname for line in lines[1:]] == ["WARNING"] * warned
    text = lines[-1].getMessage()
    assert text.endswith(f"fewer max_tokens_per_rank or lanes {said}") if warned else said in text


def test_a_factor_makes_slabs_smaller_and_lanes_windows() -> None:
    whole = ep.estimate_memory("g", _MESH, **_ARGUMENTS)
    less = ep.estimate_memory("g", _MESH, capacity_factor=1.0, **_ARGUMENTS)
    assert less.staging_bytes_per_rank == whole.staging_bytes_per_rank
    assert less.dispatched_bytes_per_layer < whole.dispatched_bytes_per_layer
    one = ep.estimate_memory("g", _MESH, lanes=1, **_ARGUMENTS)
    assert one.staging_bytes_per_rank == whole.staging_bytes_per_rank / 2
