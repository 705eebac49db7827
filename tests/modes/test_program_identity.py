"""Each program and each equal layer is compiled once, by a client that attached by name too."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import pytest
from child_programs import Start
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.moe import op as block_ops

# Traces and compiles the same program with the cache on, and runs it.
BODY = """
import hashlib
from mode_programs import SPLIT, draw, grads_of, loss, meant_grads

jax.config.update("jax_compilation_cache_dir", os.environ["TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

def report(layer):
    sharding = jax.sharding.NamedSharding(layer.mesh, SPLIT)
    operands = [jax.device_put(a, sharding) for a in draw()]
    region = jax.shard_map(
        lambda *args: loss(layer, *args), mesh=layer.mesh, axis_names={"dp"},
        in_specs=jax.P("dp"), out_specs=jax.P("dp"),
    )
    said = {"text": "", "hits": 0, "misses": 0, "right": True}
    for function in (lambda *args: loss(layer, *args), region):
        lowered = grads_of(function).lower(*operands)
        said["text"] += hashlib.sha256(lowered.as_text().encode()).hexdigest()
        del events[:]
        program = lowered.compile()
        said["hits"] += events.count("/jax/compilation_cache/cache_hits")
        said["misses"] += events.count("/jax/compilation_cache/cache_misses")
        got, want = program(*operands), meant_grads(*draw()[::2])
        said["right"] &= all(np.allclose(a, b, atol=2e-5) for a, b in zip(got, want, strict=True))
    say(**said)

settings = dict(ep_axis="ep", outer_axes="dp", num_experts=8, hidden_size=16,
                max_tokens_per_rank=8, max_top_k=2, alignment=8, max_token_dtype="float32")
"""
CREATE = """
session = ep.connect()
group = session.create_group("g", mesh_of(2, 4, names=("dp", "ep")), **settings)
report(group.register_layer("moe", top_k=2))
hear()
"""
ATTACH = """
session = ep.connect()
report(session.group("g").layer("moe"))
"""
ALONE = """
import json, os, sys
os.environ["PJRT_NPROC"] = "32"
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import ep_runtime as ep

def say(**values):
    print(json.dumps(values), flush=True)

def hear():
    return json.loads(sys.stdin.readline())

def mesh_of(*sizes, names):
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), names)
"""


@pytest.fixture
def environment(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    here = Path(__file__).parent
    for path in (here, here.parent):
        monkeypatch.setenv("PYTHONPATH", str(path), prepend=":")
    return {"EP_RUNTIME_ADDRESS": address, "TEST_CACHE": str(tmp_path / "cache")}


def test_a_client_that_attached_by_name_runs_the_cached_program(
    run_program: Start, environment: dict[str, str]
) -> None:
    """The first client dies; its windows are kept, and another program attaches to them."""
    environment |= {"EP_RUNTIME_JOB": "identity"}
    creator = run_program(BODY + CREATE, prologue=ALONE, **environment)
    created = creator.heard()
    creator.kill()
    attached = run_program(BODY + ATTACH, prologue=ALONE, **environment).heard()
    assert created == {"text": created["text"], "hits": 0, "misses": 2, "right": True}
    assert attached == {"text": created["text"], "hits": 2, "misses": 0, "right": True}


TWICE = """
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
)
group = ep.connect().create_group("g", mesh_of(8, names=("ep",)), **settings)
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
SETTINGS = """
settings = dict(ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8,
                max_top_k=2, alignment=8, max_token_dtype="float32")
"""


def test_a_step_that_imports_ops_while_it_is_traced_is_compiled_once(
    run_program: Start, environment: dict[str, str]
) -> None:
    said = run_program(SETTINGS + TWICE, prologue=ALONE, **environment).heard()
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
            # args[3] tells how results are wanted: only the partitioner asks.
            asked[op.__name__] += args[3] is not None
            return resolve(self, *args)

        monkeypatch.setattr(op, "resolve", counting)

    for op in (block_ops.BlockForward, block_ops.BlockBackward):
        counted(op)
    compiled = _train_step(make_group).compile()
    assert asked == {"BlockForward": LAYERS, "BlockBackward": LAYERS}
    # Every layer has its own name in profiles all the same.
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
