"""The keyword arguments of `moe` but for return_stats, as type checkers see them."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import jax
from jax.sharding import PartitionSpec

from ep_runtime_client.moe.checks import Recipes
from ep_runtime_client.ops.activation.function import Function
from ep_runtime_client.ops.routing.api import Routing
from ep_runtime_client.ops.routing.options import Router


class _Shared(TypedDict, total=False):
    """Those of `moe` and of its modules."""

    activation: Function
    recipe: Recipes
    router: Router
    aux_loss_coeff: float | jax.Array
    weights_at: Literal["output", "hidden", "input"] | None
    compute_dtype: Any
    capacity: int | None
    handle: int
    keep: Literal["first", "nothing"]
    keep_factor: float
    tokens_spec: PartitionSpec | None
    params_spec: Any


class MoEOptions(_Shared, total=False):
    """Those of `moe`."""

    routing: Routing | None
    expert_bias: jax.Array | None
    token_mask: jax.Array | None
    gated: bool


class ModuleOptions(_Shared, total=False):
    """Those that `ep.nnx.MoEBlock` hands on; it has `gated` and a bias of its own."""

    return_stats: bool
