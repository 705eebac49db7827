"""Trains a small language model with experts, in flax.nnx.

Run `python train_nnx.py --folder /tmp/run`: the experts are spread over all GPUs, else over 8 CPU
devices. The same with `--fsdp 2` then goes on from the checkpoint, on another mesh.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

import ep_runtime as ep

LAYERS, EXPERTS, TOP_K, HIDDEN, MLP, HEADS = 4, 8, 2, 64, 128, 4
VOCAB, SEQ, BATCH, HELD_OUT_BATCH, BF16 = 64, 32, 32, 16, jnp.bfloat16


def linear(rows, columns, names, rngs):  # computes in bfloat16; its parameters are float32
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.Linear(rows, columns, use_bias=False, dtype=BF16, kernel_init=init, rngs=rngs)


class Block(nnx.Module):  # traced once for all layers
    def __init__(self, stack, rngs):
        self.attention_norm = nnx.RMSNorm(HIDDEN, dtype=BF16, rngs=rngs)
        self.qkv = linear(HIDDEN, 3 * HIDDEN, ("embed", "heads"), rngs)
        self.out = linear(HIDDEN, HIDDEN, ("heads", "embed"), rngs)
        self.moe_norm = nnx.RMSNorm(HIDDEN, dtype=BF16, rngs=rngs)
        self.moe = ep.nnx.MoEBlock(stack, MLP, rngs=rngs, aux_loss_coeff=0.01)

    def __call__(self, x, layer_index):  # bfloat16 [B, S, H], in which the experts compute too
        heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], 3, HEADS, HIDDEN // HEADS)
        mixed = jax.nn.dot_product_attention(*jnp.unstack(heads, axis=2), is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        y, aux = self.moe(self.moe_norm(x), layer_index)
        return x + y, aux


class Model(nnx.Module):
    def __init__(self, stack, rngs):
        make = nnx.vmap(partial(Block, stack), transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        self.embed = linear(VOCAB, HIDDEN, ("vocab", "embed"), rngs)
        self.norm = nnx.RMSNorm(HIDDEN, dtype=BF16, rngs=rngs)
        self.unembed = linear(HIDDEN, VOCAB, ("embed", "vocab"), rngs)

    def __call__(self, tokens):  # int32 [B, S]
        layer = nnx.remat(Block.__call__, policy=ep.remat_policy())
        layers = nnx.scan(layer, in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        x = self.embed(jax.nn.one_hot(tokens, VOCAB))
        x, aux = layers(self.blocks, x, jnp.arange(LAYERS))
        return self.unembed(self.norm(x)).astype(jnp.float32), aux.sum()


class State(nnx.Module):  # what is trained and saved
    def __init__(self, stack, steps):
        self.model = Model(stack, nnx.Rngs(0))
        rate = optax.warmup_cosine_decay_schedule(0, 1e-2, steps // 10, steps)
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(rate), wrt=nnx.Param)


def loss_fn(model, window):  # int32 [B, S + 1]
    logits, aux = model(window[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
    return losses.mean() + aux, losses.mean()


@nnx.jit(donate_argnums=0)  # the new state takes the old one's memory
def train_step(state, window):
    (_, loss), grads = nnx.value_and_grad(loss_fn, has_aux=True)(state.model, window)
    state.optimizer.update(state.model, grads)
    return loss


evaluate = nnx.jit(lambda model, window: loss_fn(model, window)[1])


def batch(seed, size, rows):
    """Your data here. A batch depends on its step alone, so that a resumed job sees the same."""
    first = np.random.default_rng(seed).integers(VOCAB, size=(size, 1))
    return jax.device_put((first + 3 * np.arange(SEQ + 1, dtype=np.int32)) % VOCAB, rows)


def train(args, group, mesh, rules):
    stack = group.register_layer_stack("blocks/moe", LAYERS, top_k=TOP_K)
    rows = NamedSharding(mesh, rules.spec(("activation_batch",)))
    state = nnx.jit(lambda: State(stack, args.steps))()  # made sharded, as the rules say
    with ocp.CheckpointManager(args.folder.absolute()) as checkpoints:
        if checkpoints.latest_step() is not None:
            like = ocp.args.StandardRestore(nnx.state(state))
            nnx.update(state, checkpoints.restore(None, args=like))
        for step in range(int(state.optimizer.step[...]), args.steps):
            loss = train_step(state, batch(step, BATCH, rows))
            print(f"step {step} loss {float(loss):.6f}", flush=True)
            if (step + 1) % args.save_every == 0:
                loss = evaluate(state.model, batch(10**6, HELD_OUT_BATCH, rows))
                print(f"held-out loss {float(loss):.6f}")
                whole = group.check(nnx.state(state))  # raises if a process was lost
                checkpoints.save(step + 1, args=ocp.args.StandardSave(whole))


def main(argv=None, address=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints")
    parser.add_argument("--fsdp", type=int, default=1, help="devices over which H is sharded")
    parser.add_argument("--rules", default="fsdp+ep", help="or shard-exp-on-fsdp")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args(argv)
    with ep.connect(address) as session, ep.translate_errors():  # before JAX looks at its devices
        mesh = Mesh(np.array(jax.devices()).reshape(args.fsdp, -1), ("fsdp", "ep"))
        rules = ep.sharding.rules(args.rules).on(mesh)
        sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "max_top_k": TOP_K}
        sizes["max_tokens_per_rank"] = BATCH * SEQ // mesh.size
        group = session.create_group("experts", mesh, rules=rules, **sizes)
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules.logical):
            train(args, group, mesh, rules)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # changes nothing on GPUs
    main()
