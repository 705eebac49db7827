"""Each process of a small training job that survives the loss of processes.

Variables: TEST_FROM is a file with the state to start from, TEST_TO the file for the state that a
later generation restores, TEST_STEPS how many steps that generation makes, TEST_DIES a process and
the generation before whose group it dies, TEST_COMPILES how many steps `train` makes until it
compiles again. With TEST_SAVES it writes files for `replay` to the folder TEST_TO.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.base.layers import live_groups

ROWS, TOKENS = 24, 2
HIDDEN, MLP = int(os.environ.get("TEST_HIDDEN", "16")), int(os.environ.get("TEST_MLP", "16"))
EXPERTS = int(os.environ.get("TEST_EXPERTS", "12"))
LAST = int(os.environ.get("TEST_LAST", "1"))
SAVES = "TEST_SAVES" in os.environ
COMPILES = int(os.environ.get("TEST_COMPILES", "0"))
READY = 3  # steps until a process may die, or until the next copy of the state
Arrays = dict[str, Any]


SHAPES = {
    "dense": (HIDDEN, HIDDEN),
    "router": (HIDDEN, EXPERTS),
    "wi": (EXPERTS, HIDDEN, 2, MLP),
    "wo": (EXPERTS, MLP, HIDDEN),
}


def first_state() -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.3, shape).astype("float32") for name, shape in SHAPES.items()}


def put(arrays: Arrays, shardings: dict[str, NamedSharding]) -> Arrays:
    return {
        name: jax.make_array_from_callback(x.shape, shardings[name], lambda part, x=x: x[part])
        for name, x in arrays.items()
    }


def abstract(shardings: dict[str, NamedSharding]) -> Arrays:
    return {
        name: jax.ShapeDtypeStruct(shape, "float32", sharding=shardings[name])
        for name, shape in SHAPES.items()
    }


def layout(mesh: Mesh, experts: PartitionSpec) -> dict[str, NamedSharding]:
    whole = NamedSharding(mesh, PartitionSpec())
    return {"dense": whole, "router": whole} | dict.fromkeys(
        ("wi", "wo"), NamedSharding(mesh, experts)
    )


def mesh_of(generation: ep.distributed.Generation) -> Mesh:
    sizes = {"num_experts": EXPERTS, "batch": ROWS}
    return ep.distributed.fit_mesh(generation.devices, {"ep": None}, **sizes).mesh


def build(session: ep.Session, mesh: Mesh, number: int) -> Callable[..., Any]:
    """Makes a step (state, number) -> (loss, next state)."""
    group = session.create_group(
        f"experts-{number}",
        mesh,
        ep_axis="ep",
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=ROWS * TOKENS // mesh.size,
        max_top_k=2,
        max_token_dtype="float32",
        alignment=8,
        retain_s=0.0,
    )
    layer = group.register_layer("moe", top_k=2)
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("ep"))

    def train_step(state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def loss(state: Any) -> jax.Array:
            hidden = jnp.tanh(x @ state["dense"])
            params = ep.MoEParams(**{name: state[name] for name in ("router", "wi", "wo")})
            y, _ = ep.moe(layer, hidden, params)
            return jnp.square(y + hidden - jnp.roll(x, 1, -1)).mean()

        value, gradient = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda a, b: a - 0.1 * b, state, gradient)

    sharded = layout(mesh, PartitionSpec("ep"))
    compiled = jax.jit(train_step, out_shardings=(whole, sharded), donate_argnums=0)

    def step(state: Arrays, number: int) -> tuple[jax.Array, Any]:
        x = np.random.default_rng(number).normal(size=(ROWS * TOKENS, HIDDEN)).astype("float32")
        return compiled(state, put({"x": x}, {"x": split})["x"])

    return step


def train(say: Callable[..., None], hear: Callable[[], Any]) -> None:
    """Trains TEST_STEPS steps or until it is killed, writes every loss to a file in the folder
    TEST_TO, and says when it connected and when each generation had its first step. Its Python
    stands after SIGUSR1."""
    signal.signal(signal.SIGUSR1, lambda *_: os.read(os.pipe()[0], 1))
    connected = time.monotonic()
    session = ep.connect("node", on_loss="continue", timeout_s=60)
    retain_s = float(os.environ.get("TEST_RETAIN", "0"))
    kept, steps = ep.distributed.State(session, retain_s=retain_s), int(os.environ["TEST_STEPS"])
    log = Path(os.environ["TEST_TO"]) / f"{jax.process_index()}.jsonl"
    stuck_after_s = float(os.environ.get("TEST_STUCK_AFTER", "1800"))
    with log.open("a", buffering=1) as losses:
        for generation in ep.distributed.generations(stuck_after_s=stuck_after_s):
            with generation:
                mesh = mesh_of(generation)
                split = layout(mesh, PartitionSpec("ep"))
                step = build(session, mesh, generation.number)
                if kept.committed is None:
                    number, state = 0, put(first_state(), split)
                else:
                    number, state = kept.restore(abstract(split))
                if SAVES:
                    _save(log.parent / f"{generation.number}.npz", mesh, kept)
                built, first = time.monotonic(), number
                while number < steps:
                    loss, state = generation.step(step, state, number)
                    line = [generation.number, number, float(loss).hex()]
                    losses.write(json.dumps(line) + "\n")
                    number += 1
                    if number % READY == 0:
                        kept.commit(number, state)
                    if COMPILES and number % COMPILES == 0:
                        jax.clear_caches()
                        gc.collect()
                    if generation.steps == 1:
                        times = {"connected": connected, "built": built, "at": time.monotonic()}
                        say(devices=mesh.size, first=first, **times)


def _save(file: Path, mesh: Mesh, kept: ep.distributed.State) -> None:
    """Writes the state at which a generation begins, for `replay`."""
    number, state = 0, first_state()
    if kept.committed is not None:
        number, state = kept.restore(abstract(layout(mesh, PartitionSpec())))
    if jax.process_index() == mesh.devices.flat[0].process_index:
        np.savez(file, number=number, devices=mesh.size, **state)


def _saved(file: str) -> tuple[int, Arrays]:
    with np.load(file) as saved:
        return int(saved["number"]), {name: saved[name] for name in SHAPES}


def replay(say: Callable[..., None], hear: Callable[[], Any]) -> None:
    """Repeats the first steps of generations, in a job that has their number of devices.

    TEST_AGAIN has [file, steps, next file] of each in JSON. Says losses by file, and by next file
    whether it has the state of its step.
    """
    session = ep.connect("node", on_loss="continue", timeout_s=60)
    for generation in ep.distributed.generations():
        with generation:
            mesh = mesh_of(generation)
            step, split = build(session, mesh, 0), layout(mesh, PartitionSpec("ep"))
            gathered = jax.jit(lambda x: x, out_shardings=layout(mesh, PartitionSpec()))
            found: dict[str, list[str]] = {}
            same: dict[str, bool] = {}
            for file, steps, following in json.loads(os.environ["TEST_AGAIN"]):
                first, state = _saved(file)
                state, found[file] = put(state, split), []
                after, wanted = _saved(following) if following else (-1, {})
                for number in range(first, first + steps + 1):
                    if number == after:
                        whole = generation.step(gathered, state)
                        same[following] = all(np.array_equal(whole[x], wanted[x]) for x in wanted)
                    if number < first + steps:
                        loss, state = generation.step(step, state, number)
                        found[file].append(float(loss).hex())
            say(losses=found, same=same)


def run(say: Callable[..., None], hear: Callable[[], Any]) -> None:
    session = ep.connect(os.environ.get("TEST_ADDRESS", "node"), on_loss="continue", timeout_s=600)
    kept = ep.distributed.State(session, retain_s=0)
    before = os.environ.get("TEST_FROM")
    losses: list[str] = []
    for generation in ep.distributed.generations():
        losses.clear()
        with generation:
            mesh = mesh_of(generation)
            last = generation.number >= LAST or before is not None
            if not mesh.local_devices:
                say(idle=True)
                generation.wait()
            whole, split = layout(mesh, PartitionSpec()), layout(mesh, PartitionSpec("ep"))
            if generation.number > 0:
                number, state = kept.restore(abstract(whole))
                if jax.process_index() == mesh.devices.flat[0].process_index:
                    np.savez(os.environ["TEST_TO"], number=number, **state)
                number, state = kept.restore(abstract(split))
            elif before is not None:
                number, saved = _saved(before)
                state = put(saved, split)
            else:
                number, state = 0, put(first_state(), split)
            if os.environ.get("TEST_DIES") == f"{jax.process_index()} in {generation.number}":
                os.kill(os.getpid(), signal.SIGKILL)  # the others wait for it in create_group
            step = build(session, mesh, generation.number)
            while not last or len(losses) < int(os.environ["TEST_STEPS"]):
                loss, state = generation.step(step, state, number)
                number += 1
                kept.commit(number, state)
                losses.append(float(loss).hex())
                if not last and len(losses) == READY:
                    say(ready=True)
            gathered = jax.jit(lambda state: state, out_shardings=whole)
            state = generation.step(gathered, state)
            digest = {
                name: float(np.abs(array).sum(dtype="float64")).hex()
                for name, array in state.items()
            }
            groups = len(live_groups.all())  # with two copies of the state
            say(losses=losses, number=number, devices=mesh.size, digest=digest, groups=groups)
    if not losses:
        say(losses=losses)  # it waited for the others
    hear()
