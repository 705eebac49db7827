"""A training job: 24 scanned layers with experts, any mesh, evaluation, checkpoints by orbax.

    python train.py --mesh dp=2,fsdp=2,ep=2 --steps 9 --save-at 3 --save /tmp/saved
    python train.py --mesh fsdp=2,ep=4 --steps 6 --restore /tmp/saved

The second job may run on another mesh and under another daemon: a checkpoint holds arrays alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

import ep_runtime as ep

LAYERS, EXPERTS, HIDDEN, MLP, HEADS, VOCAB, SEQ, BATCH = 24, 8, 32, 32, 2, 32, 16, 16


def linear(rows: int, columns: int, names: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.Linear(rows, columns, use_bias=False, kernel_init=kernel_init, rngs=rngs)


class Block(nnx.Module):
    """Attention, then experts; one of these is traced for all layers."""

    def __init__(self, stack: ep.LayerStack, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.qkv = linear(HIDDEN, 3 * HIDDEN, ("embed", "heads"), rngs)
        self.out = linear(HIDDEN, HIDDEN, ("heads", "embed"), rngs)
        self.moe_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.moe = ep.nnx.MoEBlock(stack, MLP, rngs=rngs, aux_loss_coeff=0.01)

    def __call__(self, x: jax.Array, layer_index: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], 3, HEADS, HIDDEN // HEADS)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        y, aux = self.moe(self.moe_norm(x), layer_index)
        return x + y, aux


class Model(nnx.Module):
    def __init__(self, stack: ep.LayerStack, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(stack, rngs)

        self.embed = linear(VOCAB, HIDDEN, ("vocab", "embed"), rngs)
        self.blocks = make_blocks(rngs)
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.unembed = linear(HIDDEN, VOCAB, ("embed", "vocab"), rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        @nnx.scan(
            in_axes=(0, 0, nnx.Carry),
            out_axes=(nnx.Carry, 0),
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        @nnx.remat(policy=ep.remat_policy())
        def layers(block: Block, layer_index: jax.Array, x: jax.Array) -> Any:
            return block(x, layer_index)

        x = self.embed(jax.nn.one_hot(tokens, VOCAB))
        x, aux = layers(self.blocks, jnp.arange(LAYERS), x)
        return self.unembed(self.norm(x)), aux.sum()


class State(nnx.Module):
    """What is saved: the model and its optimizer's moments."""

    def __init__(self, stack: ep.LayerStack) -> None:
        self.model = Model(stack, nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(3e-3), wrt=nnx.Param)


def loss_fn(model: Model, window: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(loss to train on, cross entropy); window int32 [B, S + 1]."""
    logits, aux = model(window[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
    return losses.mean() + aux, losses.mean()


@nnx.jit
def train_step(state: State, window: jax.Array) -> jax.Array:
    (_, loss), grads = nnx.value_and_grad(loss_fn, has_aux=True)(state.model, window)
    state.optimizer.update(state.model, grads)
    return loss


@nnx.jit
def evaluate(model: Model, window: jax.Array) -> jax.Array:
    return loss_fn(model, window)[1]


def batches(sharding: NamedSharding, first: int, size: int) -> Iterator[jax.Array]:
    """Windows of a sequence that repeats after six tokens, from step `first` on."""
    while True:
        period = np.random.default_rng(first).integers(VOCAB, size=(size, 6))
        yield jax.device_put(np.tile(period, 4)[:, : SEQ + 1].astype(np.int32), sharding)
        first += 1


def run(args: argparse.Namespace, session: ep.Session, mesh: Mesh, rules: Any) -> None:
    group = session.create_group(
        "experts",
        mesh,
        **rules.group_axes(mesh),
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=BATCH * SEQ // mesh.size,
        max_top_k=2,
        max_token_dtype="float32",
        alignment=8,
    )
    stack = group.register_layer_stack("blocks/moe", LAYERS, top_k=2)
    rows = NamedSharding(mesh, rules.spec(("activation_batch",)))

    state = nnx.jit(lambda: State(stack))()  # made sharded, as rules say
    step = 0
    with ocp.StandardCheckpointer() as checkpointer:
        if args.restore:
            graph, arrays = nnx.split(state)
            state = nnx.merge(graph, checkpointer.restore(args.restore, arrays))
            step = int(state.optimizer.step[...])
        for window, _ in zip(batches(rows, step, BATCH), range(args.steps), strict=False):
            print(f"step {step} loss {float(train_step(state, window)):.6f}", flush=True)
            step += 1
            if args.save and step == args.save_at:
                held_out = next(batches(rows, first=10**6, size=BATCH // 2))
                print(f"held-out loss {float(evaluate(state.model, held_out)):.6f}")
                checkpointer.save(args.save, group.check(nnx.state(state)))  # never of a lost peer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=2,fsdp=2,ep=2")
    parser.add_argument("--rules", default="fsdp+ep")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--save-at", type=int, default=3)
    parser.add_argument("--restore", type=Path)
    args = parser.parse_args()
    axes = {name: int(size) for name, size in (part.split("=") for part in args.mesh.split(","))}
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(np.prod([*axes.values()])))
    with ep.connect() as session, ep.translate_errors():
        auto = (AxisType.Auto,) * len(axes)
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)
        rules = ep.sharding.rules(args.rules).on(mesh)
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules.logical):
            run(args, session, mesh, rules)


if __name__ == "__main__":
    main()
