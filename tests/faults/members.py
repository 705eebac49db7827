"""Processes that form one group through the client library without JAX, because JAX's distributed
jobs end with any of their processes.
"""

from __future__ import annotations

from typing import Any

from child_programs import Program, Start

RANKS = 4
# For jobs of `multiprocess.launch` with a `group` and its `layer`: a step that doubles tokens.
STEP = """
from jax.sharding import NamedSharding, PartitionSpec as P
def put(x):
    sharding = NamedSharding(group.mesh, P("ep"))
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
n = group.spec.world_size
tokens = put(np.arange(8 * n * 16, dtype="float32").reshape(-1, 16))
idx = put((np.arange(8 * n, dtype="int32") % group.spec.num_experts)[:, None])

@jax.jit
def step(tokens, idx):
    sent = ep.dispatch(layer, tokens, idx)
    return ep.combine(layer, sent, sent.tokens * 2)

def run():
    out = step(tokens, idx)
    for got, given in zip(out.addressable_shards, tokens.addressable_shards):
        np.testing.assert_array_equal(got.data, np.asarray(given.data) * 2)
"""
SCRIPT = """
import json, sys, time
import ep_runtime as ep
from ep_runtime import specs
from ep_runtime_client.groups import forming
from ep_runtime_client.ops.kernels import ffi

ffi.ensure_registered("cpu")  # loads JAX, as a training process has it by then

def say(**values):
    print(json.dumps(values), flush=True)

ranks = tuple(json.loads(sys.stdin.readline()))
spec = specs.make_group_spec(
    name="g", mesh_axes=(("ep", 4),), ep_axis="ep", num_experts=8, hidden_size=64,
    max_tokens_per_rank=64, max_top_k=2, retain_s=60.0)
session = ep.connect(job="survive", timeout_s=60)
asked = time.monotonic()
while True:
    formed = forming.form(session._client, spec, forming.Claim(ranks), replace=False)
    say(generation=formed.generation, reattached=formed.reattached, asked=asked,
        formed=time.monotonic())
    if json.loads(sys.stdin.readline()) == "end":
        break
    forming.unmap(formed.native_group)  # as a broken group steps aside
    formed.memory.close()
    asked = time.monotonic()
forming.leave(session._client, "g", formed.generation, formed.native_group)
session.close()
"""


def start(run_program: Start, address: str, ranks: list[int]) -> Program:
    """A process that claims these ranks, again on each command, and leaves at "end"."""
    program = run_program(SCRIPT, prologue="", EP_RUNTIME_ADDRESS=address)
    program.tell(ranks)
    return program


def met(members: list[Program]) -> dict[str, Any]:
    """Returns each process's record of their group; `took_s` counts from the last create call."""
    said = [member.heard() for member in members]
    (generation,) = {row["generation"] for row in said}
    return {
        "generation": generation,
        "reattached": all(row["reattached"] for row in said),
        "took_s": max(row["formed"] for row in said) - max(row["asked"] for row in said),
    }
