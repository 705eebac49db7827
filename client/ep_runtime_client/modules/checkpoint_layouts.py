"""Describes how checkpoints name and store a layer's router and experts, for `ep.convert`.

Letters of shapes: E experts, H hidden size, M inner size.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ep_runtime.errors import InvalidArgumentError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

_SHOWN_NAMES = 4  # the most names that a message lists


@dataclasses.dataclass(frozen=True)
class Layer:
    """The arrays of one layer's block, whose names begin with `prefix`."""

    state_dict: Mapping[str, Any]
    prefix: str

    def has(self, name: str) -> bool:
        return self.prefix + name in self.state_dict

    def require(self, names: list[str]) -> None:
        """Raises InvalidArgumentError that lists the missing arrays."""
        missing = [self.prefix + name for name in names if not self.has(name)]
        if not missing:
            return
        shown = ", ".join(missing[:_SHOWN_NAMES])
        rest = f" and {len(missing) - _SHOWN_NAMES} more" if len(missing) > _SHOWN_NAMES else ""
        packed = [name for name in missing if f"{name}_blocks" in self.state_dict]
        remedy = "; the checkpoint is quantized (mxfp4): dequantize it first" if packed else ""
        raise InvalidArgumentError(f"state_dict lacks {shown}{rest}{remedy}", argument="state_dict")

    def array(self, name: str, *shape: int | None, like: Array | None = None) -> Array:
        """Returns one array on the host; None in `shape` is any size, `like` has the same dtype."""
        self.require([name])
        key = self.prefix + name
        if f"{key}_scale_inv" in self.state_dict:
            raise InvalidArgumentError(
                f"{key} is quantized ({key}_scale_inv holds its scales): dequantize it first",
                argument="state_dict",
            )
        array = on_host(self.state_dict[key], key)
        if len(array.shape) != len(shape) or any(
            want not in (None, got) for want, got in zip(shape, array.shape, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise InvalidArgumentError(
                f"{key} must be [{wanted}], got {list(array.shape)}", argument="state_dict"
            )
        _check_dtype(key, array, like)
        return array


def _check_dtype(key: str, array: Array, like: Array | None) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise InvalidArgumentError(
            f"{key} must hold floats of 16 bits or more, got {array.dtype.name}; dequantize it "
            "first",
            argument="state_dict",
        )
    if like is not None and array.dtype != like.dtype:
        raise InvalidArgumentError(
            f"{key} must be {like.dtype.name} as the other matrices of the experts, got "
            f"{array.dtype.name}",
            argument="state_dict",
        )


def on_host(value: Any, name: str) -> Array:
    """Converts an array of numpy, JAX or torch to numpy, bit for bit."""
    if hasattr(value, "detach"):  # torch, whose numpy() lacks bfloat16
        value = value.detach().cpu().contiguous()
        dtype = np.dtype(str(value.dtype).rpartition(".")[2])
        # A scalar tensor has no dim, so it cannot be viewed as bytes.
        torch = sys.modules[type(value).__module__.partition(".")[0]]
        return np.asarray(value.view(torch.uint8)).view(dtype)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise InvalidArgumentError(
            f"{name} has shards in other processes; gather it first "
            "(jax.experimental.multihost_utils.process_allgather)",
            argument=name,
        )
    return np.asarray(value)


class Experts(Protocol):
    """How a checkpoint stores the experts of a layer."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the arrays of `MoEParams.to_separate` that it stores, without the router."""

    def is_in(self, layer: Layer) -> bool:
        """Whether a layer has experts under these names."""

    def read(self, layer: Layer, experts: int) -> Arrays:
        """Reads the fields of MoEParams; raises InvalidArgumentError."""

    def write(self, parts: Mapping[str, Array]) -> Arrays:
        """Returns the checkpoint's arrays by name, from `MoEParams.to_separate`."""


_MATRICES: tuple[str, ...] = ("wi_0", "wi_1", "wo")


@dataclasses.dataclass(frozen=True)
class PerExpert:
    """Separate matrices for each expert in the layout of torch's `linear`, [out, in].

    Attributes:
        first: names of gate and up [M, H], or of both in one [2M, H]; {} is the expert's number.
        down: name of [H, M].
    """

    first: tuple[str, ...]
    down: str
    parts = _MATRICES

    def is_in(self, layer: Layer) -> bool:
        return layer.has(self.down.format(0))

    def count(self, layer: Layer) -> int:
        return next(i for i in range(sys.maxsize) if not layer.has(self.down.format(i)))

    def read(self, layer: Layer, experts: int) -> Arrays:
        names = (*self.first, self.down)
        layer.require([name.format(i) for i in range(experts) for name in names])
        more = self.down.format(experts)
        if layer.has(more):
            raise InvalidArgumentError(
                f"state_dict must have {experts} experts, like its router, got "
                f"{layer.prefix}{more}",
                argument="state_dict",
            )
        like = layer.array(self.down.format(0), None, None)
        hidden, inner = like.shape
        wi = np.empty((experts, hidden, 2, inner), like.dtype)
        wo = np.empty((experts, inner, hidden), like.dtype)
        rows = 2 * inner // len(self.first)
        for i in range(experts):
            halves = wi[i].reshape(hidden, len(self.first), rows)
            for half, name in enumerate(self.first):
                halves[:, half] = layer.array(name.format(i), rows, hidden, like=like).T
            wo[i] = layer.array(self.down.format(i), hidden, inner, like=like).T
        return {"wi": wi, "wo": wo}

    def write(self, parts: Mapping[str, Array]) -> Arrays:
        named: Arrays = {}
        for i, (gate, up, down) in enumerate(zip(*map(parts.__getitem__, _MATRICES), strict=True)):
            halves = [gate.T, up.T]
            first = halves if len(self.first) == 2 else [np.concatenate(halves)]
            named |= {n.format(i): array for n, array in zip(self.first, first, strict=True)}
            named[self.down.format(i)] = down.T
        return named


@dataclasses.dataclass(frozen=True)
class Stacked:
    """All experts in two arrays, gate then up.

    Attributes:
        gate_up: name of the array [E, 2M, H]; [E, H, 2M] if not transposed.
        down: name of the array [E, H, M]; [E, M, H] if not transposed.
        transposed: whether matrices are [out, in].
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    transposed: bool = True
    parts = _MATRICES

    def is_in(self, layer: Layer) -> bool:
        return layer.has(self.down)

    def read(self, layer: Layer, experts: int) -> Arrays:
        down = layer.array(self.down, None, None, None)
        wo = self._transposed(down)
        experts, inner, hidden = wo.shape
        sizes = (2 * inner, hidden) if self.transposed else (hidden, 2 * inner)
        # LongCat's array in memory also has rows for the experts that do nothing.
        gate_up = self._transposed(layer.array(self.gate_up, None, *sizes, like=down)[:experts])
        return {"wi": gate_up.reshape(experts, hidden, 2, inner), "wo": wo}

    def write(self, parts: Mapping[str, Array]) -> Arrays:
        gate_up = np.concatenate([parts["wi_0"], parts["wi_1"]], axis=-1)
        return {self.gate_up: self._transposed(gate_up), self.down: self._transposed(parts["wo"])}

    def _transposed(self, array: Array) -> Array:
        return array.swapaxes(1, 2) if self.transposed else array


class GptOss:
    """All experts in one array, [in, out], with alternating columns of gate and up, and biases."""

    parts = (*_MATRICES, "wi_0_bias", "wi_1_bias", "wo_bias", "router_bias")

    def is_in(self, layer: Layer) -> bool:
        return layer.has("experts.down_proj")

    def read(self, layer: Layer, experts: int) -> Arrays:
        down = layer.array("experts.down_proj", experts, None, None)
        _, inner, hidden = down.shape
        gate_up = layer.array("experts.gate_up_proj", experts, hidden, 2 * inner, like=down)
        bias = layer.array("experts.gate_up_proj_bias", experts, 2 * inner)
        return {
            "wi": gate_up.reshape(experts, hidden, inner, 2).swapaxes(2, 3),
            "wo": down,
            "wi_bias": bias.reshape(experts, inner, 2).swapaxes(1, 2),
            "wo_bias": layer.array("experts.down_proj_bias", experts, hidden),
            "router_bias": layer.array("router.bias", experts),
        }

    def write(self, parts: Mapping[str, Array]) -> Arrays:
        def in_turns(gate: Array, up: Array) -> Array:
            return np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)

        return {
            "router.bias": parts["router_bias"],
            "experts.gate_up_proj": in_turns(parts["wi_0"], parts["wi_1"]),
            "experts.gate_up_proj_bias": in_turns(parts["wi_0_bias"], parts["wi_1_bias"]),
            "experts.down_proj": parts["wo"],
            "experts.down_proj_bias": parts["wo_bias"],
        }


class Dbrx:
    """The matrices of all experts, [M, H] each, concatenated along rows."""

    parts = _MATRICES
    _names = ("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2")

    def is_in(self, layer: Layer) -> bool:
        return layer.has(self._names[0])

    def read(self, layer: Layer, experts: int) -> Arrays:
        like = layer.array(self._names[0], None, None)
        hidden = like.shape[1]
        arrays = [layer.array(name, *like.shape, like=like) for name in self._names]
        gate, up, down = (each.reshape(experts, -1, hidden) for each in arrays)
        return {"wi": np.stack([gate, up], 1).transpose(0, 3, 1, 2), "wo": down}

    def write(self, parts: Mapping[str, Array]) -> Arrays:
        blocks = (parts["wi_0"].swapaxes(1, 2), parts["wi_1"].swapaxes(1, 2), parts["wo"])
        hidden = parts["wo"].shape[-1]
        return {n: x.reshape(-1, hidden) for n, x in zip(self._names, blocks, strict=True)}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The block of one layer in a checkpoint.

    Attributes:
        block: prefix of its names; {} is the layer's number.
        experts: how they are stored.
        router: name of [E, H].
        bias: name of the bias that is added to scores for the choice only, or None.
        bias_dims: dims of the bias before E.
        idle_experts: whether the router also has experts that do nothing.
    """

    block: str
    experts: Experts
    router: str = "gate.weight"
    bias: str | None = None
    bias_dims: tuple[int, ...] = ()
    idle_experts: bool = False

    def of(self, state_dict: Mapping[str, Any], layer: int) -> Layer:
        return Layer(state_dict, self.block.format(layer))

    def read(self, state_dict: Mapping[str, Any], number: int) -> Arrays:
        layer = self.of(state_dict, number)
        router = layer.array(self.router, None, None)
        experts = len(router)
        if self.idle_experts and isinstance(self.experts, PerExpert):
            experts = self.experts.count(layer)
        return {"router": router.T, **self.experts.read(layer, experts)}

    def write(self, parts: Mapping[str, Array], layer: int) -> Arrays:
        named = {self.router: parts["router"].T, **self.experts.write(parts)}
        return {self.block.format(layer) + name: array for name, array in named.items()}


_MLP, _SPARSE = "model.layers.{}.mlp.", "model.layers.{}.block_sparse_moe."
_FORWARD = "model.layers.{}.feed_forward."
_PROJ = PerExpert(
    ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"), "experts.{}.down_proj.weight"
)
_W = PerExpert(("experts.{}.w1.weight", "experts.{}.w3.weight"), "experts.{}.w2.weight")
_CORRECTION = "e_score_correction_bias"
_GATE_CORRECTION = f"gate.{_CORRECTION}"


def _both(block: str, experts: Experts, memory: str = "", **others: Any) -> tuple[Layout, ...]:
    """Returns the layout in files, and the layout of a model that transformers 5 loaded."""
    return Layout(block, experts, **others), Layout(memory or block, Stacked(), **others)


_PLAIN = _both(_MLP, _PROJ)
_BIASED = _both(_MLP, _PROJ, bias=_GATE_CORRECTION)
_LLAMA4: dict[str, Any] = {"experts": Stacked(transposed=False), "router": "router.weight"}
_GEMMA4: dict[str, Any] = {"experts": Stacked(), "router": "router.proj.weight"}

# By model_type: the layout that is written, then others that can be read.
FAMILIES: Mapping[str, tuple[Layout, ...]] = {
    "dbrx": (Layout("transformer.blocks.{}.ffn.", Dbrx(), "router.layer.weight"),),
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _BIASED,
    "deepseek_v4": (
        Layout("layers.{}.ffn.", _W, bias="gate.bias"),
        Layout(_MLP, Stacked(), bias=_GATE_CORRECTION),
    ),
    "dots1": _BIASED,
    "ernie4_5_moe": (
        Layout(_MLP, _PROJ, bias=f"moe_statics.{_CORRECTION}", bias_dims=(1,)),
        Layout(_MLP, Stacked(), bias=f"gate.moe_statics.{_CORRECTION}", bias_dims=(1,)),
    ),
    "gemma4": (Layout("model.language_model.layers.{}.", **_GEMMA4),),
    "gemma4_text": (Layout("model.layers.{}.", **_GEMMA4),),
    "glm4_moe": _BIASED,
    "gpt_oss": (Layout(_MLP, GptOss(), "router.weight"),),
    "granitemoe": (
        Layout(
            _SPARSE, Stacked("input_linear.weight", "output_linear.weight"), "router.layer.weight"
        ),
        Layout(_SPARSE, Stacked(), "router.weight"),
    ),
    "hunyuan_v1_moe": _both(_MLP, _PROJ, router="gate.wg.weight"),
    "kimi_k2": _BIASED,
    "kimi_linear": _both(_SPARSE, _W, _MLP, bias=_GATE_CORRECTION),
    "lfm2_moe": _both(_FORWARD, _W, bias="expert_bias"),
    "llama4": (Layout("language_model.model.layers.{}.feed_forward.", **_LLAMA4),),
    "llama4_text": (Layout(_FORWARD, **_LLAMA4),),
    "longcat_flash": _both(
        _MLP,
        _PROJ,
        router="router.classifier.weight",
        bias=f"router.{_CORRECTION}",
        idle_experts=True,
    ),
    "mimo_v2_flash": _BIASED,
    "minimax_m2": _both(_SPARSE, _W, _MLP, bias=_CORRECTION),
    "mixtral": _both(_SPARSE, _W, _MLP),
    "olmoe": _PLAIN,
    "phimoe": (Layout(_SPARSE, _W), Layout(_MLP, Stacked(), "router.weight")),
    "qwen2_moe": _PLAIN,
    "qwen3_moe": _PLAIN,
}

_MEGATRON = "decoder.layers.{}.mlp."
# Experts of TEGroupedMLP, then of SequentialMLP.
MEGATRON = (
    Layout(
        _MEGATRON,
        PerExpert(("experts.linear_fc1.weight{}",), "experts.linear_fc2.weight{}"),
        "router.weight",
        "router.expert_bias",
    ),
    Layout(
        _MEGATRON,
        PerExpert(
            ("experts.local_experts.{}.linear_fc1.weight",),
            "experts.local_experts.{}.linear_fc2.weight",
        ),
        "router.weight",
        "router.expert_bias",
    ),
)


def layout_in(layouts: tuple[Layout, ...], state_dict: Mapping[str, Any], layer: int) -> Layout:
    """Returns the layout whose experts are present; else the first, whose names errors show."""
    found = (each for each in layouts if each.experts.is_in(each.of(state_dict, layer)))
    return next(found, layouts[0])
