"""`ep.convert`: names and forms of checkpoints, bit for bit, and errors that name what is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import doc_pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from child_programs import run_python

import ep_runtime as ep

EXPERTS, HIDDEN, INNER, IDLE, LAYER = 3, 6, 4, 2, 2
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
MLP, SPARSE = "model.layers.2.mlp", "model.layers.2.block_sparse_moe"
PROJ, W = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
CORRECTION = "e_score_correction_bias"
# Families with three matrices per expert: the block, its router, gate, up and down, and the bias of
# scores in files; and in memory if transformers 5 has other names there.
PER_EXPERT: dict[str, tuple[str, str, tuple[str, str, str], str]] = {
    "mixtral": (SPARSE, "gate", W, ""),
    "minimax_m2": (SPARSE, "gate", W, CORRECTION),
    "phimoe": (SPARSE, "gate", W, ""),
    "kimi_linear": (SPARSE, "gate", W, f"gate.{CORRECTION}"),
    "lfm2_moe": ("model.layers.2.feed_forward", "gate", W, "expert_bias"),
    "deepseek_v4": ("layers.2.ffn", "gate", W, "gate.bias"),
    "hunyuan_v1_moe": (MLP, "gate.wg", PROJ, ""),
    "ernie4_5_moe": (MLP, "gate", PROJ, f"moe_statics.{CORRECTION}"),
    "longcat_flash": (MLP, "router.classifier", PROJ, f"router.{CORRECTION}"),
}
PLAIN = ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2")
BIASED = ("deepseek_v3", "kimi_k2", "glm4_moe", "mimo_v2_flash", "dots1")
PER_EXPERT |= dict.fromkeys(PLAIN, (MLP, "gate", PROJ, ""))
PER_EXPERT |= dict.fromkeys(BIASED, (MLP, "gate", PROJ, f"gate.{CORRECTION}"))
IN_MEMORY = {"phimoe": (MLP, "router"), "lfm2_moe": ("model.layers.2.feed_forward", "gate")}
IN_MEMORY |= {name: (MLP, each[1]) for name, each in PER_EXPERT.items() if name not in IN_MEMORY}
MEGATRON = "decoder.layers.2.mlp"
STACKED: dict[str, dict[str, tuple[int, ...]]] = {
    "gpt_oss": {
        f"{MLP}.router.weight": (EXPERTS, HIDDEN),
        f"{MLP}.router.bias": (EXPERTS,),
        f"{MLP}.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER),
        f"{MLP}.experts.gate_up_proj_bias": (EXPERTS, 2 * INNER),
        f"{MLP}.experts.down_proj": (EXPERTS, INNER, HIDDEN),
        f"{MLP}.experts.down_proj_bias": (EXPERTS, HIDDEN),
    },
    "granitemoe": {
        f"{SPARSE}.router.layer.weight": (EXPERTS, HIDDEN),
        f"{SPARSE}.input_linear.weight": (EXPERTS, 2 * INNER, HIDDEN),
        f"{SPARSE}.output_linear.weight": (EXPERTS, HIDDEN, INNER),
    },
    "dbrx": {
        "transformer.blocks.2.ffn.router.layer.weight": (EXPERTS, HIDDEN),
        **{
            f"transformer.blocks.2.ffn.experts.mlp.{name}": (EXPERTS * INNER, HIDDEN)
            for name in ("w1", "v1", "w2")
        },
    },
}
for family, start in (("llama4", "language_model.model"), ("llama4_text", "model")):
    STACKED[family] = {
        f"{start}.layers.2.feed_forward.router.weight": (EXPERTS, HIDDEN),
        f"{start}.layers.2.feed_forward.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER),
        f"{start}.layers.2.feed_forward.experts.down_proj": (EXPERTS, INNER, HIDDEN),
    }
for family, start in (("gemma4", "model.language_model"), ("gemma4_text", "model")):
    STACKED[family] = {
        f"{start}.layers.2.router.proj.weight": (EXPERTS, HIDDEN),
        f"{start}.layers.2.experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
        f"{start}.layers.2.experts.down_proj": (EXPERTS, HIDDEN, INNER),
    }
FAMILIES = [*PER_EXPERT, *STACKED, "megatron"]


def from_family(family: str, given: Any, layer: int = LAYER) -> ep.MoEParams:
    if family == "megatron":
        return ep.convert.from_megatron(given, layer)
    return ep.convert.from_hf(family, given, layer)


def to_family(family: str, params: ep.MoEParams, **bias: Any) -> dict[str, Any]:
    if family == "megatron":
        return ep.convert.to_megatron(params, LAYER, **bias)
    return ep.convert.to_hf(family, params, LAYER, **bias)


def bits(*shape: int, dtype: Any, seed: int) -> Any:
    """Every bit pattern may occur: NaNs with payloads, infinities, signed zeros."""
    width = np.dtype(dtype).itemsize
    drawn = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * width), np.uint8)
    return drawn.view(dtype)


def router_rows(family: str) -> int:
    return EXPERTS + IDLE * (family == "longcat_flash")


def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    """Arrays of layer 2 by the names of the files of each family's first release."""
    if family in STACKED:
        return STACKED[family]
    if family == "megatron":
        shapes: dict[str, tuple[int, ...]] = {f"{MEGATRON}.router.weight": (EXPERTS, HIDDEN)}
        for i in range(EXPERTS):
            shapes[f"{MEGATRON}.experts.linear_fc1.weight{i}"] = (2 * INNER, HIDDEN)
            shapes[f"{MEGATRON}.experts.linear_fc2.weight{i}"] = (HIDDEN, INNER)
        return shapes
    start, router, (gate, up, down), _ = PER_EXPERT[family]
    shapes = {f"{start}.{router}.weight": (router_rows(family), HIDDEN)}
    for i in range(EXPERTS):
        shapes |= {
            f"{start}.experts.{i}.{gate}.weight": (INNER, HIDDEN),
            f"{start}.experts.{i}.{up}.weight": (INNER, HIDDEN),
            f"{start}.experts.{i}.{down}.weight": (HIDDEN, INNER),
        }
    return shapes


def checkpoint(family: str, dtype: Any = jnp.bfloat16, layer: int = LAYER) -> dict[str, Any]:
    """One layer as files store it."""
    return {
        name.replace("s.2.", f"s.{layer}."): bits(*shape, dtype=dtype, seed=seed)
        for seed, (name, shape) in enumerate(shapes_of(family).items())
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
    params = from_family(family, {**beside, **given})
    assert params.router.shape == (HIDDEN, router_rows(family))
    assert params.wi.shape == (EXPERTS, HIDDEN, 2, INNER)
    assert params.wo.shape == (EXPERTS, INNER, HIDDEN)
    back = to_family(family, params)
    assert back.keys() == given.keys()
    for name, array in given.items():
        equal_bits(back[name], array)
        assert back[name].flags.c_contiguous


def test_every_family_of_the_page_is_converted() -> None:
    rows = doc_pages.table(doc_pages.ROOT / "docs/families.md", "# Families of models")
    assert {kind.strip("`") for _, kind, _ in rows} <= {*FAMILIES}


@pytest.mark.parametrize(
    ("family", "gate", "up", "down"),
    [
        ("mixtral", "experts.1.w1.weight", "experts.1.w3.weight", "experts.1.w2.weight"),
        ("granitemoe", "input_linear.weight", "", "output_linear.weight"),
        ("llama4", "experts.gate_up_proj", "", "experts.down_proj"),
        ("gemma4", "experts.gate_up_proj", "", "experts.down_proj"),
        ("dbrx", "experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"),
        ("megatron", "experts.linear_fc1.weight1", "", "experts.linear_fc2.weight1"),
    ],
)
def test_matrices_multiply_as_in_the_model(family: str, gate: str, up: str, down: str) -> None:
    """Computes one token through expert 1 as each model multiplies it."""
    random = np.random.default_rng(0)
    given = {k: random.normal(size=v).astype(np.float32) for k, v in shapes_of(family).items()}
    params = from_family(family, given)
    x, hidden = random.normal(size=HIDDEN), random.normal(size=INNER)
    one, two, back = (
        next(array for name, array in given.items() if name.endswith(f".{each}"))
        for each in (gate, up or gate, down)
    )
    if family == "dbrx":  # x w1^T, and h w2 of w2 [M, H]
        mine = slice(INNER, 2 * INNER)
        halves, out = (one[mine] @ x, two[mine] @ x), hidden @ back[mine]
    elif family == "mixtral":
        halves, out = (one @ x, two @ x), back @ hidden
    elif family == "llama4":  # [in, out]
        halves, out = np.split(x @ one[1], 2), hidden @ back[1]
    else:
        first, second = (one, back) if family == "megatron" else (one[1], back[1])
        halves, out = np.split(first @ x, 2), second @ hidden
    for half, wanted in enumerate(halves):
        np.testing.assert_allclose(x @ params.wi[1, :, half], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hidden @ params.wo[1], out, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("family", [*PER_EXPERT, "granitemoe", "megatron"])
def test_other_names_of_a_layer_are_read_alike(family: str) -> None:
    """Experts as transformers 5 stacks them in memory, and as Megatron's SequentialMLP has them."""
    given = checkpoint(family)
    wanted = from_family(family, given)
    if family == "megatron":
        other = {
            re.sub(
                r"experts\.(\w+)\.weight(\d)", r"experts.local_experts.\2.\1.weight", name
            ): array
            for name, array in given.items()
        }
    elif family == "granitemoe":
        other = {
            f"{SPARSE}.{name}": array
            for name, array in zip(
                ("router.weight", "experts.gate_up_proj", "experts.down_proj"),
                given.values(),
                strict=True,
            )
        }
    else:
        start, router, names, _ = PER_EXPERT[family]
        gate, up, down = (
            np.stack([given[f"{start}.experts.{i}.{name}.weight"] for i in range(EXPERTS)])
            for name in names
        )
        block, router_now = IN_MEMORY[family]
        gate_up = np.concatenate([gate, up], 1)
        idle = np.zeros_like(gate_up[: router_rows(family) - EXPERTS])
        other = {
            f"{block}.{router_now}.weight": given[f"{start}.{router}.weight"],
            f"{block}.experts.gate_up_proj": np.concatenate([gate_up, idle]),
            f"{block}.experts.down_proj": down,
        }
    assert other.keys() != given.keys()
    jax.tree.map(equal_bits, from_family(family, other), wanted)


@pytest.mark.usefixtures("optimized")  # otherwise a fusion may lose bits of a NaN
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe", "dbrx", "megatron"])
def test_other_forms_of_wi_are_written_alike(family: str) -> None:
    given = checkpoint(family)
    params = from_family(family, given)
    wi, bias = params.wi, params.wi_bias
    fused = (wi.reshape(EXPERTS, HIDDEN, -1), None if bias is None else bias.reshape(EXPERTS, -1))
    apart = ((wi[:, :, 0], wi[:, :, 1]), None if bias is None else (bias[:, 0], bias[:, 1]))
    for wi, bias in (fused, apart):
        other = dataclasses.replace(params, wi=wi, wi_bias=bias)
        for name, array in to_family(family, other).items():
            equal_bits(array, given[name])


def test_arrays_of_jax_and_torch_are_taken() -> None:
    given = checkpoint("qwen3_moe")
    wanted = ep.convert.from_hf("qwen3_moe", given, layer=2)
    for kind in (jnp.asarray, Tensor):
        made = ep.convert.from_hf("qwen3_moe", {k: kind(v) for k, v in given.items()}, layer=2)
        jax.tree.map(equal_bits, made, wanted)


class Tensor:
    """The part of a torch tensor that `from_hf` uses; its own numpy() refuses bfloat16."""

    def __init__(self, array: Any) -> None:
        self.array, self.dtype = array, f"torch.{array.dtype.name}"

    def detach(self) -> Tensor:
        return self

    cpu = contiguous = detach

    def view(self, dtype: str) -> Any:
        return np.ascontiguousarray(self.array).view(dtype)


Tensor.__module__ = "a_torch"
sys.modules.setdefault("a_torch", types.SimpleNamespace(uint8="uint8"))  # type: ignore[arg-type]


WITH_BIAS = [*(name for name, each in PER_EXPERT.items() if each[-1]), "megatron"]


@pytest.mark.parametrize("family", WITH_BIAS)
def test_the_bias_of_scores_is_beside_the_parameters(family: str) -> None:
    key = f"{MEGATRON}.router.expert_bias"
    if family != "megatron":
        key = f"{PER_EXPERT[family][0]}.{PER_EXPERT[family][-1]}"
    lead = (1,) if family == "ernie4_5_moe" else ()
    value = bits(*lead, router_rows(family), dtype=np.float32, seed=9)
    given = {**checkpoint(family), key: value}
    params = from_family(family, given)
    assert params.router_bias is None  # the error: it would be added to logits
    bias = ep.convert.expert_bias(family, given, LAYER)
    equal_bits(bias, value.reshape(-1))
    assert key not in to_family(family, params)
    back = to_family(family, params, expert_bias=bias)
    assert back.keys() == given.keys()
    equal_bits(back[key], given[key])


def test_a_bias_that_is_not_there_is_named() -> None:
    given = checkpoint("deepseek_v3")
    params = ep.convert.from_hf("deepseek_v3", given, layer=2)
    bias = jnp.zeros(EXPERTS)
    with pytest.raises(ep.InvalidArgumentError, match=f"lacks {BIAS}$"):
        ep.convert.expert_bias("deepseek_v3", given, layer=2)
    with pytest.raises(ep.InvalidArgumentError, match="mixtral has no expert_bias"):
        ep.convert.expert_bias("mixtral", given, layer=2)
    with pytest.raises(ep.InvalidArgumentError, match="olmoe has no expert_bias"):
        ep.convert.to_hf("olmoe", params, expert_bias=bias)


UP = "model.layers.2.mlp.experts.1.up_proj.weight"
GATE = "model.layers.2.mlp.experts.0.gate_proj.weight"
# (change of a right checkpoint (None: the array is removed), text of the error)
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
        {"model.layers.2.mlp.experts.3.down_proj.weight": np.zeros((HIDDEN, INNER))},
        r"must have 3 experts, like its router, got .*experts\.3\.down_proj.weight",
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
    with pytest.raises(ep.InvalidArgumentError, match="family must be one of dbrx, .* 'bert'"):
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
    with pytest.raises(ep.InvalidArgumentError, match="router of float64 needs jax_enable_x64"):
        ep.convert.from_hf("olmoe", given, layer=2)
    with jax.enable_x64(True):
        back = ep.convert.to_hf("olmoe", ep.convert.from_hf("olmoe", given, layer=2), layer=2)
    for name, array in given.items():
        equal_bits(back[name], array)


def safetensors(path: Path, arrays: dict[str, Any]) -> None:
    """Writes a file in its format: the header's length, the header, the arrays."""
    names = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, array in arrays.items():
        offsets = [start, start := start + array.nbytes]
        dtype, shape = names[array.dtype.name], list(array.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_files_are_read_as_a_state_dict(tmp_path: Path) -> None:
    layers = [checkpoint("mixtral", layer=layer) for layer in (0, 2)]
    other = {"scale": np.array(3.0, np.float32), "ids": np.arange(3)}
    other |= {"none": np.zeros((0, 2), jnp.bfloat16), "8": np.ones(3, jnp.float8_e4m3fn)}
    safetensors(tmp_path / "model-1.safetensors", layers[0] | other)
    safetensors(tmp_path / "model-2.safetensors", layers[1])
    opened = ep.convert.open_files(tmp_path)
    given = layers[0] | other | layers[1]
    assert opened.keys() == given.keys()
    assert len(opened) == len(given)
    for name, array in given.items():
        equal_bits(opened[name], array)
    jax.tree.map(equal_bits, from_family("mixtral", opened), from_family("mixtral", layers[1]))
    assert ep.convert.open_files(tmp_path / "model-2.safetensors").keys() == layers[1].keys()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=r"has no \*\.safetensors"):
        ep.convert.open_files(tmp_path)
    with pytest.raises(ep.InvalidArgumentError, match=r"cannot read .*nothing"):
        ep.convert.open_files(tmp_path / "nothing.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(ep.InvalidArgumentError, match=r"header is longer than the file"):
        ep.convert.open_files(tmp_path)
    for name in ("short", "twice"):
        safetensors(tmp_path / f"{name}.safetensors", {"a": np.zeros(1, np.float32)})
    with pytest.raises(ep.InvalidArgumentError, match=r"a is in .*short.* and in .*twice"):
        ep.convert.open_files(tmp_path)


STREAM = """
import json, resource, sys
import jax
import numpy as np
import ep_runtime as ep

def peak():  # bytes
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

jax.block_until_ready(jax.numpy.asarray(np.ones((8, 8), "bfloat16")))  # JAX has started
before = peak()
opened = ep.convert.open_files(sys.argv[1])
for layer in range(int(sys.argv[2])):
    params = ep.convert.from_hf("mixtral", opened, layer)
    for name, array in ep.convert.to_hf("mixtral", params, layer).items():
        assert array.tobytes() == opened[name].tobytes(), name
print(json.dumps(peak() - before))
"""


def test_a_checkpoint_is_converted_in_the_memory_of_a_few_layers(tmp_path: Path) -> None:
    layers, experts, hidden, inner = 24, 4, 512, 512
    matrix = bits(inner, hidden, dtype=jnp.bfloat16, seed=0)
    for layer in range(layers):
        start = f"model.layers.{layer}.block_sparse_moe"
        arrays = {f"{start}.gate.weight": matrix[:experts]}
        names = (f"experts.{expert}.{name}" for expert in range(experts) for name in W)
        arrays |= dict.fromkeys((f"{start}.{name}.weight" for name in names), matrix)
        safetensors(tmp_path / f"model-{layer:05}.safetensors", arrays)
    done = run_python("-c", STREAM, tmp_path, layers)
    layer_bytes = experts * 3 * matrix.nbytes
    assert json.loads(done.stdout) < layers / 2 * layer_bytes
