"""A small training job that goes on: what each of its processes runs.

Variables: TEST_FROM is a file with the state to start from, TEST_TO the file for the state that a
later generation starts from, TEST_STEPS how many steps that generation makes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

HIDDEN, MLP, ROWS, TOKENS = 16, 16, 24, 2
EXPERTS = int(os.environ.get("TEST_EXPERTS", "12"))
State = dict[str, np.ndarray]


def first_state() -> State:
    rng = np.random.default_rng(0)
    shapes = {
        "dense": (HIDDEN, HIDDEN),
        "router": (HIDDEN, EXPERTS),
        "wi": (EXPERTS, HIDDEN, 2, MLP),
        "wo": (EXPERTS, MLP, HIDDEN),
    }
    return {name: rng.normal(0, 0.3, shape).astype("float32") for name, shape in shapes.items()}


def build(session: ep.Session, mesh: Mesh, number: int) -> Callable[..., Any]:
    """A step (state, number) -> (loss, the next state whole on every device)."""
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

    def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    def train_step(state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def loss(state: Any) -> jax.Array:
            hidden = jnp.tanh(x @ state["dense"])
            params = ep.MoEParams(**{name: state[name] for name in ("router", "wi", "wo")})
            y, _ = ep.moe(layer, hidden, params)
            return jnp.square(y + hidden - jnp.roll(x, 1, -1)).mean()

        value, gradient = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda a, b: a - 0.1 * b, state, gradient)

    compiled = jax.jit(train_step, out_shardings=(whole, whole))
    where = {"dense": whole, "router": whole, "wi": split, "wo": split}

    def step(state: State, number: int) -> tuple[jax.Array, Any]:
        x = np.random.default_rng(number).normal(size=(ROWS * TOKENS, HIDDEN)).astype("float32")
        on_mesh = {name: put(array, where[name]) for name, array in state.items()}
        return compiled(on_mesh, put(x, split))

    return step


def run(say: Callable[..., None], hear: Callable[[], Any]) -> None:
    session = ep.connect(os.environ.get("TEST_ADDRESS", "node"), on_loss="continue", timeout_s=60)
    state, number, later = first_state(), 0, os.environ.get("TEST_FROM")
    if later is not None:
        with np.load(later) as saved:
            state = {name: saved[name] for name in saved if name != "number"}
            number = int(saved["number"])
    losses: list[str] = []
    for generation in ep.distributed.generations():
        losses.clear()
        with generation:
            mesh = ep.distributed.fit_mesh(
                generation.devices, {"ep": None}, num_experts=EXPERTS, batch=ROWS
            ).mesh
            last = generation.number > 0 or later is not None
            if last and later is None and jax.process_index() == mesh.devices.flat[0].process_index:
                np.savez(os.environ["TEST_TO"], number=number, **state)
            if not mesh.local_devices:
                say(idle=True)
                generation.wait()
            step = build(session, mesh, generation.number)
            while not last or len(losses) < int(os.environ["TEST_STEPS"]):
                loss, next_state = generation.step(step, state, number)
                state = {k: np.asarray(v.addressable_data(0)) for k, v in next_state.items()}
                number += 1
                losses.append(float(loss).hex())
                if not last and len(losses) == 3:
                    say(ready=True)
    digest = {
        name: float(np.abs(array).sum(dtype="float64")).hex() for name, array in state.items()
    }
    say(losses=losses, number=number, devices=mesh.size, digest=digest)
    hear()
