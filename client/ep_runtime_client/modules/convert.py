"""`ep.convert`: experts of Hugging Face checkpoints as MoEParams, and back.

The conversion is exact in both directions. torch's `linear` stores a matrix as [out, in], which is
transposed here; gpt-oss stores [in, out] with alternating columns of gate and up.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.moe.params import MoEParams

__all__ = ["expert_bias", "from_hf", "to_hf"]


def __dir__() -> list[str]:
    return __all__


Array = npt.NDArray[Any]

_SHOWN_NAMES = 4  # of those that a message lists


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The arrays of one layer's block, whose names begin with `prefix`."""

    state_dict: Mapping[str, Any]
    prefix: str

    def has(self, name: str) -> bool:
        return self.prefix + name in self.state_dict

    def require(self, names: list[str]) -> None:
        """Raises InvalidArgumentError that lists what is missing."""
        missing = [self.prefix + name for name in names if not self.has(name)]
        if not missing:
            return
        shown = ", ".join(missing[:_SHOWN_NAMES])
        rest = f" and {len(missing) - _SHOWN_NAMES} more" if len(missing) > _SHOWN_NAMES else ""
        packed = [name for name in missing if f"{name}_blocks" in self.state_dict]
        remedy = "; the checkpoint is quantized (mxfp4): dequantize it first" if packed else ""
        raise InvalidArgumentError(f"state_dict lacks {shown}{rest}{remedy}", argument="state_dict")

    def array(self, name: str, *shape: int | None, like: Array | None = None) -> Array:
        """One of them on the host; None in `shape` is any size, `like` has the dtype wanted."""
        self.require([name])
        key = self.prefix + name
        if f"{key}_scale_inv" in self.state_dict:
            raise InvalidArgumentError(
                f"{key} is quantized ({key}_scale_inv holds its scales): dequantize it first",
                argument="state_dict",
            )
        array = _on_host(self.state_dict[key], key)
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


def _on_host(value: Any, name: str) -> Array:
    """An array of numpy, JAX or torch as numpy's, bit for bit."""
    if hasattr(value, "detach"):  # torch, whose numpy() knows no bfloat16
        value = value.detach().cpu().contiguous()
        dtype = np.dtype(str(value.dtype).rpartition(".")[2])
        # A tensor of a scalar has no dim that could be viewed as bytes.
        return np.asarray(value.view(_module_of(value).uint8)).view(dtype)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise InvalidArgumentError(
            f"{name} has shards in other processes; gather it first "
            "(jax.experimental.multihost_utils.process_allgather)",
            argument=name,
        )
    return np.asarray(value)


def _module_of(tensor: Any) -> Any:
    """torch, which is loaded where a tensor is."""
    return sys.modules[type(tensor).__module__.partition(".")[0]]


@dataclasses.dataclass(frozen=True)
class _PerExpert:
    """A checkpoint with three matrices per expert, as `linear` keeps them: [out, in].

    Attributes:
        block: the module of router and experts in a decoder layer.
        gate, up, down: their names.
        bias: name of what is added to scores for the choice only, or None.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str | None = None

    parts = ("router", "wi_0", "wi_1", "wo")
    router = "gate.weight"

    def read(self, state_dict: Mapping[str, Any], start: str) -> dict[str, Array]:
        layer = _Layer(state_dict, f"{start}.{self.block}.")
        loaded = _Layer(state_dict, f"{start}.mlp.")
        if loaded.has("experts.gate_up_proj"):
            return _read_stacked(loaded)
        router = layer.array(self.router, None, None)
        experts, hidden = router.shape
        layer.require([self._name(i, n) for i in range(experts) for n in ("gate", "up", "down")])
        if layer.has(self._name(experts, "gate")):
            raise InvalidArgumentError(
                f"state_dict has {layer.prefix}{self._name(experts, 'gate')}, but "
                f"{layer.prefix}{self.router} is of {experts} experts",
                argument="state_dict",
            )
        first = layer.array(self._name(0, "gate"), None, hidden)
        inner = first.shape[0]
        wi = np.empty((experts, hidden, 2, inner), first.dtype)
        wo = np.empty((experts, inner, hidden), first.dtype)
        for i in range(experts):
            wi[i, :, 0] = layer.array(self._name(i, "gate"), inner, hidden, like=first).T
            wi[i, :, 1] = layer.array(self._name(i, "up"), inner, hidden, like=first).T
            wo[i] = layer.array(self._name(i, "down"), hidden, inner, like=first).T
        return {"router": router.T, "wi": wi, "wo": wo}

    def write(self, parts: Mapping[str, Array], start: str) -> dict[str, Array]:
        named = {self.router: parts["router"].T}
        for i in range(len(parts["wo"])):
            for name, part in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
                named[self._name(i, name)] = parts[part][i].T
        return {f"{start}.{self.block}.{name}": array for name, array in named.items()}

    def _name(self, expert: int, matrix: str) -> str:
        return f"experts.{expert}.{getattr(self, matrix)}.weight"


def _read_stacked(layer: _Layer) -> dict[str, Array]:
    """What transformers 5 makes of it in memory: [E, 2M, H], gate then up, and [E, H, M]."""
    router = layer.array("gate.weight", None, None)
    experts, hidden = router.shape
    down = layer.array("experts.down_proj", experts, hidden, None)
    inner = down.shape[-1]
    gate_up = layer.array("experts.gate_up_proj", experts, 2 * inner, hidden, like=down)
    wi = gate_up.reshape(experts, 2, inner, hidden).transpose(0, 3, 1, 2)
    return {"router": router.T, "wi": wi, "wo": down.transpose(0, 2, 1)}


class _GptOss:
    """All experts in one array, [in, out], columns of gate and up in turns, with biases."""

    block, bias = "mlp", None
    parts = ("router", "wi_0", "wi_1", "wo", "wi_0_bias", "wi_1_bias", "wo_bias", "router_bias")

    def read(self, state_dict: Mapping[str, Any], start: str) -> dict[str, Array]:
        layer = _Layer(state_dict, f"{start}.{self.block}.")
        router = layer.array("router.weight", None, None)
        experts, hidden = router.shape
        down = layer.array("experts.down_proj", experts, None, hidden)
        inner = down.shape[1]
        gate_up = layer.array("experts.gate_up_proj", experts, hidden, 2 * inner, like=down)
        bias = layer.array("experts.gate_up_proj_bias", experts, 2 * inner)
        return {
            "router": router.T,
            "wi": gate_up.reshape(experts, hidden, inner, 2).swapaxes(2, 3),
            "wo": down,
            "wi_bias": bias.reshape(experts, inner, 2).swapaxes(1, 2),
            "wo_bias": layer.array("experts.down_proj_bias", experts, hidden),
            "router_bias": layer.array("router.bias", experts),
        }

    def write(self, parts: Mapping[str, Array], start: str) -> dict[str, Array]:
        def in_turns(gate: Array, up: Array) -> Array:
            return np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)

        named = {
            "router.weight": parts["router"].T,
            "router.bias": parts["router_bias"],
            "experts.gate_up_proj": in_turns(parts["wi_0"], parts["wi_1"]),
            "experts.gate_up_proj_bias": in_turns(parts["wi_0_bias"], parts["wi_1_bias"]),
            "experts.down_proj": parts["wo"],
            "experts.down_proj_bias": parts["wo_bias"],
        }
        return {f"{start}.{self.block}.{name}": array for name, array in named.items()}


_FAMILIES: dict[str, _PerExpert | _GptOss] = {
    "mixtral": _PerExpert("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": _PerExpert(),
    "deepseek_v3": _PerExpert(bias="gate.e_score_correction_bias"),
    "gpt_oss": _GptOss(),
    "olmoe": _PerExpert(),
}


def from_hf(family: str, state_dict: Mapping[str, Any], layer: int = 0) -> MoEParams:
    """Converts the router and experts of one layer of a Hugging Face checkpoint to MoEParams.

    Args:
        family: "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss" or "olmoe": the model_type in
            config.json. Models with the same names of weights: Qwen2-MoE as "qwen3_moe", MiniMax-M2
            as "mixtral", Kimi-K2, GLM-4.5 and dots1 as "deepseek_v3".
        state_dict: arrays of numpy, JAX or torch, with the names in the checkpoint's files
            (`model.layers.0.mlp.experts.0.gate_proj.weight`) or in a model that transformers 5
            loaded (`model.layers.0.mlp.experts.gate_up_proj`). Other layers and modules, such as
            attention and shared experts, are not read.
        layer: index of the decoder layer.

    Returns:
        MoEParams in the dtypes of the checkpoint, with router [H, E], wi [E, H, 2, M] and wo
        [E, M, H]. For gpt-oss also wi_bias [E, 2, M], wo_bias [E, H] and router_bias [E]. They do
        not include DeepSeek-V3's bias of the scores: see `expert_bias`.

    Raises:
        InvalidArgumentError: an unknown family; arrays that are missing, have a wrong shape or
            dtype, or are quantized (dequantize them first).

    Cost: one copy of the layer on the host and one on JAX's default device. If the layer is too
    large for one device, call it under `jax.default_device(jax.devices("cpu")[0])` and shard the
    result by `ep.sharding.rules(...).shardings(params, mesh)`.
    """
    arrays = _form(family).read(state_dict, _start(layer))
    return MoEParams(**{name: _on_device(array, name) for name, array in arrays.items()})


def to_hf(
    family: str, params: MoEParams, layer: int = 0, *, expert_bias: jax.Array | None = None
) -> dict[str, Array]:
    """Converts MoEParams to the arrays of a Hugging Face checkpoint; the inverse of `from_hf`.

    Args:
        family: as in `from_hf`.
        params: gated, with wi in any of its forms; with biases for gpt-oss only.
        layer: index of the decoder layer.
        expert_bias: [E], the result of `expert_bias`, for "deepseek_v3" only; None leaves it out.

    Returns:
        Contiguous arrays of numpy by name, as `safetensors.numpy.save_file` accepts them.

    Raises:
        InvalidArgumentError: an unknown family; parameters that the family needs are missing, or it
            has no place for them; arrays that are not all in this process.

    Cost: two copies of the layer on the host.
    """
    form = _form(family)
    if not isinstance(params, MoEParams):
        raise InvalidArgumentError(
            f"params must be ep.MoEParams, got {type(params).__name__}", argument="params"
        )
    host = jax.tree.map(lambda leaf: _on_host(leaf, "params"), params)
    parts = {name: array for name, array in host.to_separate().items() if array is not None}
    for verb, names in (
        ("needs", sorted({*form.parts} - {*parts})),
        ("has no place for", sorted({*parts} - {*form.parts})),
    ):
        if names:
            raise InvalidArgumentError(f"{family} {verb} {', '.join(names)}", argument="params")
    named = form.write(parts, _start(layer))
    if expert_bias is not None:
        named[_bias_key(family, layer)] = _on_host(expert_bias, "expert_bias")
    return {name: np.ascontiguousarray(array) for name, array in named.items()}


def expert_bias(family: str, state_dict: Mapping[str, Any], layer: int = 0) -> jax.Array:
    """Reads the `e_score_correction_bias` of one DeepSeek-V3 layer, for `expert_bias` of `ep.moe`.

    No gradient reaches it; `ep.update_expert_bias` moves it.

    Args:
        family: "deepseek_v3".
        state_dict: as in `from_hf`.
        layer: index of the decoder layer.

    Returns:
        [E], in the dtype of the checkpoint.

    Raises:
        InvalidArgumentError: the family has none, or state_dict lacks it.

    Cost: one copy of E values.
    """
    key = _bias_key(family, layer)
    return _on_device(_Layer(state_dict, "").array(key, None), "expert_bias")


def _form(family: str) -> _PerExpert | _GptOss:
    if family not in _FAMILIES:
        raise InvalidArgumentError(
            f"family must be one of {', '.join(_FAMILIES)}, got {family!r}", argument="family"
        )
    return _FAMILIES[family]


def _start(layer: int) -> str:
    return f"model.layers.{layer}"


def _bias_key(family: str, layer: int) -> str:
    form = _form(family)
    if form.bias is None:
        raise InvalidArgumentError(f"{family} has no expert_bias", argument="expert_bias")
    return f"{_start(layer)}.{form.block}.{form.bias}"


def _on_device(array: Array, name: str) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise InvalidArgumentError(
            f"{name} is {array.dtype.name}, which JAX keeps only with jax_enable_x64",
            argument="state_dict",
        )
    return jnp.asarray(array)
