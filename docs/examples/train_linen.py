"""Trains a small language model with experts, in flax.linen.

Run `python train_linen.py --folder /tmp/run`: the experts are spread over all GPUs, else over 8 CPU
devices. The same with `--fsdp 2` then goes on from the checkpoint, on another mesh.
"""

import argparse
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding

import ep_runtime as ep

LAYERS, EXPERTS, TOP_K, HIDDEN, MLP, HEADS = 4, 8, 2, 64, 128, 4
VOCAB, SEQ, BATCH, HELD_OUT_BATCH, BF16 = 64, 32, 32, 16, jnp.bfloat16


def dense(columns, names, name):  # computes in bfloat16; its parameters are float32
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    return nn.Dense(columns, use_bias=False, dtype=BF16, kernel_init=init, name=name)


class Block(nn.Module):
    """Attention, then experts; traced once for all layers."""

    stack: ep.LayerStack

    @nn.compact
    def __call__(self, x, layer_index):  # bfloat16 [B, S, H], in which the experts compute too
        heads = dense(3 * HIDDEN, ("embed", "heads"), "qkv")(nn.RMSNorm(dtype=BF16)(x))
        heads = heads.reshape(*x.shape[:2], 3, HEADS, HIDDEN // HEADS)
        mixed = jax.nn.dot_product_attention(*jnp.unstack(heads, axis=2), is_causal=True)
        x = x + dense(HIDDEN, ("heads", "embed"), "out")(mixed.reshape(x.shape))
        moe = ep.linen.MoEBlock(self.stack, MLP, aux_loss_coeff=0.01, name="moe")
        y, aux = moe(nn.RMSNorm(dtype=BF16)(x), layer_index)
        return x + y, aux


class Model(nn.Module):
    stack: ep.LayerStack

    @nn.compact
    def __call__(self, tokens):  # int32 [B, S]
        layers = nn.scan(
            nn.remat(Block, policy=ep.remat_policy(), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x = dense(HIDDEN, ("vocab", "embed"), "embed")(jax.nn.one_hot(tokens, VOCAB))
        x, aux = layers(self.stack, name="blocks")(x, jnp.arange(LAYERS))
        logits = dense(VOCAB, ("embed", "vocab"), "unembed")(nn.RMSNorm(dtype=BF16)(x))
        return logits.astype(jnp.float32), aux.sum()


def make_state(model, optimizer):
    """Training state, saved whole: the masters, the optimizer's moments and the step."""
    params = model.init(jax.random.key(0), jnp.zeros((BATCH, SEQ), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def loss_fn(params, state, window):  # int32 [B, S + 1]
    logits, aux = state.apply_fn({"params": params}, window[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
    return losses.mean() + aux, losses.mean()


@jax.jit(donate_argnums=0)  # the new state takes the old one's memory
def train_step(state, window):
    (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, state, window)
    return state.apply_gradients(grads=grads), loss


evaluate = jax.jit(lambda state, window: loss_fn(state.params, state, window)[1])


def batch(seed, size, rows):
    """Your data here. A batch depends on its step alone, so that a resumed job sees the same."""
    first = np.random.default_rng(seed).integers(VOCAB, size=(size, 1))
    return jax.device_put((first + 3 * np.arange(SEQ + 1, dtype=np.int32)) % VOCAB, rows)


def train(args, group, mesh, rules):
    stack = group.register_layer_stack("blocks/moe", LAYERS, top_k=TOP_K)
    rows = NamedSharding(mesh, rules.spec(("activation_batch",)))
    rate = optax.warmup_cosine_decay_schedule(0, 1e-2, args.steps // 10, args.steps)
    make = partial(make_state, Model(stack), optax.adamw(rate))
    where = rules.shardings(jax.eval_shape(make), mesh)  # by the names of dims
    state = jax.jit(lambda: nn.meta.unbox(make()), out_shardings=where)()
    with ocp.CheckpointManager(args.folder.absolute()) as checkpoints:
        if checkpoints.latest_step() is not None:
            state = checkpoints.restore(None, args=ocp.args.StandardRestore(state))
        for step in range(int(state.step), args.steps):
            state, loss = train_step(state, batch(step, BATCH, rows))
            print(f"step {step} loss {float(loss):.6f}", flush=True)
            if (step + 1) % args.save_every == 0:
                loss = evaluate(state, batch(10**6, HELD_OUT_BATCH, rows))
                print(f"held-out loss {float(loss):.6f}")
                whole = group.check(state)  # raises if a process was lost
                checkpoints.save(step + 1, args=ocp.args.StandardSave(whole))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints")
    parser.add_argument("--fsdp", type=int, default=1, help="devices over which H is sharded")
    parser.add_argument("--rules", default="fsdp+ep", help="or shard-exp-on-fsdp")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # changes nothing on GPUs
    with ep.connect() as session, ep.translate_errors():  # before JAX looks at its devices
        mesh = Mesh(np.array(jax.devices()).reshape(args.fsdp, -1), ("fsdp", "ep"))
        rules = ep.sharding.rules(args.rules).on(mesh)
        sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "max_top_k": TOP_K}
        sizes["max_tokens_per_rank"] = BATCH * SEQ // mesh.size
        group = session.create_group("experts", mesh, rules=rules, **sizes)
        with nn.logical_axis_rules(rules.logical):
            train(args, group, mesh, rules)
