"""One model in training: its mesh, its EP group, its compiled step.

The step is plain `jax.jit` over sharded arrays: the batch is sharded over all devices, the experts'
weights by `ep.sharding.rules`, and every other array is replicated. Only the call of `create_group`
uses the runtime.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_runtime_client.demo import transformer
from ep_runtime_client.demo.config import DemoConfig, Transport
from ep_runtime_client.groups.group import Group
from ep_runtime_client.modules import sharding
from ep_runtime_client.sessions.session import Session

Array = npt.NDArray[Any]
CAPACITY_FACTOR = 2.0
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY = 3e-3, 20, 0.1


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One finished step on the host. `loss` keeps its f32 bits."""

    loss: np.float32
    dropped: int
    seconds: float


def make_mesh(config: DemoConfig) -> Mesh:
    """Makes a mesh with the config's axes over the platform's first devices."""
    devices = jax.devices(config.platform)[: config.devices]
    if len(devices) < config.devices:
        raise RuntimeError(
            f"JAX started with {len(devices)} {config.platform.upper()} devices, --devices wants "
            f"{config.devices}: there are no more, or something used JAX before the demo did"
        )
    return Mesh(np.array(devices).reshape([*config.axes.values()]), [*config.axes])


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Makes AdamW with a warm-up and a cosine schedule; gradients are clipped by their norm."""
    warmup, last = min(WARMUP_STEPS, max(1, steps // 5)), LEARNING_RATE / 20
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, warmup, max(2, steps), last)
    optimizer = optax.adamw(schedule, b2=0.95, weight_decay=WEIGHT_DECAY)
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


class Trainer:
    """A model, its optimizer and its compiled step; `name` and `transport` are its EP group's."""

    def __init__(
        self, config: DemoConfig, session: Session, mesh: Mesh, *, name: str, transport: Transport
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._rules = sharding.rules("fsdp+ep").on(mesh)
        self.group: Group = session.create_group(
            name,
            mesh,
            rules=self._rules,
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            # Devices along tp have the same tokens.
            max_tokens_per_rank=config.tokens_per_step * mesh.shape.get("tp", 1) // mesh.size,
            capacity_factor=CAPACITY_FACTOR,
            max_top_k=config.top_k,
            max_token_dtype="float32",
            alignment=32,
            transport=transport,
            retain_s=0.0,
        )
        self._layers = [
            self.group.register_layer(f"block{i}/moe", top_k=config.top_k)
            for i in range(config.num_layers)
        ]
        self._loss_fn = functools.partial(
            transformer.loss_fn,
            layers=self._layers,
            recipe=transformer.RECIPES[config.recipe],
            params_spec=self._rules,
        )
        self._optimizer = make_optimizer(config.steps)
        self._rows = NamedSharding(mesh, self._rules.spec(("activation_batch",)))
        self.state: Any = None  # parameters and the optimizer's state
        self._step: Any = None

    def compile(self, restore: Callable[[Any], tuple[int, Any]] | None = None) -> int:
        """Initialises the parameters, or restores them, and compiles the step.

        Args:
            restore: (abstract state) -> (number of finished steps, the state).

        Returns:
            The number of finished steps.
        """
        key = jax.random.key(self._config.seed)
        abstract = jax.eval_shape(self._init, key)
        layout = self._rules.shardings(abstract, self._mesh)
        done = 0
        if restore is None:
            self.state = jax.jit(self._init, out_shardings=layout)(key)
        else:
            wanted = jax.tree.map(lambda x, on: x.update(sharding=on), abstract, layout)
            done, self.state = restore(wanted)
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        step = jax.jit(self._train_step, donate_argnums=0, out_shardings=(layout, everywhere))
        size = (self._config.batch, self._config.seq + 1)
        window = jax.ShapeDtypeStruct(size, jnp.int32, sharding=self._rows)
        # XLA tunes the matmuls of each program separately, and TF32 variants sum differently.
        exact = self._config.compare and self._config.platform == "gpu"
        with jax.default_matmul_precision("highest" if exact else None):
            lowered = step.lower(self.state, window)
            self._step = lowered.compile({"xla_gpu_deterministic_ops": True} if exact else None)
        return done

    def step(self, window: Array) -> StepResult:
        """Runs one optimizer step on `window`, [batch, seq + 1] int32, and waits for it."""
        started = time.perf_counter()
        # Every process has the whole batch.
        rows = jax.make_array_from_callback(window.shape, self._rows, lambda part: window[part])
        self.state, metrics = self._step(self.state, rows)
        loss, dropped = jax.device_get(metrics)
        self.group.check()
        return StepResult(np.float32(loss), int(dropped), time.perf_counter() - started)

    def follow(self, other: Trainer) -> None:
        """Continues from a copy of the parameters and the optimizer's state of `other`."""
        self.state = jax.tree.map(jnp.copy, other.state)

    def _init(self, key: jax.Array) -> tuple[transformer.Params, Any]:
        params = transformer.init_params(key, self._config, self._layers)
        return params, self._optimizer.init(params)

    def _train_step(
        self, state: tuple[transformer.Params, Any], window: jax.Array
    ) -> tuple[tuple[transformer.Params, Any], tuple[jax.Array, jax.Array]]:
        params, optimizer_state = state
        gradient, metrics = jax.grad(self._loss_fn, has_aux=True)(params, window)
        updates, optimizer_state = self._optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), metrics
