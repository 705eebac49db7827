"""Named scopes, which show ops in profiles and in the metadata of compiled programs."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import jax

from ep_runtime_client.base.layers import EpLayer

# Replaces the characters that separate parts of a scope in op names.
_SEPARATORS = str.maketrans({"/": ".", "(": "[", ")": "]"})
_SCOPE = re.compile(
    r"\bep_(prepare|dispatch_bwd|dispatch|combine_bwd|combine|block_bwd|block|experts|router|aux_loss|"
    r"stats|grouped_gemm|grouped_quantize|dense)"
    r"/([^/()]+)"
)
COPIED = "ep_copies"  # scope around experts that have copies
_WAY = re.compile(r"\bep_moe\.(\w+)\.(\w+)\.(\d+)/([^/()]+)")


def scope(op: str, layer: EpLayer) -> AbstractContextManager[Any]:
    """Returns the scope of an op of a layer: ep_OP/LAYER."""
    return jax.named_scope(f"ep_{op}/{label(layer)}")


def ways(op_name: str) -> list[tuple[str, str, str, str]]:
    """Finds (way, why, spare, layer) of each scope ep_moe.WAY.WHY.SPARE/LAYER in the op name of an
    HLO instruction.

    WAY is the body of a block of experts, WHY the reason if it is not the fast one, and SPARE the
    slots of a rank for copies of experts.
    """
    return _WAY.findall(op_name)


def label(layer: EpLayer) -> str:
    """Returns the layer's name as one part of a scope."""
    return layer.name.translate(_SEPARATORS)


def innermost(op_name: str) -> tuple[str, str] | None:
    """Returns (op, layer) of the innermost of our scopes in the op name of an HLO instruction.

    Equal matmuls of several layers are traced once and carry the first layer's name; the enclosing
    block has its own layer's name.
    """
    found = _SCOPE.findall(op_name)
    if not found:
        return None
    block = [layer for op, layer in found if op == "experts"]
    return found[-1][0], (block or [found[-1][1]])[-1]
