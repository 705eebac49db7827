"""`train_tunix.py SETTINGS`: ten steps of a small Qwen3-MoE with tunix' trainer; prints losses.

SETTINGS is JSON, see `test_trainers.py`; with `ours` the code of the page comes first. With
`replay` it prints what one step of GRPO replays instead.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import doc_pages
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import algo_core, common
from tunix.rl.grpo import grpo_learner
from tunix.sft import hooks, peft_trainer

import ep_runtime as ep

PAGE = doc_pages.ROOT / "docs/integrations/tunix.md"
REPLAY = doc_pages.ROOT / "docs/post-training.md"
BATCH, LENGTH, VOCAB = 16, 32, 256


class Losses(hooks.TrainingHooks):
    def __init__(self) -> None:
        self.of_steps: list[float] = []

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        self.of_steps.append(float(train_loss))

    def on_train_start(self, train_ctx: Any) -> None: ...
    def on_train_end(self, train_ctx: Any) -> None: ...
    def on_train_step_start(self, train_ctx: Any) -> None: ...
    def on_eval_step_start(self, train_ctx: Any) -> None: ...
    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None: ...


def make_config(settings: dict[str, Any]) -> qwen3.ModelConfig:
    return qwen3.ModelConfig(
        num_layers=2,
        vocab_size=VOCAB,
        embed_dim=64,
        hidden_dim=64,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        num_experts=8,
        num_experts_per_tok=2,
        dtype=jnp.dtype(settings["dtype"]),
        remat_config=qwen3.RematConfig[settings["remat"]],
    )


def make_model(config: qwen3.ModelConfig) -> qwen3.Qwen3:
    """Sharded as tunix has it; of the size of trained weights, so that experts have a say."""

    @nnx.jit
    def made() -> qwen3.Qwen3:
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
        model.embedder.input_embedding[...] *= 100.0
        for layer in model.layers:
            for weights in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                weights[...] *= 10.0
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    return made()


def batches(steps: int) -> Any:
    random = np.random.default_rng(0)
    for _ in range(steps):
        first = random.integers(VOCAB, size=(BATCH, 1))
        tokens = (first + 3 * np.arange(LENGTH)) % VOCAB
        yield peft_trainer.TrainingInput(
            input_tokens=tokens.astype(np.int32), input_mask=np.ones((BATCH, LENGTH), bool)
        )


def model_input(batch: Any) -> dict[str, Any]:
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": positions,
        "attention_mask": jnp.broadcast_to(causal, (BATCH, LENGTH, LENGTH)),
    }


def page_names() -> dict[str, Any]:
    (block,) = (one for one in doc_pages.blocks(PAGE) if one.language == "python")
    names: dict[str, Any] = {}
    exec(compile(block.code, str(PAGE), "exec"), names)
    return names


class DenseLayer(qwen3.MoELayer):
    """Applies every expert to every token, weighted by the choice that the model carries."""

    def __call__(self, x: jax.Array) -> jax.Array:
        picked = (self.chosen[...][..., None] == jnp.arange(self.num_experts)).any(-2)
        scores = self.router(x).astype(jnp.float32)
        shares = jax.nn.softmax(jnp.where(picked, scores, -jnp.inf))
        gate, up = (jnp.einsum("btd,edf->btef", x, w[...]) for w in (self.gate_proj, self.up_proj))
        return jnp.einsum("bte,btef,efd->btd", shares, jax.nn.silu(gate) * up, self.down_proj[...])


def rollouts(model: qwen3.Qwen3, prompts: jax.Array, length: int) -> jax.Array:
    """Tokens drawn after prompts, from forward passes over whole rows."""
    step = nnx.jit(lambda model, tokens: model(tokens, **places(tokens))[0])
    tokens = jnp.pad(prompts, ((0, 0), (0, length - prompts.shape[1])))
    for place in range(prompts.shape[1], length):
        logits = step(model, tokens)[:, place - 1, 2:]  # 0 and 1 are padding and the end
        drawn = 2 + jax.random.categorical(jax.random.key(place), logits)
        tokens = tokens.at[:, place].set(drawn)
    return tokens


def places(tokens: jax.Array) -> dict[str, Any]:
    batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=jnp.ones_like(tokens, bool))
    found = model_input(batch)
    del found["input_tokens"], found["input_mask"]
    return {**found, "cache": None}


def replay(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs one step of GRPO on rollouts of an older policy, and one with experts
    computed densely.
    """
    names = {**globals(), **page_names()}
    for block in doc_pages.blocks(REPLAY):
        if "class MoELayer" in block.code:
            exec(compile(block.code, str(REPLAY), "exec"), names)
    session = ep.connect()
    mesh = jax.make_mesh(settings["mesh"], ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    config = make_config(settings)
    names["register"](session, config, mesh, BATCH * LENGTH)
    prompt = LENGTH // 2
    with mesh:
        qwen3.MoELayer = names["MoELayer"]
        older, policy = make_model(config), make_model(config)
        for block in policy.layers:  # newer weights choose other experts
            kernel = block.mlp.router.kernel
            kernel[...] += 0.5 * jax.random.normal(jax.random.key(7), kernel.shape)
        prompts = jax.random.randint(jax.random.key(1), (BATCH // 4, prompt), 2, VOCAB)
        tokens = rollouts(older, jnp.repeat(prompts, 4, 0), LENGTH)
        where = places(tokens)
        how = (tokens, where["positions"], where["attention_mask"])
        choices, todays = (names["recorded"](model, *how) for model in (older, policy))
        rewards = (tokens[:, prompt:] % 2 == 0).mean(-1)
        advantages = algo_core.compute_advantages(rewards, 4)
        example = common.TrainExample(
            prompt_ids=tokens[:, :prompt],
            prompt_mask=jnp.ones((BATCH, prompt), bool),
            completion_ids=tokens[:, prompt:],
            completion_mask=jnp.ones((BATCH, LENGTH - prompt), bool),
            advantages=advantages,
            ref_per_token_logps=None,
            old_per_token_logps=None,
        )
        algorithm = grpo_learner.GRPOConfig(num_generations=4, beta=0.0)
        algorithm.temperature = 1.0  # the learner sets them

        def loss(model: qwen3.Qwen3) -> jax.Array:
            return algo_core.grpo_loss_fn(model, example, algorithm, 0, 1)[0]

        names["replay"](policy, choices)
        found = []
        for kind in (names["MoELayer"], DenseLayer):
            for block in policy.layers:
                block.mlp.__class__ = kind
            value, grads = nnx.jit(nnx.value_and_grad(loss))(policy)
            routers = [grads["layers"][i]["mlp"]["router"]["kernel"][...] for i in range(2)]
            found.append((value, jnp.stack(routers)))
        (mine, router), (dense, wanted) = found
        carried = [block.mlp.chosen[...] for block in policy.layers]
    same = [bool((a == b).all()) for a, b in zip(choices, carried, strict=True)]
    moved = [float((a != b).any(-1).mean()) for a, b in zip(choices, todays, strict=True)]
    return {
        "replayed": all(same),
        "share_that_would_move": min(moved),
        "losses": [float(mine), float(dense)],
        "router_gradient": float(jnp.abs(wanted).max()),
        "router_gradients_apart": float(jnp.abs(router - wanted).max()),
    }


def main(settings: dict[str, Any]) -> None:
    session = ep.connect() if settings["ours"] else None
    mesh = jax.make_mesh(settings["mesh"], ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    config = make_config(settings)
    if session is not None:
        page_names()["register"](session, config, mesh, BATCH * LENGTH)
    with mesh:  # tunix looks for it there
        model = make_model(config)
        if settings["lora"]:
            rules = qwix.LoraProvider(module_path=".*(q_proj|o_proj|router)", rank=4, alpha=8.0)
            first = model_input(next(batches(1)))
            del first["input_mask"]
            model = qwix.apply_lora_to_model(model, rules, **first, cache=None)
        accumulated = settings["accumulated"]
        chosen = peft_trainer.TrainingConfig(
            eval_every_n_steps=1000,
            max_steps=10,
            gradient_accumulation_steps=accumulated if accumulated > 1 else None,
        )
        # Adam turns a gradient of mere rounding errors into a full step.
        optimizer = optax.sgd(0.02, momentum=0.9)
        trainer = peft_trainer.PeftTrainer(model, optimizer, chosen)
        trainer = trainer.with_gen_model_input_fn(model_input)
        losses = Losses()
        trainer.with_training_hooks(losses)
        trainer.train(batches(10 * accumulated))
    sys.stdout.write(f"{json.dumps(losses.of_steps)}\n")


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    if chosen.pop("replay", False):
        sys.stdout.write(f"{json.dumps(replay(chosen))}\n")
    else:
        main(chosen)
