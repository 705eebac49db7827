"""`ep.integrations.maxtext` by itself: what it registers, refuses and computes, without MaxText."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup

import ep_runtime as ep
from ep_runtime_client.integrations import maxtext

HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 8, 2
Decoder = enum.Enum("Decoder", "MIXTRAL GPT_OSS LLAMA4")
CONFIG = SimpleNamespace(
    ep_runtime=True,
    micro_batch_size_to_train_on=8,
    micro_batch_size_to_eval_on=24,
    max_target_length=4,
    moe_expert_input_dim=-1,
    emb_dim=HIDDEN,
    num_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    dtype=jnp.dtype("float32"),
    decoder_block=Decoder.MIXTRAL,
    mlp_activations=["silu", "linear"],
    mlp_activations_limit=-1.0,
    load_balance_loss_weight=0.0,
    model_call_mode="",
)


def but(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(CONFIG), **fields})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the last create_group."""
    found: dict[str, Any] = {}

    def create_group(name: str, mesh: Any, **arguments: Any) -> Any:
        found.update(arguments)
        return SimpleNamespace(register_layer=lambda name, top_k: (name, top_k))

    session = SimpleNamespace(create_group=create_group)
    monkeypatch.setattr(maxtext, "connect", lambda: session)
    return found


def test_the_larger_batch_sizes_the_layer(asked: dict[str, Any]) -> None:
    mesh = SimpleNamespace(shape={"data": 1, "fsdp": 2, "tensor": 2, "expert": 4})
    assert maxtext.layer_of(CONFIG, mesh) == ("moe", TOP_K)
    assert (asked["max_tokens_per_rank"], asked["outer_axes"]) == (24 * 4 // 8, ("fsdp",))
    maxtext.layer_of(but(micro_batch_size_to_eval_on=None, moe_expert_input_dim=4), mesh)
    assert (asked["max_tokens_per_rank"], asked["hidden_size"]) == (8 * 4 // 8, 4)


def test_an_axis_that_shards_nothing_known_is_an_error(asked: dict[str, Any]) -> None:
    with pytest.raises(ep.errors.InvalidArgumentError, match="mesh axis 'diloco' to be .*, got 2"):
        maxtext.layer_of(CONFIG, SimpleNamespace(shape={"diloco": 2, "expert": 4}))


def test_every_refused_option_is_an_error_where_it_is_on() -> None:
    maxtext.check_options(CONFIG)
    off = (False, None, "", -1.0, 0, enum.Enum("Off", {"OFF": ""}).OFF)
    on = (True, "int8", 1.25, 2, enum.Enum("On", {"ON": "te_no_quant"}).ON)
    for name, reason in maxtext.REFUSED.items():
        for value in off:
            maxtext.check_options(but(**{name: value}))
        for value in on:
            with pytest.raises(ep.errors.InvalidArgumentError, match=f"{name} to be off, got") as e:
                maxtext.check_options(but(**{name: value}))
            assert str(e.value).endswith(reason)


def test_a_mesh_is_made_and_registered_only_if_asked_for(asked: dict[str, Any]) -> None:
    mesh = SimpleNamespace(shape={"expert": 8})
    make_mesh = maxtext.with_layer(lambda config, devices=None: mesh)
    assert make_mesh(but(ep_runtime=False, te_moe_block=True)) is mesh
    assert not asked
    with pytest.raises(ep.errors.InvalidArgumentError, match="te_moe_block"):
        make_mesh(but(te_moe_block=True))
    assert make_mesh(CONFIG, devices=[]) is mesh
    assert asked["ep_axis"] == "expert"


@maxtext.with_experts
class RoutedMoE:
    """The part of MaxText's RoutedMoE that the module uses."""

    is_hash_routing, rngs, mesh, num_experts, dtype = False, None, None, EXPERTS, jnp.float32

    def __init__(self, config: Any) -> None:
        self.config = config

    def sparse_matmul(self, *args: Any) -> str:
        return "sparse"

    def dense_matmul(self, *args: Any) -> str:
        return "dense"

    def should_update_load_balance(self) -> bool:
        return False

    def get_topk(
        self, logits: Any, pre_bias: Any, rngs: Any, input_ids: Any, forced_routed_experts: Any
    ) -> Any:
        if forced_routed_experts is None:
            return jax.lax.top_k(logits, TOP_K)
        used = (forced_routed_experts >= 0) & (forced_routed_experts < EXPERTS)
        at = jnp.where(used, forced_routed_experts, 0)
        return jnp.take_along_axis(logits, at, -1) * used, forced_routed_experts

    def apply_ffn_activation(self, gate: Any, up: Any) -> Any:
        return jnp.tanh(gate) * up


@pytest.fixture
def layer(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> Any:
    group = make_group(axes={"ep": 4}, num_experts=EXPERTS, max_top_k=TOP_K, max_tokens_per_rank=16)
    found = group.register_layer("moe", top_k=TOP_K)
    monkeypatch.setattr(maxtext, "layer_of", lambda config, mesh: found)
    return found


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({}, jax.nn.silu),
        ({"decoder_block": Decoder.GPT_OSS}, jnp.tanh),
        ({"mlp_activations": ["tanhshrink"]}, jnp.tanh),
    ],
)
@pytest.mark.parametrize("is_forced", [False, True])
def test_experts_are_those_of_maxtexts_router_or_of_a_rollout(
    layer: Any, fields: dict[str, Any], activation: Callable[..., Any], is_forced: bool
) -> None:
    rng = np.random.default_rng(0)
    x, logits = (rng.standard_normal((4, 8, n)).astype(np.float32) for n in (HIDDEN, EXPERTS))
    shapes = [(EXPERTS, HIDDEN, INNER)] * 2 + [(EXPERTS, INNER, HIDDEN)]
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    forced = jnp.asarray(rng.integers(-2, EXPERTS + 2, (4, 8, TOP_K))) if is_forced else None
    block = RoutedMoE(but(**fields))
    compute = jax.jit(
        lambda *arrays: block.sparse_matmul(x, *arrays, None, None, None, None, forced)
    )
    got, loss, updates = compute(logits, None, *weights)
    chosen_weights, chosen = block.get_topk(logits, None, None, None, forced)
    gate, up = (np.einsum("bsh,ehm->bsem", x, each) for each in weights[:2])
    of_all = np.einsum("bsem,emh->bseh", activation(gate) * up, weights[2])
    picked = (np.asarray(chosen)[..., None] == np.arange(EXPERTS)) * np.asarray(chosen_weights)[
        ..., None
    ]
    wanted = np.einsum("bske,bseh->bsh", picked, of_all)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-3)
    assert loss is None
    assert updates is None


def test_maxtexts_own_experts_stay_where_the_option_is_off() -> None:
    block = RoutedMoE(but(ep_runtime=False))
    assert (block.sparse_matmul(), block.dense_matmul()) == ("sparse", "dense")
