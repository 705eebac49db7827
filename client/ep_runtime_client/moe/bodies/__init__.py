"""Chooses the body for a call of `ep.moe`, and tells why it is not the fast one."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from ep_runtime import device_layout
from ep_runtime.specs import GroupSpec
from ep_runtime_client.moe.bodies import composed, cuda, cuda_nodes
from ep_runtime_client.moe.bodies.protocol import Body
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.gemm import kernels_16, kernels_32
from ep_runtime_client.ops.kernels import serve as kernels_serve
from ep_runtime_client.ops.quantize.formats.recipes import (
    MXFP8,
    BlockScaling,
    Recipe,
    TensorScaling,
)
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.tracing import slack
from ep_runtime_client.ops.transports.choice import on_gpus

COMPOSED = "composed"
BODIES: dict[str, Body] = {COMPOSED: composed, "cuda": cuda, "cuda_nodes": cuda_nodes}
_forced: contextvars.ContextVar[str] = contextvars.ContextVar("ep_runtime_body", default="")
_TYPES = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))
# Short names of the reasons, which a compiled program carries in its scopes.
REASONS = {
    "copies": "copies of experts: the kernels need as many spare_experts as a rank has experts, "
    "in one NVLink domain, and lanes of 64 KiB for each other rank",
    "transport": "kernels are for GPUs, over windows and NCCL",
    "gpu": "matmuls have kernels for Hopper GPUs only",
    "tokens": "the call has no tokens",
    "dtype": "rows are neither float32, bfloat16 nor float16",
    "precision": "jax_default_matmul_precision asks for more precision than tf32 has",
    "mxfp8": "Hopper multiplies MXFP8 in bf16, in 1.1 times the time of bf16 rows",
    "recipe": "recipes of wi and wo differ, or have no kernels",
    "quantized": "a recipe quantizes rows that are not bfloat16",
    "activation": "the kernels do not know the activation",
    "to_input": "weights multiply the experts' inputs",
    "debug": "jax_debug_nans or jax_debug_infs looks at every row",
    "sizes": "H or M is not a multiple that the kernels need",
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """The properties of a call of `ep.moe` that the choice of a body depends on.

    Attributes:
        group: group of the call's layer.
        tokens: number of tokens of the call.
        hidden: H.
        inner: M of the whole weight.
        experts: L, experts of a rank.
        activation: activation between the matmuls, with the dtype of rows.
        recipes: of wi and wo; None for recipes that quantize nothing.
        paired: whether gate and up are two arrays.
        to_input: whether weights multiply the experts' inputs.
    """

    group: GroupSpec
    tokens: int
    hidden: int
    inner: int
    experts: int
    activation: Activation
    recipes: tuple[Recipe | None, Recipe | None]
    paired: bool
    to_input: bool


def chosen(asked: Asked) -> tuple[str, str]:
    """Returns (body of a call, why it is not the fast one: a name in REASONS, or nothing)."""
    forced = _forced.get()
    if forced:
        return forced, ""
    why = unsupported(asked)
    if why:
        return COMPOSED, why
    return "cuda_nodes" if asked.group.node_size else "cuda", ""


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Makes calls that are traced inside use the body called `name`; "" lets each choose."""
    before = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(before)


def has_workspace(name: str) -> bool:
    """Whether a body keeps rows in a workspace; `prepare` must then return the rows it needs."""
    return name != COMPOSED


def unsupported(asked: Asked) -> str:
    """Returns why the kernels do not support a call: a name in REASONS, or nothing if they do."""
    group = asked.group
    if not on_gpus(group):
        return "transport"
    if device_layout.composed_copies(group):
        return "copies"
    recipe, dtype = asked.recipes[0], jnp.dtype(asked.activation.dtype)
    whole = cuda.multiple_of(dtype, recipe, paired=asked.paired)
    sizes = asked.hidden % cuda.multiple_of(dtype, recipe, paired=False) or asked.inner % whole
    found = {
        "gpu": not kernels_serve.multiplying(),
        "tokens": asked.tokens == 0,
        "dtype": dtype not in _TYPES,
        "mxfp8": any(isinstance(each, MXFP8) for each in asked.recipes),
        "recipe": not supports_recipes(asked.recipes),
        "quantized": recipe is not None and dtype != jnp.bfloat16,
        "precision": dtype == jnp.float32 and not kernels_32.allowed(),
        "to_input": asked.to_input,
        "activation": not activation_kernels.supports(asked.activation),
        "debug": slack.checked(),
        "sizes": sizes != 0 or asked.experts > kernels_16.MAX_EXPERTS or _uneven(asked),
    }
    return next((name for name, is_so in found.items() if is_so), "")


def supports_recipes(recipes: tuple[Recipe | None, Recipe | None]) -> bool:
    """Whether the block kernels support these recipes."""
    first, second = recipes
    if first is not None and first.delayed:
        return False
    return first == second and isinstance(first, TensorScaling | BlockScaling | None)


def _uneven(asked: Asked) -> bool:
    """Whether a mesh axis could split a recipe's block of scales between devices."""
    group, tile = asked.group, format_of(asked.recipes[0]).tile
    sizes = (size for axis, size in group.axis_sizes.items() if axis not in group.ep_axis)
    units = [tile * size for size in sizes]
    return tile > 1 and any(x % unit for unit in units for x in (asked.hidden, asked.inner))
