"""`ep.convert`: converts experts of other libraries' checkpoints to MoEParams, and back.

The conversion is exact in both directions. `checkpoint_layouts.py` has the names and layouts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.modules.checkpoint_layouts import (
    FAMILIES,
    MEGATRON,
    Array,
    Layout,
    layout_in,
    on_host,
)
from ep_runtime_client.moe.params import MoEParams

__all__ = ["expert_bias", "from_hf", "from_megatron", "open_files", "to_hf", "to_megatron"]


def __dir__() -> list[str]:
    return __all__


def from_hf(family: str, state_dict: Mapping[str, Any], layer: int = 0) -> MoEParams:
    """Converts the router and experts of one layer of a Hugging Face checkpoint to MoEParams.

    Args:
        family: the model_type in config.json, of any model in docs/families.md.
        state_dict: arrays of numpy, JAX or torch, with the names in the checkpoint's files
            (`model.layers.0.mlp.experts.0.gate_proj.weight`) or in a model that transformers 5
            loaded (`model.layers.0.mlp.experts.gate_up_proj`). `open_files` reads files when they
            are needed. Other layers and modules, such as attention and shared experts, are not
            read.
        layer: index of the decoder layer.

    Returns:
        MoEParams in the dtypes of the checkpoint, with router [H, E], wi [E, H, 2, M] and wo
        [E, M, H]. For gpt-oss also wi_bias [E, 2, M], wo_bias [E, H] and router_bias [E]. The
        router of LongCat has columns for the experts that do nothing. The parameters do not include
        a bias of the scores: see `expert_bias`.

    Raises:
        InvalidArgumentError: an unknown family; arrays that are missing, have a wrong shape or
            dtype, or are quantized (dequantize them first).

    Cost: one copy of the layer on the host and one on JAX's default device. If the layer is too
    large for one device, call it under `jax.default_device(jax.devices("cpu")[0])` and shard the
    result by `ep.sharding.rules(...).shardings(params, mesh)`.
    """
    return _read(_layouts(family), state_dict, layer)


def to_hf(
    family: str, params: MoEParams, layer: int = 0, *, expert_bias: jax.Array | None = None
) -> dict[str, Array]:
    """Converts MoEParams to the arrays of a Hugging Face checkpoint; the inverse of `from_hf`.

    Args:
        family: as in `from_hf`.
        params: gated, with wi in any of its forms; with biases for gpt-oss only.
        layer: index of the decoder layer.
        expert_bias: [E], the result of `expert_bias`, for families that have one; None leaves it
            out.

    Returns:
        Contiguous arrays of numpy by name, as `safetensors.numpy.save_file` accepts them.

    Raises:
        InvalidArgumentError: an unknown family; parameters that the family needs are missing, or it
            has no place for them; arrays that are not all in this process.

    Cost: two copies of the layer on the host.
    """
    return _written(family, _layouts(family)[0], params, layer, expert_bias)


def from_megatron(state_dict: Mapping[str, Any], layer: int = 0) -> MoEParams:
    """Converts the router and experts of one layer of a Megatron-Core model to MoEParams.

    Args:
        state_dict: arrays of numpy, JAX or torch by the names of a model whose parallel sizes are
            1 (`decoder.layers.0.mlp.experts.linear_fc1.weight0` of TEGroupedMLP,
            `decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight` of SequentialMLP).
        layer: index of the decoder layer.

    Returns:
        As `from_hf`. `expert_bias("megatron", state_dict, layer)` is the router's expert_bias.

    Raises:
        InvalidArgumentError: arrays that are missing, have a wrong shape or dtype.

    Cost: as `from_hf`.
    """
    return _read(MEGATRON, state_dict, layer)


def to_megatron(
    params: MoEParams, layer: int = 0, *, expert_bias: jax.Array | None = None
) -> dict[str, Array]:
    """Converts MoEParams to the arrays of Megatron-Core's TEGroupedMLP and its router.

    Args:
        params: gated, without biases, with wi in any of its forms.
        layer: index of the decoder layer.
        expert_bias: [E], or None to leave it out.

    Returns:
        Contiguous arrays of numpy by name; `torch.from_numpy` takes them, bfloat16 as uint16 that
        `Tensor.view(torch.bfloat16)` reads.

    Raises:
        InvalidArgumentError: as `to_hf`.

    Cost: two copies of the layer on the host.
    """
    return _written("megatron", MEGATRON[0], params, layer, expert_bias)


def expert_bias(family: str, state_dict: Mapping[str, Any], layer: int = 0) -> jax.Array:
    """Reads the bias of one layer's scores, such as DeepSeek-V3's `e_score_correction_bias`.

    `ep.moe` takes it as `expert_bias`. No gradient reaches it; `ep.update_expert_bias` updates it.

    Args:
        family: as in `from_hf`, of a model whose router has such a bias; or "megatron".
        state_dict: as in `from_hf`.
        layer: index of the decoder layer.

    Returns:
        [E], in the dtype of the checkpoint.

    Raises:
        InvalidArgumentError: the family has none, or state_dict lacks it.

    Cost: one copy of E values.
    """
    layouts = MEGATRON if family == "megatron" else _layouts(family)
    form = layout_in(layouts, state_dict, layer)
    array = form.of(state_dict, layer).array(_bias_of(family, form), *form.bias_dims, None)
    return _on_device(array.reshape(-1), "expert_bias")


def open_files(path: str | os.PathLike[str]) -> Mapping[str, Array]:
    """Opens the safetensors files of a checkpoint without reading their arrays.

    Args:
        path: a file, or the folder of a checkpoint with all its files.

    Returns:
        A mapping from names to arrays of numpy. Each access reads one array from its file, and
        keeps nothing: converting a checkpoint layer by layer needs memory for one layer.

    Raises:
        InvalidArgumentError: no such file, not safetensors, or one name in two files.

    Cost: reads the header of each file.
    """
    root = Path(path)
    return _Files(sorted(root.glob("*.safetensors")) if root.is_dir() else [root], root)


# Names of safetensors dtypes that differ from NumPy's.
_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}
_KINDS = {"F": "float", "I": "int", "U": "uint"}
_LENGTH_BYTES = 8  # of a header's length, before the header


class _Files(Mapping[str, Array]):
    """Arrays of safetensors files, each read on access."""

    def __init__(self, paths: list[Path], root: Path) -> None:
        self._found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        if not paths:
            raise _wrong_files(f"{root} has no *.safetensors")
        for path in paths:
            start, header = _header(path)
            for name, entry in header.items():
                if name in self._found:
                    raise _wrong_files(f"{name} is in {self._found[name][0]} and in {path}")
                self._found[name] = (path, start, entry)

    def __getitem__(self, name: str) -> Array:
        path, start, entry = self._found[name]
        dtype = entry["dtype"]
        known = _DTYPES.get(dtype) or _KINDS.get(dtype[0], "") + dtype[1:]
        first, last = entry["data_offsets"]
        data = np.fromfile(path, np.uint8, last - first, offset=start + first)
        return data.view(jnp.dtype(known)).reshape(entry["shape"])

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the array
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Reads a file's header: returns the offset of its arrays, and the entry of each."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise _wrong_files(f"cannot read {path} as safetensors: {error}") from error
    header.pop("__metadata__", None)
    return _LENGTH_BYTES + length, header


def _wrong_files(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, argument="path")


def _layouts(family: str) -> tuple[Layout, ...]:
    if family not in FAMILIES:
        raise InvalidArgumentError(
            f"family must be one of {', '.join(FAMILIES)}, got {family!r}", argument="family"
        )
    return FAMILIES[family]


def _read(layouts: tuple[Layout, ...], state_dict: Mapping[str, Any], layer: int) -> MoEParams:
    arrays = layout_in(layouts, state_dict, layer).read(state_dict, layer)
    return MoEParams(**{name: _on_device(array, name) for name, array in arrays.items()})


def _written(
    family: str, form: Layout, params: MoEParams, layer: int, expert_bias: jax.Array | None
) -> dict[str, Array]:
    if not isinstance(params, MoEParams):
        raise InvalidArgumentError(
            f"params must be ep.MoEParams, got {type(params).__name__}", argument="params"
        )
    host = jax.tree.map(lambda leaf: on_host(leaf, "params"), params)
    parts = {name: array for name, array in host.to_separate().items() if array is not None}
    wanted = {"router", *form.experts.parts}
    for verb, names in (
        ("needs", sorted(wanted - {*parts})),
        ("has no place for", sorted({*parts} - wanted)),
    ):
        if names:
            raise InvalidArgumentError(f"{family} {verb} {', '.join(names)}", argument="params")
    named = form.write(parts, layer)
    if expert_bias is not None:
        bias = on_host(expert_bias, "expert_bias").reshape(*form.bias_dims, -1)
        named[form.block.format(layer) + _bias_of(family, form)] = bias
    return {name: np.ascontiguousarray(array) for name, array in named.items()}


def _bias_of(family: str, form: Layout) -> str:
    if form.bias is None:
        raise InvalidArgumentError(f"{family} has no expert_bias", argument="expert_bias")
    return form.bias


def _on_device(array: Array, name: str) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise InvalidArgumentError(
            f"{name} of {array.dtype.name} needs jax_enable_x64; cast it, or enable x64",
            argument="state_dict",
        )
    return jnp.asarray(array)
