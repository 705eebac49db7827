"""`python -m ep_runtime_bench.train.client`: one subject trains one model, in a fresh process."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime_bench.base import clients, energy
from ep_runtime_bench.base.train_cases import FIRST, ROUND, Committed, Trained, TrainOrder
from ep_runtime_bench.moe.client import recipe_of
from ep_runtime_bench.moe.measuring import create_group, peak_bytes, planned_bytes, profiled
from ep_runtime_bench.train import model as models
from ep_runtime_client.groups import estimate
from ep_runtime_client.groups.group import Group
from ep_runtime_client.jobs.members import Member, start_jax

PROFILED_WARM = 6

Clock = Callable[[], float]
SAVED = {
    "default": ep.remat_policy,
    "plan": lambda: ep.remat_policy(("ep_plan",)),
    "rows": lambda: ep.remat_policy(("ep_plan", "ep_recv")),
}


def measure(order: TrainOrder, told: Callable[[str], object], clock: Clock) -> Trained:
    """Builds, compiles and trains; `told(stage)` returns when it may continue."""
    # Connect before JAX starts, because connect chooses XLA's threads.
    with nullcontext() if order.is_stock else ep.connect(order.address) as session:
        start_jax(order.devices, Member(), order.platform)
        devices = np.array(jax.devices(order.platform)[: order.devices])
        mesh = Mesh(devices.reshape([*order.axes.values()]), [*order.axes])
        told(clients.READY)
        place = models.Layout.of(mesh)
        group = None if session is None else create_group(order, order.model.case, mesh, session)
        training = _Training(order, place, group)
        told(clients.COMPILED)
        losses = [training.step() for _ in range(FIRST)]
        step_s = [training.timed(clock) for _ in range(order.repeats)]
        counted = order.devices if order.platform == "gpu" else 0
        found = Trained(
            step_s,
            [float(loss) for loss in losses],
            peak_bytes(order.platform, order.devices),
            estimate.staging_bytes(group.spec) if group and order.subject != "xla" else 0,
            planned_bytes(training.program),
            profiled(training.program, training.step, PROFILED_WARM),
            energy.joules_per_step(counted, training.run, step_s[-1]),
            _committed(order, training, session, clock) if session and order.commit_every else None,
        )
        if group is not None:
            group.check()  # a failed call ends at once, so its time would look good
        return found


def _committed(
    order: TrainOrder, training: _Training, session: ep.Session, clock: Clock
) -> Committed:
    """Trains without copies of the state and with them, in turns."""
    kept = ep.distributed.State(session)

    def ended() -> float:
        kept.wait()
        return clock()

    for step in range(2):  # allocate the two copies
        kept.commit(step, training.state)
    kept.wait()
    without_s, with_s, copy_s = [], [], []
    with ThreadPoolExecutor(1) as thread:
        for number in range(order.repeats):
            without_s.append(training.timed(clock, order.commit_every))
            started = clock()
            kept.commit(2 + number, training.state)
            copied = thread.submit(ended)
            training.run(order.commit_every)
            copy_s.append(copied.result() - started)
            with_s.append((clock() - started) / order.commit_every)
    kept.release()
    copied_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(training.state))
    return Committed(without_s, with_s, copy_s, copied_bytes)


class _Training:
    """A compiled step, and the weights and batches for the next step."""

    def __init__(self, order: TrainOrder, place: models.Layout, group: Group | None) -> None:
        model = order.model
        quantize = None
        if group is None:
            block = models.stock_block(model, place)
        else:
            stack = group.register_layer_stack("blocks", model.layers, top_k=model.top_k)
            recipe = recipe_of(order.recipe)
            if order.quantized == "step":
                quantize, recipe = models.quantized_once(stack, place, recipe), None
            block = models.our_block(stack, place, recipe)
        self._params = models.make_params(model, jnp.dtype(order.dtype), place)
        optimizer = models.make_optimizer()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._params)
        shapes = jax.eval_shape(optimizer.init, self._params)
        self._state = jax.jit(optimizer.init, out_shardings=_like(shapes, self._params, shardings))(
            self._params
        )
        self._batches = itertools.cycle(models.batches(model, place, order.devices))
        self._experts = models.experts_of(order, place)
        step = models.make_step(model, place, block, _again(order), quantize)
        jitted: Any = jax.jit(step, donate_argnums=(0, 1))
        self.program = jitted.lower(*self._next()).compile()

    def _next(self) -> tuple[Any, ...]:
        return self._params, self._state, next(self._batches), self._experts

    @property
    def state(self) -> Any:
        """Weights and the optimizer's state, until the next step."""
        return self._params, self._state

    def step(self) -> jax.Array:
        """Enqueues one step; returns its loss."""
        self._params, self._state, loss = self.program(*self._next())
        return loss

    def run(self, steps: int) -> None:
        """Runs consecutive steps, and waits for them."""
        jax.block_until_ready([self.step() for _ in range(steps)][-1])

    def timed(self, clock: Clock, steps: int = ROUND) -> float:
        """Returns the seconds of a step, averaged over consecutive steps."""
        jax.block_until_ready(self._params)
        started = clock()
        self.run(steps)
        return (clock() - started) / steps


def _like(shapes: Any, params: Any, shardings: Any) -> Any:
    """Returns the optimizer state's shardings: a moment has its weight's, others are replicated."""
    found = jax.tree.leaves(shardings)
    sizes = [leaf.shape for leaf in jax.tree.leaves(params)]
    weights = dict(zip(sizes, found, strict=True))
    whole = jax.sharding.NamedSharding(found[0].mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda leaf: weights.get(leaf.shape, whole), shapes)


def _again(order: TrainOrder) -> Callable[[Any], Any]:
    """Returns a function that wraps a layer's body in the order's remat."""
    if order.remat == "none":
        return lambda body: body
    if order.is_stock:
        return jax.checkpoint
    return functools.partial(jax.checkpoint, policy=SAVED[order.remat]())


if __name__ == "__main__":
    sys.exit(clients.report(measure, TrainOrder.from_dict(json.loads(sys.argv[1]))))
