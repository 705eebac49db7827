"""`train_tunix.py SETTINGS`: ten steps of a small Qwen3-MoE with tunix' trainer; prints losses.

SETTINGS is JSON, see `test_tunix.py`; with `ours` the code of the page comes first.
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
from tunix.sft import hooks, peft_trainer

import ep_runtime as ep

PAGE = doc_pages.ROOT / "docs/integrations/tunix.md"
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


def main(settings: dict[str, Any]) -> None:
    session = ep.connect() if settings["ours"] else None
    mesh = jax.make_mesh(settings["mesh"], ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    config = make_config(settings)
    if session is not None:
        (block,) = (one for one in doc_pages.blocks(PAGE) if one.language == "python")
        names: dict[str, Any] = {}
        exec(compile(block.code, str(PAGE), "exec"), names)
        names["register"](session, config, mesh, BATCH * LENGTH)
    with mesh:  # where tunix looks for it
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
        # Adam makes a whole step of a gradient that is nothing but rounding.
        optimizer = optax.sgd(0.02, momentum=0.9)
        trainer = peft_trainer.PeftTrainer(model, optimizer, chosen)
        trainer = trainer.with_gen_model_input_fn(model_input)
        losses = Losses()
        trainer.with_training_hooks(losses)
        trainer.train(batches(10 * accumulated))
    sys.stdout.write(f"{json.dumps(losses.of_steps)}\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
