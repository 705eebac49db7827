"""Programs as users write them around the ops, for layers of one transport.

Each takes `Layers` and returns a jitted function of (tokens, topk_idx, weights). Tokens that meet a
layer twice are routed differently, as in a model: XLA makes one call of two equal prepares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import ep_runtime as ep

TOKENS, HIDDEN, TOP_K, EXPERTS = 16, 64, 2, 8


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers of two groups on the same devices.

    Attributes:
        one, alike: two layers with equal settings, of one group.
        stack: three layers of that group.
        other: of a second group, with two halves that have experts of their own.
        rule: of a third one, partitioned by custom_partitioning.
        staged: of a fourth one, whose halves are stages of a pipeline.
        mesh: of the first group.
    """

    one: ep.EpLayer
    alike: ep.EpLayer
    stack: ep.LayerStack
    other: ep.EpLayer
    rule: ep.EpLayer
    staged: ep.EpLayer
    mesh: Mesh


def layers_on(devices: Any, group: Callable[..., Any]) -> Layers:
    """Layers in four groups that `group(name, mesh, **settings)` makes, on a row of devices."""
    mesh = Mesh(np.array(devices), ("ep",))
    halves = Mesh(mesh.devices.reshape(-1, max(mesh.size // 2, 1)), ("dp", "ep"))
    stages = Mesh(halves.devices, ("stage", "ep"))
    first = group("first", mesh)
    return Layers(
        one=first.register_layer("one", top_k=TOP_K),
        alike=first.register_layer("alike", top_k=TOP_K),
        stack=first.register_layer_stack("stack", 3, top_k=TOP_K),
        other=group("second", halves, outer_axes="dp").register_layer("other", top_k=TOP_K),
        rule=group("rule", mesh, partitioning="rule").register_layer("rule", top_k=TOP_K),
        staged=group("staged", stages).register_layer("staged", top_k=TOP_K),
        mesh=mesh,
    )


def block(layer: Any, x: Any, idx: Any, weights: Any, **options: Any) -> Any:
    """Stands in for experts: the sine of the rows, weighted."""
    sent = ep.dispatch(layer, x, idx, weights, **options)
    return ep.combine(layer, sent, jnp.sin(sent.tokens), weights=sent.weights)


def _graded(loss: Callable[..., Any]) -> Any:
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2)))


def scan_with_remat(layers: Layers) -> Any:
    policy = ep.remat_policy(("ep_plan",))

    def loss(x: Any, idx: Any, weights: Any) -> Any:
        def step(x: Any, index: Any) -> Any:
            return x + block(layers.stack[index], x, idx, weights), None

        return jnp.cos(lax.scan(jax.checkpoint(step, policy=policy), x, jnp.arange(3))[0]).sum()

    return _graded(loss)


def interleaved(layers: Layers) -> Any:
    """Runs both dispatches before either combine, also in the other order."""

    def loss(x: Any, idx: Any, weights: Any) -> Any:
        first = ep.dispatch(layers.one, x, idx, weights)
        second = ep.dispatch(layers.alike, jnp.cos(x), idx[:, ::-1], weights)
        late = ep.combine(layers.alike, second, jnp.sin(second.tokens), weights=second.weights)
        early = ep.combine(layers.one, first, jnp.sin(first.tokens), weights=first.weights)
        return (early * late).sum()

    return _graded(loss)


def two_groups(layers: Layers) -> Any:
    def loss(x: Any, idx: Any, weights: Any) -> Any:
        # With equal indices XLA would merge ops of no group, such as gathers of rows.
        y = block(layers.one, x, idx, weights) + block(layers.other, x, idx[:, ::-1], weights)
        return jnp.cos(block(layers.other, y, idx, weights)).sum()

    return _graded(loss)


def rule(layers: Layers) -> Any:
    def loss(x: Any, idx: Any, weights: Any) -> Any:
        return jnp.cos(block(layers.rule, x, idx, weights)).sum()

    return _graded(loss)


def stages(layers: Layers) -> Any:
    """Blocks of two stages, each with its own weights."""
    count = layers.staged.mesh.shape["stage"]
    own = [
        ep.init_moe_params(key, layers.staged, 32)
        for key in jax.random.split(jax.random.key(2), count)
    ]
    params = jax.tree.map(lambda *each: jnp.stack(each), *own)

    def loss(x: Any, params: Any) -> Any:
        def stage(x: Any, own: Any) -> Any:
            return x + ep.moe(layers.staged, x, own)[0]

        x = x.reshape(count, -1, HIDDEN)
        return jnp.cos(jax.vmap(stage, spmd_axis_name="stage")(x, params)).sum()

    @jax.jit
    def run(x: Any, idx: Any, weights: Any) -> Any:
        del idx, weights
        value, (d_x, d_params) = jax.value_and_grad(loss, argnums=(0, 1))(x, params)
        # The mesh of the tokens has no axis to shard the stages' gradients over.
        return value, d_x, jax.tree.map(lambda grad: jnp.square(grad).sum(), d_params)

    return run


def donated(layers: Layers) -> Any:
    step = jax.jit(lambda x, idx, weights: block(layers.one, x, idx, weights), donate_argnums=0)

    def run(x: Any, idx: Any, weights: Any) -> Any:
        return step(step(jnp.copy(x), idx, weights), idx, weights)

    return run


def loops(layers: Layers) -> Any:
    """A while loop whose end is known only on the device, and a branch."""

    @jax.jit
    def run(x: Any, idx: Any, weights: Any) -> Any:
        def turn(state: Any) -> Any:
            return state[0] + 1, block(layers.one, state[1], idx, weights)

        turns = jnp.int32(2) + (x[0, 0] > 1e9)
        y = lax.while_loop(lambda state: state[0] < turns, turn, (0, x))[1]
        branch = lax.cond(y.sum() < 1e9, lambda y: block(layers.alike, y, idx, weights), jnp.cos, y)
        return y, branch

    return run


def moe(layers: Layers) -> Any:
    """Value and gradients of the whole block; the router's gradients use XLA's collectives."""
    params = ep.init_moe_params(jax.random.key(0), layers.one, 32)

    @jax.jit
    def run(x: Any, idx: Any, weights: Any) -> Any:
        del idx, weights  # the block has a router

        def loss(x: Any, params: Any) -> Any:
            y, aux = ep.moe(layers.one, x, params, aux_loss_coeff=0.01)
            return (y * y).sum() + aux

        return jax.value_and_grad(loss, argnums=(0, 1))(x, params)

    return run


def scanned_moe(layers: Layers) -> Any:
    """Layers of blocks as models have them: scanned, and rematerialized on the way back."""
    key = jax.random.key(1)
    own = [ep.init_moe_params(each, layers.one, 32) for each in jax.random.split(key, 3)]
    params = jax.tree.map(lambda *each: jnp.stack(each), *own)

    @jax.jit
    def run(x: Any, idx: Any, weights: Any) -> Any:
        del idx, weights

        def loss(x: Any, params: Any) -> Any:
            def step(x: Any, each: Any) -> Any:
                index, own = each
                return x + ep.moe(layers.stack[index], x, own)[0], None

            kept = jax.checkpoint(step, policy=ep.remat_policy())
            return jnp.cos(lax.scan(kept, x, (jnp.arange(3), params))[0]).sum()

        return jax.value_and_grad(loss, argnums=(0, 1))(x, params)

    return run


def all_reduces(layers: Layers) -> Any:
    """Chains of all-reduces that nothing orders against the ops."""
    spec = PartitionSpec("ep")
    ranks = layers.mesh.size

    def total(big: Any) -> Any:
        # The values differ on every rank: XLA would reduce equal ones without its collective.
        share = (1.0 + lax.axis_index("ep")) / (ranks * (ranks + 1) / 2)
        for _ in range(8):
            big = lax.psum(big * share, "ep")
        return big

    summed = jax.shard_map(total, mesh=layers.mesh, in_specs=spec, out_specs=PartitionSpec())

    def loss(x: Any, idx: Any, weights: Any) -> Any:
        big = jnp.broadcast_to(x.reshape(ranks, -1)[:, None], (ranks, 1024, TOKENS * HIDDEN))
        y = x
        for turn in range(4):
            y = block(layers.one, y, (idx + turn) % EXPERTS, weights)
        return jnp.cos(y).sum() + summed(big).sum() / 1024

    return _graded(loss)


PROGRAMS = (
    scan_with_remat,
    interleaved,
    two_groups,
    rule,
    stages,
    donated,
    loops,
    moe,
    scanned_moe,
    all_reduces,
)
