"""Which programs of `ep.moe` take the block call, and why others keep to slabs."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ep_runtime.specs import GroupSpec
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.gemm import kernel_weights, kernels_16
from ep_runtime_client.ops.tracing import slack

_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
# Short names, which a compiled program carries, of the reasons.
REASONS = {
    "transport": "it is for GPUs whose ranks map each other's windows",
    "tokens": "the call has no tokens",
    "dtype": "rows are neither bfloat16 nor float16",
    "recipe": "a recipe quantizes operands",
    "activation": "the kernels do not know the activation",
    "input_weights": "weights multiply the experts' inputs",
    "debug": "jax_debug_nans or jax_debug_infs looks at every row",
    "sizes": "H or M is no multiple of what the kernels take",
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a call of `ep.moe` is, as far as the choice goes.

    Attributes:
        group: of its layer.
        tokens: of the call.
        hidden: H.
        inner: M of the whole weight.
        experts: L, experts of a rank.
        activation: between the products, with the dtype of rows.
        recipes: whether any operand is quantized.
        paired: whether gate and up come apart.
        input_weights: whether weights multiply the experts' inputs.
    """

    group: GroupSpec
    tokens: int
    hidden: int
    inner: int
    experts: int
    activation: Activation
    recipes: bool
    paired: bool
    input_weights: bool


def refused(asked: Asked) -> str:
    """Why the call is not taken: a name in REASONS, or nothing."""
    if asked.group.transport != "nvlink" or asked.group.node_size:
        return "transport"
    sizes = asked.hidden % kernels_16.MULTIPLE or asked.inner % multiple(asked.paired)
    found = {
        "tokens": asked.tokens == 0,
        "dtype": jnp.dtype(asked.activation.dtype) not in _TYPES,
        "recipe": asked.recipes,
        "input_weights": asked.input_weights,
        "activation": not activation_kernels.takes(asked.activation),
        "debug": slack.checked(),
        "sizes": sizes != 0 or asked.experts > kernels_16.MAX_EXPERTS,
    }
    return next((name for name, is_so in found.items() if is_so), "")


def multiple(paired: bool) -> int:
    """What M of a device is a multiple of."""
    return kernel_weights.MULTIPLE if paired else kernels_16.MULTIPLE


def on_gpu(group: GroupSpec) -> bool:
    """Whether a call that is taken is the custom call."""
    return group.transport == "nvlink"
