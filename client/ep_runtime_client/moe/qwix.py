"""Runs `ep.moe` without qwix's rules, and warns if a rule was meant for its experts.

While a model is traced, qwix replaces `jax.lax.dot_general`, `jnp.einsum` and similar functions by
ones that quantize. In `ep.moe` they would quantize only the router's matmul, whose logits must be
f32. They cannot quantize the experts' matmuls, which are custom calls; `recipe=` does that.

This module finds qwix in `sys.modules` and never imports it.
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

# qwix's names of the matmuls that experts replace.
_OPS = ("ragged_dot", "dot_general", "einsum")
_OPERANDS = ("layer", "x", "params")  # of `ep.moe`


def apart(block: Callable[_P, _R]) -> Callable[_P, _R]:
    """Runs `block`, a function of (layer, ..., recipe=), without qwix's interception; warns if qwix
    has a rule that the experts' recipe does not match."""

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
    """Returns qwix's rule for weights of matmuls in the module being traced; None without one."""
    current = getattr(sys.modules["qwix._src.qconfig"], "get_current_rule", None)
    found = [current(op) for op in _OPS] if current is not None else []
    return next((r for r in found if r is not None and r.weight_qtype is not None), None)


@contextlib.contextmanager
def _unreached() -> Iterator[None]:
    """Stops qwix from replacing functions in this thread."""
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
