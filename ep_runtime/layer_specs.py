"""Specs of layers: frozen, hashable, and checked against their group. Letters: `layout.py`."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

from ep_runtime import layout
from ep_runtime.allowed_names import check_name
from ep_runtime.arguments import check_whole
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import MAX_STACK_LAYERS, GroupSpec, check_holds_rows, stable_id


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The settings of a layer: its name, and how many experts each token uses.

    Args:
        name: the layer's name, unique in the group.
        top_k: K, experts per token, at most the group's max_top_k.
        alignment: as in `Session.create_group`; None for the group's alignment.
        in_flight: dispatches of this layer that may be open at once, at most the group's lanes.
        num_experts: E; needed only if the spec is used instead of a layer (by initialisers, modules
            and `moe` under `jax.eval_shape`).
        hidden_size: H; needed in the same cases.
    """

    name: str
    top_k: int
    alignment: int | None = None
    in_flight: int = 1
    num_experts: int | None = None
    hidden_size: int | None = None

    def __post_init__(self) -> None:
        check_name("layer", self.name)
        check_whole("top_k", self.top_k)
        check_whole("in_flight", self.in_flight)
        for argument in ("alignment", "num_experts", "hidden_size"):
            if (value := getattr(self, argument)) is not None:
                check_whole(argument, value)


# Matches names such as "s[3]", which is layer 3 of stack "s".
STACK_MEMBER = re.compile(r"(?P<stack>.*)\[(?P<index>[0-9]{1,7})\]", re.DOTALL)


def check_stack_members(name: str, num_layers: int, known: Callable[[str], int | None]) -> None:
    """Rejects a plain layer or stack named "s[3]" next to layer 3 of a stack "s".

    Args:
        name: the name of a plain layer or a stack.
        num_layers: the number of a stack's layers; 0 for a plain layer.
        known: returns the num_layers of a registered name; None for an unknown name.

    Raises:
        InvalidArgumentError: two layers would have the same name.
    """
    member = STACK_MEMBER.fullmatch(name)
    if member is not None and (num_layers or known(member["stack"])):
        raise InvalidArgumentError(
            f"layer name {name!r} reads as a layer of stack {member['stack']!r}; "
            "take a name without [number] at its end",
            argument="name",
        )
    for index in range(num_layers):
        if known(f"{name}[{index}]") is not None:
            raise InvalidArgumentError(
                f"stack {name!r} of {num_layers} layers needs the name {name}[{index}], which a "
                "registered layer has; take another name",
                argument="name",
            )


def layer_id(group_name: str, layer_name: str) -> int:
    """Returns the 63-bit id of a plain layer in compiled programs."""
    return stable_id("layer", group_name, layer_name)


def stack_base_id(group_name: str, stack_name: str) -> int:
    """Returns the id of a stack's layer 0; layer i has base + i (a base's low 20 bits are 0)."""
    return stable_id("stack", group_name, stack_name) & ~(MAX_STACK_LAYERS - 1)


def check_layer(group: GroupSpec, layer: LayerSpec) -> LayerSpec:
    """Checks a layer's spec, and fills in defaults from the group.

    Raises:
        InvalidArgumentError: the layer needs more than the group has; names both numbers.
    """
    if layer.top_k > group.max_top_k:
        raise InvalidArgumentError(
            f"layer {layer.name!r} has top_k={layer.top_k}, "
            f"group {group.name!r} has max_top_k={group.max_top_k}",
            argument="top_k",
        )
    if layer.top_k > group.num_experts:
        raise InvalidArgumentError(
            f"layer {layer.name!r} has top_k={layer.top_k}, "
            f"group {group.name!r} has num_experts={group.num_experts}",
            argument="top_k",
        )
    if layer.in_flight > group.lanes:
        raise InvalidArgumentError(
            f"layer {layer.name!r} has in_flight={layer.in_flight}, "
            f"group {group.name!r} has lanes={group.lanes}",
            argument="in_flight",
        )
    for argument in ("num_experts", "hidden_size"):
        wanted = getattr(layer, argument)
        if wanted is not None and wanted != getattr(group, argument):
            raise InvalidArgumentError(
                f"layer {layer.name!r} has {argument}={wanted}, "
                f"group {group.name!r} has {argument}={getattr(group, argument)}",
                argument=argument,
            )
    filled = dataclasses.replace(
        layer,
        alignment=layer.alignment or group.alignment,
        num_experts=group.num_experts,
        hidden_size=group.hidden_size,
    )
    _check_capacity(group, filled)
    return filled


# Cached, because a group's layers often differ only in their names.
no_drop_rows = functools.lru_cache(maxsize=256)(layout.recv_capacity)


def _check_capacity(group: GroupSpec, layer: LayerSpec) -> None:
    """Raises if a slab has no room for a row of the layer, or all rows in a no-drop group."""
    sizes = {
        "num_experts": group.num_experts,
        "max_tokens_per_rank": group.max_tokens_per_rank,
        "ep_size": group.ep_size,
    }
    bound = no_drop_rows(top_k=group.max_top_k, alignment=group.alignment, **sizes)
    assert layer.alignment is not None  # check_layer filled it in
    needed = no_drop_rows(top_k=layer.top_k, alignment=layer.alignment, **sizes)
    if group.recv_capacity_per_rank >= bound and needed > group.recv_capacity_per_rank:
        raise InvalidArgumentError(
            f"layer {layer.name!r} (top_k={layer.top_k}, alignment={layer.alignment}) needs "
            f"{needed} rows per rank, the no-drop group {group.name!r} has "
            f"{group.recv_capacity_per_rank}",
            argument="alignment",
        )
    of = f" of layer {layer.name!r}"
    check_holds_rows("recv_capacity_per_rank", group.recv_capacity_per_rank, layer.alignment, of)
