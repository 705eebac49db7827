"""Programs of several processes that the name of a call must keep apart. Run by every process."""

from __future__ import annotations

import functools
import hashlib
import random
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import SMALL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

SETTINGS = SMALL | {"max_token_dtype": "float32", "op_timeout_s": 60}


class World:
    """A group over every device of the job, and inputs on its devices."""

    def __init__(self, session: Any, name: str = "g", **settings: Any) -> None:
        self.mesh = Mesh(np.array(jax.devices()), ("ep",))
        self.group = session.create_group(name, self.mesh, **(SETTINGS | settings))
        self.ranks = len(jax.devices())

    def put(self, array: Any) -> jax.Array:
        sharding = NamedSharding(self.mesh, PartitionSpec("ep"))
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    def tokens(self, seed: int) -> jax.Array:
        rng = np.random.default_rng(seed)
        return self.put(rng.standard_normal((8 * self.ranks, 16)).astype(np.float32))

    def routing(self, seed: int, top_k: int = 2) -> jax.Array:
        rng = np.random.default_rng(seed)
        rows = [rng.choice(8, top_k, replace=False) for _ in range(8 * self.ranks)]
        return self.put(np.array(rows, np.int32))


def round_trip(layer: Any, tokens: Any, idx: Any, factor: float, **options: Any) -> Any:
    """Computes top_k * factor * tokens by a trip through every rank."""
    sent = ep.dispatch(layer, tokens, idx, **options)
    return ep.combine(layer, sent, sent.tokens * factor)


def check(got: Any, tokens: Any, factor: float) -> None:
    """Compares exactly: the factors are small integers, and two equal partial sums are added."""
    for mine, given in zip(got.addressable_shards, tokens.addressable_shards, strict=True):
        np.testing.assert_array_equal(mine.data, np.asarray(given.data) * np.float32(factor))


def twins(layers: int, runs: int) -> dict[str, Any]:
    """Independent calls of many equal layers, more than there are lanes."""
    with ep.connect() as session:
        world = World(session)
        found = world.group.register_layers([ep.LayerSpec(f"l{i}", top_k=2) for i in range(layers)])

        @jax.jit
        def step(tokens: Any, idx: Any) -> Any:
            return [round_trip(layer, tokens, idx, i + 1) for i, layer in enumerate(found)]

        tokens, idx = world.tokens(0), world.routing(0)
        lowered = step.lower(tokens, idx).as_text()
        for _ in range(runs):
            for i, got in enumerate(step(tokens, idx)):
                check(got, tokens, 2 * (i + 1))
        return {"hlo": hashlib.sha256(lowered.encode()).hexdigest()}


def microbatches(runs: int, handles: int) -> dict[str, Any]:
    """Four independent microbatches, each through two calls of one jitted function."""
    with ep.connect() as session:
        world = World(session)
        layer = world.group.register_layer("moe", top_k=2, in_flight=handles)
        batches = [(world.tokens(i), world.routing(i)) for i in range(4)]
        trip = jax.jit(functools.partial(round_trip, layer), static_argnames="handle")

        @jax.jit
        def step(batches: Any) -> Any:
            found = []
            for i, (tokens, idx) in enumerate(batches):
                once = trip(tokens, idx, 1.0 + i, handle=i % handles)
                found.append(trip(jnp.copy(once), idx, 0.5, handle=i % handles))
            return found

        for _ in range(runs):
            for i, got in enumerate(step(batches)):
                check(got, batches[i][0], 2 * (1.0 + i))
        return {"steps": runs}


def warm(cache: str, runs: int) -> dict[str, Any]:
    """Loads programs from the persistent cache, also ones that another process compiles.

    Two jits of one function take turns: XLA counts the launches of equal executables together, and
    a loaded one equals no compiled one. The first launch of each ends with an error everywhere.
    """
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    found = {"hits": 0, "misses": 0}

    def count(event: str, **_: Any) -> None:
        kind = event.removeprefix("/jax/compilation_cache/cache_")
        if kind in found:
            found[kind] += 1

    jax.monitoring.register_event_listener(count)
    with ep.connect() as session:
        all_but_eight = 16 * len(jax.devices()) - 8
        settings = {"recv_capacity_per_rank": all_but_eight, "alignment": 1}
        world = World(session, on_overflow="error", **settings)
        layers = world.group.register_layers([ep.LayerSpec(f"l{i}", top_k=2) for i in range(2)])

        def step(tokens: Any, idx: Any) -> Any:
            def turn(tokens: Any, _: None) -> Any:
                return round_trip(layers[0], tokens, idx, 0.5), None

            tokens, _ = jax.lax.scan(turn, tokens, None, 3)
            return jax.grad(lambda t: (round_trip(layers[1], t, idx, 3.0) * t).sum())(tokens)

        tokens, idx = world.tokens(0), world.routing(0)
        crowded = world.put(np.tile(np.array([[0, 0]], np.int32), (8 * world.ranks, 1)))
        twins = [jax.jit(step), jax.jit(functools.wraps(step)(lambda *args: step(*args)))]
        for number in range(runs):
            for turn, program in enumerate(twins):
                if number == 0:
                    assert overflows(program, tokens, crowded)
                for _ in range(1 + turn):
                    check(program(tokens, idx), tokens, 12)
    return found


def overflows(program: Any, *arguments: Any) -> bool:
    """Whether the launch ends with a CapacityOverflowError."""
    try:
        with ep.translate_errors():
            jax.block_until_ready(program(*arguments))
    except ep.CapacityOverflowError:
        return True
    return False


def soak(steps: int, index: int) -> dict[str, Any]:
    """Runs two groups with random pauses in every process, and checks results now and then."""
    pause, chance = threading.Event(), random.Random(index)
    with ep.connect() as session:
        worlds = [World(session, "left"), World(session, "right", lanes=1)]
        layers = [world.group.register_layer("moe", top_k=2) for world in worlds]

        @jax.jit
        def step(tokens: Any, idx: Any) -> Any:
            return [round_trip(layer, tokens, idx, i + 1.0) for i, layer in enumerate(layers)]

        tokens, idx = worlds[0].tokens(0), worlds[0].routing(0)
        for number in range(steps):
            got = step(tokens, idx)
            if number % 50 == 0:
                for i, out in enumerate(got):
                    check(out, tokens, 2 * (i + 1))
            if chance.random() < 0.01:
                pause.wait(chance.uniform(0, 0.02))
        jax.block_until_ready(got)
        for world in worlds:
            world.group.check()
        return {"steps": steps}
