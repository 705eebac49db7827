"""Models that qwix quantizes: its rules do not reach the block, and do not change it by half.

qwix replaces `jax.lax.dot_general`, `jnp.einsum` and their like while a model is traced. Experts
are multiplied by custom calls, so its rules pass them by; the router's product is one it would
take, whose logits are f32. Looked at through `sys.modules`: nothing here imports it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from ep_runtime_client.base.layers import EpLayer, TracedLayer, resolve
from ep_runtime_client.moe import checks
from ep_runtime_client.ops.partitioning.roles import say_once

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What qwix calls the matmuls that experts would be.
_OPS = ("ragged_dot", "dot_general", "einsum")
_OPERANDS = ("layer", "x", "params")  # of `ep.moe`


def apart(block: Callable[_P, _R]) -> Callable[_P, _R]:
    """`block`, a function of (layer, ..., recipe=), out of qwix's reach; said where it has a rule
    that the experts' recipe does not answer."""

    @functools.wraps(block)
    def run(*args: _P.args, **options: _P.kwargs) -> _R:
        if "qwix._src.qconfig" not in sys.modules:
            return block(*args, **options)
        given: dict[str, Any] = {**dict(zip(_OPERANDS, args, strict=False)), **options}
        _say(given["layer"], given.get("recipe"), given.get("params"))
        with _unreached():
            return block(*args, **options)

    return run


def _say(layer: Any, recipe: Any, params: Any) -> None:
    rule, pair = _rule(), checks.recipes_of(recipe, params)
    if rule is None or all(each is not None and each.quantizes for each in pair):
        return
    name = resolve(layer)[0].name if isinstance(layer, EpLayer | TracedLayer) else layer.name
    say_once(
        f"qwix's rule for {rule.module_path!r} (weight_qtype={rule.weight_qtype}) does not reach "
        f"the experts of layer {name!r}, which are not quantized; recipe= of ep.moe quantizes "
        "them, such as ep.recipes.TensorScaling()"
    )


def _rule() -> Any:
    """qwix's rule for weights of matmuls in the module that is traced; None without one."""
    current = getattr(sys.modules["qwix._src.qconfig"], "get_current_rule", None)
    found = [current(op) for op in _OPS] if current is not None else []
    return next((r for r in found if r is not None and r.weight_qtype is not None), None)


@contextlib.contextmanager
def _unreached() -> Iterator[None]:
    """qwix replaces nothing of this thread in here."""
    interception = sys.modules.get("qwix._src.interception")
    manager: Any = getattr(interception, "interception_manager", None)
    if not hasattr(manager, "disable_interception"):
        yield
        return
    held = manager.disable_interception()
    try:
        yield
    finally:
        manager.enable_interception(held)
