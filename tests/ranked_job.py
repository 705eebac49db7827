"""A job of four ranks at a pace that tests set, for tests of commands that watch jobs."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from daemon_fixtures import WAIT_S
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

RANKS, TOKENS, HIDDEN, EXPERTS = 4, 8, 16, 8


class Job:
    """Runs steps of two layers on four ranks until `stop`; each rank sleeps before each layer."""

    def __init__(self, session: ep.Session) -> None:
        self.mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), ["ep"])
        group = session.create_group(
            "moe",
            self.mesh,
            ep_axis="ep",
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            max_tokens_per_rank=TOKENS,
            max_token_dtype="float32",
            max_top_k=2,
        )
        layers = [group.register_layer(name, top_k=2) for name in ("first", "second")]
        self.sleeps = np.zeros((RANKS, 2))
        self.held = threading.Event()  # of rank 2, which stops while the event is clear
        self.held.set()
        self._stopped = threading.Event()
        sharding = NamedSharding(self.mesh, PartitionSpec("ep"))
        # Expert 1 receives half of all rows.
        idx = np.tile([[1, 0], [1, 2], [1, 3], [1, 7]], (RANKS * TOKENS // 4, 1))
        self._idx = jax.device_put(idx.astype(np.int32), sharding)
        self._x = jax.device_put(np.ones((RANKS * TOKENS, HIDDEN), np.float32), sharding)

        def pause(number: int, rank: np.ndarray, value: np.ndarray) -> np.ndarray:
            time.sleep(self.sleeps[rank, number])
            if rank == 2 and number == 1 and not self.held.wait(WAIT_S):
                raise TimeoutError("nobody let rank 2 go on")
            return value

        def paused(number: int, x: jax.Array) -> jax.Array:
            def local(x: jax.Array) -> jax.Array:
                shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
                rank = jax.lax.axis_index("ep")
                return jax.pure_callback(
                    lambda rank, x: pause(number, rank, x), shape, rank, x, vmap_method="sequential"
                )

            spec = PartitionSpec("ep")
            return jax.shard_map(local, mesh=self.mesh, in_specs=spec, out_specs=spec)(x)

        def step(x: jax.Array, idx: jax.Array) -> jax.Array:
            for number, layer in enumerate(layers):
                sent = ep.dispatch(layer, paused(number, x), idx)
                x = ep.combine(layer, sent, sent.tokens)
                x = jnp.clip(x, -1, 1)
            return x

        self._step = jax.jit(step)
        jax.block_until_ready(self._step(self._x, self._idx))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            jax.block_until_ready(self._step(self._x, self._idx))

    def stop(self) -> None:
        self._stopped.set()
        self.held.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
