"""Programs are compiled once, stored and exported; a client that attached by name runs them too."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from child_programs import Start, run_python
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec
from mode_programs import (
    EXPERTS,
    MESHES,
    TOP_K,
    assert_close,
    collectives,
    draw,
    grads_of,
    loss,
    meant,
    meant_grads,
    put,
)
from stored_child import COMPILED, SPEC, open_group

import ep_runtime as ep
from ep_runtime import native
from ep_runtime_client.moe import op as block_ops
from ep_runtime_client.ops.transports import windows as transports_windows

ALONE = """
import json, os
os.environ["PJRT_NPROC"] = "32"
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import ep_runtime as ep

def say(**values):
    print(json.dumps(values), flush=True)

def mesh_of(*sizes, names):
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), names)
"""


TWICE = """
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
)
group = ep.connect().create_group(
    "g", mesh_of(8, names=("ep",)), ep_axis="ep", num_experts=8, hidden_size=16,
    max_tokens_per_rank=8, max_top_k=2, alignment=8, max_token_dtype="float32")
layer = group.register_layer("moe", top_k=2)

@jax.jit
def step(x, idx, weights):
    sent = ep.dispatch(layer, x, idx, weights)
    return ep.combine(layer, sent, sent.tokens, weights=sent.weights)

sharding = jax.sharding.NamedSharding(layer.mesh, jax.P("ep"))
given = [
    jax.device_put(x, sharding)
    for x in (np.ones((64, 16), "float32"), np.zeros((64, 2), "int32"), np.ones((64, 2), "float32"))
]
counts = []
for _ in range(2):
    jax.block_until_ready(step(*given))
    counts.append(len(compiled))
say(counts=counts)
"""


def test_a_step_that_imports_ops_while_it_is_traced_is_compiled_once(
    run_program: Start, address: str
) -> None:
    said = run_program(TWICE, prologue=ALONE, EP_RUNTIME_ADDRESS=address).heard()
    first, second = said["counts"]
    assert second == first


LAYERS = 3


def test_each_layer_is_partitioned_once(
    make_group: fakes.MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()

    def counted(op: type[Any]) -> None:
        resolve = op.resolve

        def counting(self: Any, *args: Any) -> Any:
            # args[3] describes the wanted results: only the partitioner asks for them.
            asked[op.__name__] += args[3] is not None
            return resolve(self, *args)

        monkeypatch.setattr(op, "resolve", counting)

    for op in (block_ops.BlockForward, block_ops.BlockBackward):
        counted(op)
    compiled = _train_step(make_group).compile()
    assert asked == {"BlockForward": LAYERS, "BlockBackward": LAYERS}
    # Every layer still has its own name in profiles.
    names = compiled.as_text() or ""
    found = set(re.findall(r"ep_experts/layer(\d+)[/)]", names))
    assert found == {str(number) for number in range(LAYERS)}


def _train_step(make_group: fakes.MakeGroup) -> Any:
    """A step of unrolled layers whose weights are sharded over fsdp too, lowered."""
    group = make_group(
        axes={"fsdp": 2, "ep": 2},
        name="equal",
        outer_axes="fsdp",
        transport="xla",
        num_experts=4,
        hidden_size=64,
        max_tokens_per_rank=32,
        max_top_k=2,
        max_token_dtype="float32",
    )
    layers = [group.register_layer(f"layer{number}", top_k=2) for number in range(LAYERS)]

    def shaped(shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(group.mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    experts = shaped((4, 64, 2, 64), "ep", "fsdp"), shaped((4, 64, 64), "ep", None, "fsdp")
    weights = [ep.MoEParams(shaped((64, 4)), *experts)] * LAYERS

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for layer, params in zip(layers, weights, strict=True):
            x = x + ep.moe(layer, x, params)[0]
        return (x * x).mean()

    x = shaped((4, 32, 64), ("fsdp", "ep"))
    return jax.jit(jax.grad(loss)).lower(weights, x)


def child(task: str, *arguments: str) -> Any:
    """Returns the output of stored_child.py for a task, in a separate process."""
    here = Path(__file__).parent
    path = f"{os.environ['PYTHONPATH']}{os.pathsep}{here}"
    done = run_python(here / "stored_child.py", task, *arguments, PYTHONPATH=path)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def layer() -> Any:
    group, layer = open_group()
    yield layer
    group.close()


def operands_of(layer: Any) -> list[Any]:
    return put(layer.group, SPEC, *draw())


def exported(layer: Any, function: Callable[..., Any]) -> Any:
    """An export for the mesh's devices, as a user would write it."""
    checks = ep.export_checks()
    return jax.export.export(jax.jit(function), disabled_checks=checks)(*operands_of(layer))


def test_export_checks_name_every_custom_call() -> None:
    assert {target.name for target in native.library().targets()} == {*transports_windows.TARGETS}
    named = [check.is_custom_call() for check in ep.export_checks()]
    table = Path(__file__).parents[2] / "csrc/ffi/targets_cuda.cc"
    on_gpus = re.findall(r'^    \{"(ep_\w+)"', table.read_text(), re.MULTILINE)
    of_the_bench = {"ep_dispatch_ceiling_v1", "ep_combine_ceiling_v1", "ep_clock_v1"}
    assert sorted(named) == sorted({*on_gpus} - of_the_bench)


def test_without_the_checks_an_export_is_refused(layer: Any) -> None:
    with pytest.raises(ValueError, match="ep_prepare_v1"):
        jax.export.export(jax.jit(lambda *args: loss(layer, *args)))(*operands_of(layer))


def test_an_exported_program_and_its_gradient(layer: Any) -> None:
    operands = operands_of(layer)
    x, _, weights = draw()
    blob = exported(layer, lambda *args: loss(layer, *args)).serialize(vjp_order=1)
    again = jax.export.deserialize(blob)
    assert_close(jax.jit(again.call)(*operands), np.sin(meant(x, weights)))
    assert_close(grads_of(again.call)(*operands), meant_grads(x, weights))


def round_trip(function: Callable[..., Any], *operands: Any) -> Any:
    """The function again, out of the bytes of its export."""
    export = jax.export.export(jax.jit(function), disabled_checks=ep.export_checks())(*operands)
    again = jax.export.deserialize(export.serialize())
    assert (again.in_tree, again.out_tree) == (export.in_tree, export.out_tree)
    return again.call


def test_our_classes_cross_an_export_as_arguments_and_results(layer: Any) -> None:
    """Also with their static fields: the layer of a plan, a recipe, the mesh of a permutation."""
    x, idx, weights = operands_of(layer)
    send = round_trip(lambda *args: ep.dispatch(layer, *args), x, idx, weights)
    sent = send(x, idx, weights)
    assert sent.plan.meta.layer == layer
    back = round_trip(lambda sent: ep.combine(layer, sent, sent.tokens, weights=sent.weights), sent)
    assert_close(back(sent), x * weights.sum(-1, keepdims=True))

    params = ep.init_moe_params(jax.random.key(0), layer, 8)
    spread = NamedSharding(layer.mesh, SPEC)
    sort = functools.partial(ep.permute, num_experts=EXPERTS, tokens_spec=spread)
    recipe, sizes = ep.recipes.TensorScaling(delayed=True), jnp.int32([32])
    every = (
        params,
        jax.eval_shape(functools.partial(ep.moe, layer, return_stats=True), x, params),
        jax.eval_shape(sort, x, idx),
        jax.eval_shape(functools.partial(ep.route, top_k=TOP_K), x),
        (ep.Routing(idx, weights), dataclasses.replace(params, router=None)),
        jax.eval_shape(ep.grouped_quantize, jnp.ones((32, 32)), sizes, ep.recipes.MXFP8()),
        recipe,
        recipe.init_state(EXPERTS),
        ep.init_moe_state(layer, (recipe, None)),
    )
    round_trip(lambda *args: args, *every)


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_exports(make_group: fakes.MakeGroup, name: str) -> None:
    axes, settings, spec = MESHES[name]
    group = make_group(
        axes=axes, transport="memfd", num_experts=EXPERTS, max_tokens_per_rank=32, **settings
    )
    layer = group.register_layer("moe", top_k=TOP_K)
    operands = put(group, spec, *draw())
    program = grads_of(lambda *args: loss(layer, *args))
    export = jax.export.export(program, disabled_checks=ep.export_checks())(*operands)
    assert export.nr_devices == group.mesh.size
    again = jax.export.deserialize(export.serialize())
    compiled = jax.jit(again.call).lower(*operands).compile()
    assert_close(compiled(*operands), meant_grads(*draw()[::2]))
    assert collectives(compiled) == []


def test_ahead_of_time_from_shapes_alone(layer: Any) -> None:
    sharding = NamedSharding(layer.mesh, SPEC)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in draw()]
    run = grads_of(lambda *args: loss(layer, *args)).lower(*shapes).compile()
    assert_close(run(*operands_of(layer)), meant_grads(*draw()[::2]))
    traced = jax.jit(lambda *args: loss(layer, *args)).trace(*shapes)
    assert traced.out_info.shape == draw()[0].shape
    assert jax.eval_shape(lambda *args: loss(layer, *args), *shapes).shape == draw()[0].shape


def test_stored_programs_run_in_a_process_that_never_traced_them(
    layer: Any, tmp_path: Path
) -> None:
    """Programs end with StaleHandleError before their layer is registered, and for another spec."""
    program = grads_of(lambda *args: loss(layer, *args))
    export = jax.export.export(program, disabled_checks=ep.export_checks())
    (tmp_path / "export").write_bytes(export(*operands_of(layer)).serialize())
    compiled = program.lower(*operands_of(layer)).compile()
    (tmp_path / "executable").write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    said = child("load", str(tmp_path))
    for kind in ("export", "executable"):
        assert "EP_RUNTIME/StaleHandleError" in said[kind]["no layer"]
        assert said[kind]["layer"] == "right"
        assert said[kind]["again"] == "right"
        assert "EP_RUNTIME/StaleHandleError" in said[kind]["other alignment"]
        assert "EP_RUNTIME/StaleHandleError" in said[kind]["closed"]


def test_the_persistent_cache_hits_for_the_same_spec_alone(tmp_path: Path) -> None:
    """Programs of equal shapes but different specs are compiled again, and all values are right."""
    first, second = (child("cache", str(tmp_path / "cache")) for _ in range(2))
    texts = [run["texts"] for run in first]
    assert [run["texts"] for run in second] == texts
    assert len({(forward, grads) for forward, grads, _ in texts}) == len(texts)
    products = {run["name"]: run["texts"][2] for run in first}
    assert len({products[name] for name in ("base", "alignment", "tokens")}) == 3
    for runs, hits in ((first, 0), (second, 3)):
        for run in runs[: len(COMPILED)]:
            assert (run["hits"], run["misses"], run["right"]) == (hits, 3 - hits, True), run["name"]
