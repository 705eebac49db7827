"""Maps every recipe to its format."""

from __future__ import annotations

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.quantize.formats.bf16 import UnscaledFormat
from ep_runtime_client.ops.quantize.formats.blocks import BlockFormat
from ep_runtime_client.ops.quantize.formats.format import Format
from ep_runtime_client.ops.quantize.formats.mx import MxFormat
from ep_runtime_client.ops.quantize.formats.recipes import (
    BF16,
    MXFP8,
    BlockScaling,
    Recipe,
    TensorScaling,
)
from ep_runtime_client.ops.quantize.formats.tensor import TensorFormat

FORMATS: dict[type[Recipe], Format] = {
    BF16: UnscaledFormat(),
    TensorScaling: TensorFormat(),
    BlockScaling: BlockFormat(),
    MXFP8: MxFormat(),
}
_PLAIN = FORMATS[BF16]


def format_of(recipe: Recipe | None) -> Format:
    """Returns the format of a recipe class, or of its nearest base class; None: plain arrays.

    Raises:
        InvalidArgumentError: the recipe has no format.
    """
    if recipe is None:
        return _PLAIN
    for kind in type(recipe).__mro__:
        if kind in FORMATS:
            return FORMATS[kind]
    raise InvalidArgumentError(f"{recipe} has no line in formats/table.py", argument="recipe")
