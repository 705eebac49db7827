"""One model in training: its mesh, its EP group, its compiled step.

The step is plain `jax.jit` over sharded arrays: the batch is split over every device, the experts'
weights lie as `ep.sharding.rules` say, everything else is on every device. The only line that knows
of a runtime is `create_group`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_runtime_client.block import sharding
from ep_runtime_client.demo import model
from ep_runtime_client.demo.config import DemoConfig, Transport
from ep_runtime_client.demo.corpus import Corpus, held_out_batches
from ep_runtime_client.demo.optimizers import make_optimizer
from ep_runtime_client.groups.group import Group
from ep_runtime_client.sessions.session import Session

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One finished step on the host. `loss` keeps its f32 bits; loads: int [layers, E]."""

    loss: np.float32
    loads: Array
    dropped: int
    seconds: float


def make_mesh(config: DemoConfig) -> Mesh:
    """The config's axes over the platform's first devices."""
    devices = jax.devices(config.platform)[: config.devices]
    if len(devices) < config.devices:
        raise RuntimeError(
            f"JAX started with {len(devices)} {config.platform.upper()} devices, --devices wants "
            f"{config.devices}: there are no more, or something used JAX before the demo did"
        )
    return Mesh(np.array(devices).reshape([*config.axes.values()]), [*config.axes])


class Trainer:
    """A model, its optimizer and its compiled programs on one transport.

    Args:
        config: of the demo.
        session: connected.
        mesh: of `make_mesh`.
        name: of the EP group.
        transport: as of DemoConfig.
        recipe: a name of RECIPES.
    """

    def __init__(
        self,
        config: DemoConfig,
        session: Session,
        mesh: Mesh,
        *,
        name: str,
        transport: Transport,
        recipe: str,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._rules = sharding.rules(config.rules).on(mesh)
        self.group: Group = session.create_group(
            name,
            mesh,
            **self._rules.group_axes(mesh),
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            max_tokens_per_rank=config.tokens_per_rank,
            capacity_factor=config.capacity_factor,
            max_top_k=config.top_k,
            max_token_dtype="float32",
            alignment=32,
            combine_precision=config.combine_precision,
            transport=transport,
        )
        self._layers = [
            self.group.register_layer(f"block{i}/moe", top_k=config.top_k)
            for i in range(config.num_layers)
        ]
        self._loss_fn = functools.partial(
            model.loss_fn,
            layers=self._layers,
            recipe=model.MAKE_RECIPE[recipe](),
            params_spec=self._rules,
        )
        self._optimizer = make_optimizer(config)
        self._rows = NamedSharding(mesh, self._rules.spec(("activation_batch",)))
        self._state: Any = None
        self._step: Any = None

    def program(self) -> tuple[Any, Any, jax.ShapeDtypeStruct]:
        """The jitted step, not compiled, and the shapes of its state and of its window."""
        shapes = jax.eval_shape(self._init, jax.random.key(self._config.seed))
        layout = self._rules.shardings(shapes, self._mesh)
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        step = jax.jit(self._train_step, donate_argnums=0, out_shardings=(layout, everywhere))
        state = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shapes,
            layout,
        )
        window = (self._config.batch, self._config.seq + 1)
        return step, state, jax.ShapeDtypeStruct(window, jnp.int32, sharding=self._rows)

    def compile(self) -> None:
        """Initialises the parameters and compiles the step."""
        step, state, window = self.program()
        layout = jax.tree.map(lambda leaf: leaf.sharding, state)
        key = jax.random.key(self._config.seed)
        self._state = jax.jit(self._init, out_shardings=layout)(key)
        # XLA tunes the matmuls of each program by themselves, and TF32 ones differ in their sums.
        exact = self._config.compare and self._config.platform == "gpu"
        options: dict[str, str | bool] | None
        options = {"xla_gpu_deterministic_ops": True} if exact else None
        with jax.default_matmul_precision("highest" if exact else None):
            self._step = step.lower(state, window).compile(compiler_options=options)

    def step(self, window: Array) -> StepResult:
        """One optimizer step on `window`, [batch, seq + 1] int32; waits for it."""
        started = time.perf_counter()
        self._state, metrics = self._step(self._state, self._placed(window))
        loss, loads, dropped = jax.device_get(metrics)
        self.group.check()
        return StepResult(
            np.float32(loss), np.asarray(loads), int(dropped), time.perf_counter() - started
        )

    def follow(self, other: Trainer) -> None:
        """Goes on from a copy of the parameters and the optimizer's state of `other`."""
        self._state = jax.tree.map(jnp.copy, other._state)

    def held_out_losses(self, corpus: Corpus) -> Iterator[float]:
        """Loss in nats per byte of each held-out batch."""
        loss = jax.jit(lambda params, window: self._loss_fn(params, window)[1].loss)
        for window in held_out_batches(corpus, batch=self._config.batch, seq=self._config.seq):
            yield float(loss(self._state[0], self._placed(window)))

    def close(self) -> None:
        self.group.close()

    def _placed(self, window: Array) -> jax.Array:
        """The rows of this process's devices; every process has the whole window."""
        return jax.make_array_from_callback(window.shape, self._rows, lambda part: window[part])

    def _init(self, key: jax.Array) -> tuple[model.Params, Any]:
        params = model.init_params(key, self._config, self._layers)
        return params, self._optimizer.init(params)

    def _train_step(
        self, state: tuple[model.Params, Any], window: jax.Array
    ) -> tuple[tuple[model.Params, Any], model.Metrics]:
        params, optimizer_state = state
        gradient, metrics = jax.grad(self._loss_fn, has_aux=True)(params, window)
        updates, optimizer_state = self._optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), metrics
