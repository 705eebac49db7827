"""Trains a small language model with experts, in plain JAX.

Run `python train_jax.py --folder /tmp/run`: the experts are spread over all GPUs, else over 8 CPU
devices. The same with `--fsdp 2` then goes on from the checkpoint, on another mesh.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

import ep_runtime as ep

LAYERS, EXPERTS, TOP_K, HIDDEN, MLP, HEADS = 4, 8, 2, 64, 128, 4
VOCAB, SEQ, BATCH, HELD_OUT_BATCH, BF16 = 64, 32, 32, 16, jnp.bfloat16


def init_layer(key, stack):
    qkv, out, moe = jax.random.split(key, 3)
    return {
        "qkv": jax.random.normal(qkv, (HIDDEN, 3 * HIDDEN)) * HIDDEN**-0.5,
        "out": jax.random.normal(out, (HIDDEN, HIDDEN)) * HIDDEN**-0.5,
        "moe": ep.init_moe_params(moe, stack, MLP),
    }


def init_params(key, stack):
    """The masters, float32; the layers' are stacked on dim 0."""
    keys = jax.random.split(key, LAYERS + 2)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, HIDDEN)),
        "layers": jax.vmap(lambda key: init_layer(key, stack))(keys[2:]),
        "unembed": jax.random.normal(keys[1], (HIDDEN, VOCAB)) * HIDDEN**-0.5,
    }


def norm(x):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def model(params, tokens, stack, rules):  # int32 [B, S]
    def layer(x, given):  # bfloat16 [B, S, H], in which the experts compute too
        own, i = given
        heads = norm(x) @ own["qkv"].astype(BF16)
        heads = heads.reshape(*x.shape[:2], 3, HEADS, HIDDEN // HEADS)
        mixed = jax.nn.dot_product_attention(*jnp.unstack(heads, axis=2), is_causal=True)
        x = x + mixed.reshape(x.shape) @ own["out"].astype(BF16)
        # Inside jit nothing else tells ep.moe how its weights are sharded.
        y, aux = ep.moe(stack[i], norm(x), own["moe"], aux_loss_coeff=0.01, params_spec=rules)
        return x + y, aux

    x = params["embed"].astype(BF16)[tokens]
    layer = jax.checkpoint(layer, policy=ep.remat_policy())
    x, aux = jax.lax.scan(layer, x, (params["layers"], jnp.arange(LAYERS)))
    return (norm(x) @ params["unembed"].astype(BF16)).astype(jnp.float32), aux.sum()


def make_functions(stack, rules, steps):
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, steps // 10, steps))

    def init():
        params = init_params(jax.random.key(0), stack)
        return {"params": params, "moments": optimizer.init(params), "step": jnp.int32(0)}

    def loss_fn(params, window):  # int32 [B, S + 1]
        logits, aux = model(params, window[:, :-1], stack, rules)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
        return losses.mean() + aux, losses.mean()

    def step(state, window):
        params = state["params"]
        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, window)
        updates, moments = optimizer.update(grads, state["moments"], params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "moments": moments, "step": state["step"] + 1}, loss

    return init, step, lambda state, window: loss_fn(state["params"], window)[1]


def batch(seed, size, rows):
    """Your data here. A batch depends on its step alone, so that a resumed job sees the same."""
    first = np.random.default_rng(seed).integers(VOCAB, size=(size, 1))
    return jax.device_put((first + 3 * np.arange(SEQ + 1, dtype=np.int32)) % VOCAB, rows)


def train(args, group, mesh, rules):
    stack = group.register_layer_stack("blocks/moe", LAYERS, top_k=TOP_K)
    rows = NamedSharding(mesh, rules.spec(("activation_batch",)))
    init, step, evaluate = make_functions(stack, rules, args.steps)
    where = rules.shardings(jax.eval_shape(init), mesh)  # all but the experts: on every device
    state = jax.jit(init, out_shardings=where)()
    # Donated: the new state takes the old one's memory.
    train_step = jax.jit(step, donate_argnums=0, out_shardings=(where, None))
    evaluate = jax.jit(evaluate)
    with ocp.CheckpointManager(args.folder.absolute()) as checkpoints:
        if checkpoints.latest_step() is not None:
            state = checkpoints.restore(None, args=ocp.args.StandardRestore(state))
        for step in range(int(state["step"]), args.steps):
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
        train(args, group, mesh, rules)
