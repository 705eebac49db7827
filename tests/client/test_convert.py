"""`ep.convert`: names and forms of checkpoints, bit for bit, and errors that name what is wrong."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep

EXPERTS, HIDDEN, INNER = 3, 6, 4
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
# Per family: the block, its router, and the names of gate, up and down.
NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
FAMILIES = [*NAMES, "gpt_oss"]


def bits(*shape: int, dtype: Any, seed: int) -> Any:
    """Every bit pattern may occur: NaNs with payloads, infinities, signed zeros."""
    width = np.dtype(dtype).itemsize
    drawn = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * width), np.uint8)
    return drawn.view(dtype)


def checkpoint(family: str, dtype: Any = jnp.bfloat16, layer: int = 2) -> dict[str, Any]:
    """One layer by the names of the files of each family's first release."""
    if family == "gpt_oss":
        start = f"model.layers.{layer}.mlp"
        shapes = {
            "router.weight": (EXPERTS, HIDDEN),
            "router.bias": (EXPERTS,),
            "experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER),
            "experts.gate_up_proj_bias": (EXPERTS, 2 * INNER),
            "experts.down_proj": (EXPERTS, INNER, HIDDEN),
            "experts.down_proj_bias": (EXPERTS, HIDDEN),
        }
    else:
        block, gate, up, down = NAMES[family]
        start = f"model.layers.{layer}.{block}"
        shapes = {"gate.weight": (EXPERTS, HIDDEN)}
        for i in range(EXPERTS):
            shapes |= {
                f"experts.{i}.{gate}.weight": (INNER, HIDDEN),
                f"experts.{i}.{up}.weight": (INNER, HIDDEN),
                f"experts.{i}.{down}.weight": (HIDDEN, INNER),
            }
    return {
        f"{start}.{name}": bits(*shape, dtype=dtype, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def equal_bits(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    one, other = (np.ascontiguousarray(each).view(np.uint8) for each in (got, want))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_comes_back_bit_for_bit(family: str, dtype: Any) -> None:
    given = checkpoint(family, dtype)
    beside = {**checkpoint(family, dtype, layer=0), "model.embed_tokens.weight": np.zeros(3)}
    params = ep.convert.from_hf(family, {**beside, **given}, layer=2)
    assert params.router.shape == (HIDDEN, EXPERTS)
    assert params.wi.shape == (EXPERTS, HIDDEN, 2, INNER)
    assert params.wo.shape == (EXPERTS, INNER, HIDDEN)
    back = ep.convert.to_hf(family, params, layer=2)
    assert back.keys() == given.keys()
    for name, array in given.items():
        equal_bits(back[name], array)
        assert back[name].flags.c_contiguous


def test_matrices_stand_where_the_block_reads_them() -> None:
    given = checkpoint("mixtral", np.float32)
    params = ep.convert.from_hf("mixtral", given, layer=2)
    start = "model.layers.2.block_sparse_moe"
    equal_bits(params.router, given[f"{start}.gate.weight"].T)
    equal_bits(params.wi[1, :, 0], given[f"{start}.experts.1.w1.weight"].T)
    equal_bits(params.wi[1, :, 1], given[f"{start}.experts.1.w3.weight"].T)
    equal_bits(params.wo[1], given[f"{start}.experts.1.w2.weight"].T)


def test_gpt_oss_has_gate_and_up_in_turns_and_biases() -> None:
    given = checkpoint("gpt_oss", np.float32)
    params = ep.convert.from_hf("gpt_oss", given, layer=2)
    start = "model.layers.2.mlp"
    for half in (0, 1):
        equal_bits(params.wi[:, :, half], given[f"{start}.experts.gate_up_proj"][..., half::2])
        equal_bits(params.wi_bias[:, half], given[f"{start}.experts.gate_up_proj_bias"][:, half::2])
    equal_bits(params.wo, given[f"{start}.experts.down_proj"])
    equal_bits(params.wo_bias, given[f"{start}.experts.down_proj_bias"])
    equal_bits(params.router, given[f"{start}.router.weight"].T)
    equal_bits(params.router_bias, given[f"{start}.router.bias"])


@pytest.mark.parametrize("family", NAMES)
def test_what_transformers_stacks_in_memory_is_the_same(family: str) -> None:
    given = checkpoint(family)
    block, gate, up, down = NAMES[family]
    start = f"model.layers.2.{block}"

    def stacked(name: str) -> Any:
        return np.stack([given[f"{start}.experts.{i}.{name}.weight"] for i in range(EXPERTS)])

    in_memory = {
        "model.layers.2.mlp.gate.weight": given[f"{start}.gate.weight"],
        "model.layers.2.mlp.experts.gate_up_proj": np.concatenate([stacked(gate), stacked(up)], 1),
        "model.layers.2.mlp.experts.down_proj": stacked(down),
    }
    wanted = ep.convert.from_hf(family, given, layer=2)
    jax.tree.map(equal_bits, ep.convert.from_hf(family, in_memory, layer=2), wanted)


@pytest.mark.usefixtures("optimized")  # otherwise a fusion may lose bits of a NaN
@pytest.mark.parametrize("family", FAMILIES)
def test_other_forms_of_wi_are_written_alike(family: str) -> None:
    given = checkpoint(family)
    params = ep.convert.from_hf(family, given, layer=2)
    wi, bias = params.wi, params.wi_bias
    fused = (wi.reshape(EXPERTS, HIDDEN, -1), None if bias is None else bias.reshape(EXPERTS, -1))
    apart = ((wi[:, :, 0], wi[:, :, 1]), None if bias is None else (bias[:, 0], bias[:, 1]))
    for wi, bias in (fused, apart):
        other = dataclasses.replace(params, wi=wi, wi_bias=bias)
        for name, array in ep.convert.to_hf(family, other, layer=2).items():
            equal_bits(array, given[name])


def test_arrays_of_jax_and_torch_are_taken() -> None:
    given = checkpoint("qwen3_moe")
    wanted = ep.convert.from_hf("qwen3_moe", given, layer=2)
    for kind in (jnp.asarray, Tensor):
        made = ep.convert.from_hf("qwen3_moe", {k: kind(v) for k, v in given.items()}, layer=2)
        jax.tree.map(equal_bits, made, wanted)


class Tensor:
    """What `from_hf` asks of a torch tensor, whose own numpy() refuses bfloat16."""

    def __init__(self, array: Any) -> None:
        self.array, self.dtype = array, f"torch.{array.dtype.name}"

    def detach(self) -> Tensor:
        return self

    cpu = contiguous = detach

    def view(self, dtype: str) -> Any:
        return np.ascontiguousarray(self.array).view(dtype)


Tensor.__module__ = "a_torch"
sys.modules.setdefault("a_torch", types.SimpleNamespace(uint8="uint8"))  # type: ignore[arg-type]


def test_deepseeks_bias_is_beside_the_parameters() -> None:
    given = checkpoint("deepseek_v3") | {BIAS: bits(EXPERTS, dtype=np.float32, seed=9)}
    params = ep.convert.from_hf("deepseek_v3", given, layer=2)
    assert params.router_bias is None  # which would be added to logits
    bias = ep.convert.expert_bias("deepseek_v3", given, layer=2)
    equal_bits(bias, given[BIAS])
    assert BIAS not in ep.convert.to_hf("deepseek_v3", params, layer=2)
    back = ep.convert.to_hf("deepseek_v3", params, layer=2, expert_bias=bias)
    assert back.keys() == given.keys()
    equal_bits(back[BIAS], given[BIAS])
    with pytest.raises(ep.InvalidArgumentError, match="lacks .*e_score_correction_bias"):
        ep.convert.expert_bias("deepseek_v3", given, layer=3)
    with pytest.raises(ep.InvalidArgumentError, match="mixtral has no expert_bias"):
        ep.convert.expert_bias("mixtral", given, layer=2)
    with pytest.raises(ep.InvalidArgumentError, match="olmoe has no expert_bias"):
        ep.convert.to_hf("olmoe", params, expert_bias=bias)


UP = "model.layers.2.mlp.experts.1.up_proj.weight"
GATE = "model.layers.2.mlp.experts.0.gate_proj.weight"
# What is changed of a right checkpoint (None: taken out), and what the error says.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing": ("olmoe", {UP: None}, f"lacks {UP}$"),
    "wrong shape": (
        "olmoe",
        {UP: np.zeros((INNER, HIDDEN + 1), jnp.bfloat16)},
        rf"{UP} must be \[4, 6\], got \[4, 7\]",
    ),
    "another dtype": ("olmoe", {UP: np.zeros((INNER, HIDDEN), np.float32)}, f"{UP} must be bfloat"),
    "one expert too many": (
        "olmoe",
        {"model.layers.2.mlp.experts.3.gate_proj.weight": np.zeros((INNER, HIDDEN))},
        r"has .*experts\.3\.gate_proj.weight, but .*gate.weight is of 3 experts",
    ),
    "8 bits": (
        "deepseek_v3",
        {GATE: np.zeros((INNER, HIDDEN), jnp.float8_e4m3fn)},
        f"{GATE} must hold floats of 16 bits .* dequantize",
    ),
    "scales": ("deepseek_v3", {f"{GATE}_scale_inv": np.ones((1, 1))}, f"{GATE} is quantized"),
    "mxfp4": (
        "gpt_oss",
        {
            "model.layers.2.mlp.experts.down_proj": None,
            "model.layers.2.mlp.experts.down_proj_blocks": np.zeros(1, np.uint8),
        },
        "lacks .*experts.down_proj; the checkpoint is quantized",
    ),
    "interleaved for another M": (
        "gpt_oss",
        {"model.layers.2.mlp.experts.gate_up_proj": np.zeros((EXPERTS, HIDDEN, INNER))},
        r"gate_up_proj must be \[3, 6, 8\], got \[3, 6, 4\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    family, changes, message = WRONG[case]
    given = {k: v for k, v in (checkpoint(family) | changes).items() if v is not None}
    with pytest.raises(ep.InvalidArgumentError, match=message):
        ep.convert.from_hf(family, given, layer=2)


def test_a_layer_that_is_not_there_lists_a_few_names() -> None:
    given = checkpoint("qwen3_moe")
    with pytest.raises(ep.InvalidArgumentError, match=r"lacks model.layers.1.mlp.gate.weight$"):
        ep.convert.from_hf("qwen3_moe", given, layer=1)
    router = {"model.layers.2.mlp.gate.weight": given["model.layers.2.mlp.gate.weight"]}
    with pytest.raises(ep.InvalidArgumentError, match=r"experts.0.gate_proj.* and 5 more$"):
        ep.convert.from_hf("qwen3_moe", router, layer=2)


def test_parameters_that_do_not_fit_a_family_are_refused() -> None:
    with pytest.raises(ep.InvalidArgumentError, match="family must be one of mixtral, .* 'bert'"):
        ep.convert.from_hf("bert", {})
    spec = ep.LayerSpec("moe", top_k=2, num_experts=EXPERTS, hidden_size=HIDDEN)
    key = jax.random.key(0)
    with pytest.raises(ep.InvalidArgumentError, match="gpt_oss needs router_bias, wi_0_bias, wi_1"):
        ep.convert.to_hf("gpt_oss", ep.init_moe_params(key, spec, INNER))
    biased = ep.init_moe_params(key, spec, INNER, use_bias=True)
    with pytest.raises(
        ep.InvalidArgumentError, match="olmoe has no place for wi_0_bias, wi_1_bias"
    ):
        ep.convert.to_hf("olmoe", biased)
    with pytest.raises(ep.InvalidArgumentError, match="olmoe needs wi_1$"):
        ep.convert.to_hf("olmoe", ep.init_moe_params(key, spec, INNER, gated=False))
    with pytest.raises(ep.InvalidArgumentError, match="params must be ep.MoEParams, got dict"):
        ep.convert.to_hf("olmoe", {})  # type: ignore[arg-type]


def test_what_jax_would_round_is_refused() -> None:
    given = checkpoint("olmoe", np.float64)
    with pytest.raises(ep.InvalidArgumentError, match="router is float64, .* jax_enable_x64"):
        ep.convert.from_hf("olmoe", given, layer=2)
    with jax.enable_x64(True):
        back = ep.convert.to_hf("olmoe", ep.convert.from_hf("olmoe", given, layer=2), layer=2)
    for name, array in given.items():
        equal_bits(back[name], array)
