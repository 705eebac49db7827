"""Programs run each custom call once, may be exported with it, and profiles show its op."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import custom_calls
import fakes
import jax
import jax.numpy as jnp
import pytest
from block_ways import Ways, chunked
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime import device_layout
from ep_runtime_client import moe, ops
from ep_runtime_client.moe.bodies import cuda as block
from ep_runtime_client.ops.gemm import kernels_8, kernels_16, kernels_32
from ep_runtime_client.ops.kernels import ffi, serve
from ep_runtime_client.ops.tracing import scopes
from ep_runtime_client.ops.transports import windows as transports_windows

COUNT, TOKENS, HIDDEN, EXPERTS, TOP_K = 3, 16, 32, 8, 2
RECIPES = (None, ep.recipes.TensorScaling(), ep.recipes.BlockScaling(), ep.recipes.MXFP8())
# Calls that XLA need not hold: only gradients of weights depend on them, or other calls take their
# results, or they write to a stack for the backward pass.
FREE = {
    kernels_16.TARGETS[1],
    *(target for target in kernels_8.TARGETS if "_dw_" in target),
    *kernels_32.TARGETS,
    kernels_8.TRANSPOSE_ROWS,
    "ep_quantize_weights_v1",
}


def scanned(
    group: fakes.LocalGroup, recipe: Any = None, dtype: Any = jnp.float32, weights_at: Any = None
) -> Any:
    """Value and gradients of scanned blocks with remat, and shapes of the operands."""
    stack = group.register_layer_stack("moe", COUNT, top_k=TOP_K)

    def loss(x: Any, params: Any) -> Any:
        def step(x: Any, each: Any) -> Any:
            options = {"recipe": recipe, "weights_at": weights_at}
            return x + ep.moe(stack[each[0]], x, each[1], **options)[0], None

        kept = jax.checkpoint(step, policy=ep.remat_policy(("ep_plan", "ep_recv", "ep_wi")))
        return jax.lax.scan(kept, x, (jnp.arange(COUNT), params))[0].astype(jnp.float32).sum()

    def array(spec: PartitionSpec, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(group.mesh, spec))

    split = PartitionSpec(None, "ep")
    params = ep.MoEParams(
        array(PartitionSpec(), COUNT, HIDDEN, EXPERTS),
        array(split, COUNT, EXPERTS, HIDDEN, 2, HIDDEN),
        array(split, COUNT, EXPERTS, HIDDEN, HIDDEN),
    )
    x = array(PartitionSpec("ep"), TOKENS * group.mesh.size, HIDDEN)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), (x, params)


def make(make_group: fakes.MakeGroup, **settings: Any) -> fakes.LocalGroup:
    return make_group(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=TOP_K,
        alignment=32,
        **settings,
    )


def test_compiled_programs_run_every_call_as_often_as_it_was_traced(
    make_group: fakes.MakeGroup,
) -> None:
    """Each call is also in one of our scopes, by which profiles and `ep.explain` name it."""
    run, operands = scanned(make(make_group, axes={"ep": 4}, transport="memfd"))
    traced = run.trace(*operands)
    calls = custom_calls.traced(traced.jaxpr, "cpu")
    assert calls == dict.fromkeys(transports_windows.TARGETS, COUNT)
    text = traced.lower().compile().as_text()
    assert custom_calls.differences(calls, custom_calls.compiled(text)) == []
    assert custom_calls.without_scope(text) == []
    matmuls = [line for line in text.splitlines() if " dot(" in line]
    found = {scopes.innermost(line) for line in matmuls}
    assert {op for op, _ in found - {None}} >= {"block", "block_bwd", "router"}


@pytest.fixture
def _as_with_gpus(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    """Traces programs for GPUs as on a machine with GPUs."""
    for module in (ffi, transports_windows):
        monkeypatch.setattr(module, "ensure_registered", lambda platform="cpu": None)
    monkeypatch.setattr(ffi, "XLA_CLONES_CALLS", True)
    monkeypatch.setattr(serve, "available", lambda: True)
    monkeypatch.setattr(serve, "installed", lambda: True)


@pytest.mark.usefixtures("_as_with_gpus")
@pytest.mark.parametrize(
    ("recipe", "transport"), [*zip(RECIPES, ["nvlink", "nccl/2"] * 2, strict=True)], ids=repr
)
def test_calls_on_gpus_are_held_for_all_who_use_their_results(
    make_group: fakes.MakeGroup, ways: Ways, recipe: Any, transport: str
) -> None:
    """XLA of JAX 0.11 would run other calls twice; `gpu/tools/compile_ahead.py` counts them."""
    ways.body("composed")  # other bodies' calls are not held for all of their results
    group = make(make_group, axes={"ep": 4}, transport=transport)
    run, operands = scanned(group, recipe, jnp.bfloat16)
    jaxpr = run.trace(*operands).jaxpr
    calls = custom_calls.traced(jaxpr, "cuda")
    assert len(calls) > len(transports_windows.TARGETS)
    assert custom_calls.unheld(jaxpr, "cuda") <= FREE


@pytest.mark.usefixtures("_as_with_gpus")
@pytest.mark.parametrize(
    ("dtype", "precision", "taken"),
    [
        ("bfloat16", "highest", True),
        ("float16", "default", True),
        ("float32", "default", True),
        ("float32", "highest", False),
    ],
)
def test_gpus_that_map_windows_get_block_calls(
    make_group: fakes.MakeGroup, dtype: str, precision: str, taken: bool
) -> None:
    group = make(make_group, axes={"ep": 4}, transport="nvlink", max_token_dtype=dtype)
    run, operands = scanned(group, None, jnp.dtype(dtype))
    with jax.default_matmul_precision(precision):
        jaxpr = run.trace(*operands).jaxpr
    calls = custom_calls.traced(jaxpr, "cuda")
    moved = {"ep_dispatch_v1", "ep_combine_v1"}  # block calls do it themselves
    assert {*calls} & (moved | {*block.TARGETS}) == ({*block.TARGETS} if taken else moved)


@pytest.mark.usefixtures("_as_with_gpus")
def test_block_calls_copy_experts_themselves(
    make_group: fakes.MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_layout, "copied_chunks", lambda spec: 1)
    settings = {"transport": "nvlink", "max_token_dtype": "bfloat16", "spare_experts": EXPERTS // 4}
    run, operands = scanned(make(make_group, axes={"ep": 4}, **settings), None, jnp.bfloat16)
    jaxpr = run.trace(*operands).jaxpr
    calls = custom_calls.traced(jaxpr, "cuda")
    assert calls == dict.fromkeys((transports_windows.PREPARE, *block.TARGETS), COUNT)
    # Prepare plans the copies too.
    assert not {"all_gather", "sort"} & {each.primitive.name for each in equations(jaxpr.jaxpr)}


@pytest.mark.usefixtures("_as_with_gpus")
def test_block_calls_in_chunks_run_while_the_next_tokens_and_the_last_sums_cross(
    make_group: fakes.MakeGroup,
) -> None:
    """Four chunks forward and backward, with a plan for each. Only the first tokens and the last
    sums cross alone. The sums of weights' gradients lie in the memory of the chunk before."""
    group = make(make_group, axes={"ep": 2}, transport="nccl/1", partitioning="shard_map")
    run, operands = scanned(group, None, jnp.bfloat16)
    with chunked(4):
        jaxpr = run.trace(*operands).jaxpr
    calls = custom_calls.traced(jaxpr, "cuda")
    assert not {*calls} & {*block.TARGETS}
    assert {calls[name] for name in block.BESIDE} == {4 * COUNT}
    assert calls[transports_windows.PREPARE] == 8 * COUNT
    made = [x for x in equations(jaxpr.jaxpr) if x.params.get("target_name") == block.BESIDE[1]]
    pairs = [(each, *pair) for each in made for pair in each.params["input_output_aliases"] or ()]
    assert len(pairs) == 2 * 3
    for each, given, result in pairs:
        assert each.invars[given].aval.dtype == each.outvars[result].aval.dtype == jnp.float32
        assert each.invars[given].aval.shape == each.outvars[result].aval.shape


@pytest.mark.usefixtures("_as_with_gpus")
@pytest.mark.parametrize(("recipe", "copied"), [(None, True), (ep.recipes.MXFP8(), False)])
def test_calls_with_kernels_have_copies_by_default(
    make_group: fakes.MakeGroup, monkeypatch: pytest.MonkeyPatch, recipe: Any, copied: bool
) -> None:
    local = EXPERTS // 4
    monkeypatch.setattr(device_layout, "copied_chunks", lambda spec: spec.spare_experts)
    monkeypatch.setattr(device_layout, "LEAST_ROWS_COPIED", TOKENS * TOP_K // local)
    settings = {"transport": "nvlink", "max_token_dtype": "bfloat16"}
    group = make(make_group, axes={"ep": 4}, **settings)
    assert group.spec.spare_experts == local
    run, operands = scanned(group, recipe, jnp.bfloat16)
    made = [each for each in equations(run.trace(*operands).jaxpr.jaxpr) if _is_prepare(each)]
    assert [each.outvars[-1].aval.shape == (4, local) for each in made] == [copied]


def _is_prepare(equation: Any) -> bool:
    return bool(equation.params.get("target_name") == transports_windows.PREPARE)


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.usefixtures("_as_with_gpus")
@pytest.mark.parametrize("transport", ["nvlink", "nccl/1", "xla"])
@pytest.mark.parametrize(
    ("recipe", "weights_at"),
    [(None, "output"), (ep.recipes.TensorScaling(), "hidden"), (ep.recipes.MXFP8(), "output")],
    ids=repr,
)
def test_no_empty_array_crosses_a_shard_map(
    make_group: fakes.MakeGroup, transport: str, recipe: Any, weights_at: Any
) -> None:
    """An empty array would end the process in XLA's partitioner: `bound` in
    `ops/kernels/ffi.py`.
    """
    group = make(make_group, axes={"ep": 2}, transport=transport, partitioning="shard_map")
    run, operands = scanned(group, recipe, jnp.bfloat16, weights_at)
    found = list(equations(run.trace(*operands).jaxpr.jaxpr))
    maps = [each for each in found if each.primitive.name == "shard_map"]
    calls = [each for each in found if each.primitive.name == "ffi_call"]
    assert len(maps) >= 5
    assert any(0 in x.aval.shape for each in calls for x in each.invars)
    for each in maps:
        crossing = [x.aval for x in (*each.invars, *each.outvars) if 0 in x.aval.shape]
        assert not crossing, each.source_info


def test_a_call_too_many_or_too_few_is_found() -> None:
    """The module's text is written as XLA writes it."""
    call = 'f32[8]{0} custom-call(%p), custom_call_target="ep_move_v1"'
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    text = f"""
%body (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %once = {call}, metadata={{op_name="jit(f)/ep_dispatch/moe/ffi_call"}}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %first = {call}
  ROOT %loop = f32[8]{{0}} while(%first), body=%body, {trips}
}}
"""
    found = custom_calls.compiled(text)
    assert found == Counter({"ep_move_v1": 4})
    assert len(custom_calls.without_scope(text)) == 1
    for traced in (3, 5):
        before = Counter({"ep_move_v1": traced})
        told = custom_calls.differences(before, found)
        assert told == [f"ep_move_v1: {traced} traced, 4 compiled"]


FOLDERS = (*ops.__path__, *moe.__path__)
FILES = [path for folder in FOLDERS for path in Path(folder).rglob("*.py")]


def names() -> set[str]:
    return {check.is_custom_call() for check in ep.export_checks()} - {None}  # type: ignore[misc]


def test_a_call_that_is_declared_may_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names()
    monkeypatch.setattr(ffi, "_DECLARED", dict(ffi._DECLARED))
    assert ffi.targets("ep_new_v1", "ep_newer_v1") == ("ep_new_v1", "ep_newer_v1")
    assert names() == before | {"ep_new_v1", "ep_newer_v1"}


def test_every_call_is_declared() -> None:
    made = {name for path in FILES for name in re.findall(r'"(ep_\w+_v\d+)"', path.read_text())}
    assert len(made) > 20
    assert made == names()
