"""`ep.integrations.maxtext`: functions for MaxText, if patched (docs/integrations/maxtext.md).

Only MaxText's patched code imports this module; this module never imports MaxText.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.moe.api import MoEParams, moe
from ep_runtime_client.ops.activation.function import ACTIVATIONS
from ep_runtime_client.ops.routing.api import Routing
from ep_runtime_client.sessions.connect import connect

__all__ = ["layer_of", "with_experts", "with_layer"]

_EP_AXIS = "expert"
_TOKEN_AXES = ("data", "fsdp", "fsdp_transpose", "context", "context_usp_ulysses")
_OTHER_AXES = ("stage", "tensor", "tensor_sequence")  # these axes do not shard tokens
_Class = TypeVar("_Class", bound=type)

_NO_DROPS = "no token is dropped, and memory follows what arrives"
_DROPLESS = "no step or layer has to be repeated, because no token is dropped"
_RING = "the ring of experts does not run"
_RING_FIGURE = "only the ring of experts computes this figure, and it does not run"
_TE = "TransformerEngine's block would compute the experts"
_QUANTIZED = "MaxText's quantization does not reach the experts, which compute in `dtype`"
_SCHEDULE = "this schedule computes experts by code of its own"
_VLLM = "MaxText has this only in its path for vLLM"
_MESH = "mesh axes are those of MaxText's default"

# Options that `ep_runtime=True` rejects, each with the reason; the page lists the others.
REFUSED = {
    "capacity_factor": _NO_DROPS,
    "custom_mesh_and_rule": _MESH,
    "custom_mesh_and_rule_for_eval": _MESH,
    "defer_small_all_reduces": _RING,
    "eval_ragged_buffer_factor": _NO_DROPS,
    "first_phase_ragged_buffer_factor": _DROPLESS,
    "fuse_expert_scales": _VLLM,
    "log_required_ragged_buffer_factor": _RING_FIGURE,
    "moe_dropless_fallback": _DROPLESS,
    "moe_log_max_load_ratio": _RING_FIGURE,
    "moe_quantize_combine_bwd_method": _QUANTIZED,
    "moe_quantize_token_all_gather": _QUANTIZED,
    "quantization": _QUANTIZED,
    "ragged_buffer_factor": _NO_DROPS,
    "retry_dropless_first_steps": _DROPLESS,
    "return_routed_experts": _VLLM,
    "shard_embed_moe_on_fsdp": _QUANTIZED,
    "te_gmm_quantization": _TE,
    "te_moe_block": _TE,
    "use_batch_split_schedule": _SCHEDULE,
    "use_lineage": _SCHEDULE,
    "use_ring_of_experts": _RING,
}


def __dir__() -> list[str]:
    return __all__


def with_layer(make_mesh: Callable[..., Mesh]) -> Callable[..., Mesh]:
    """Makes MaxText's `get_mesh_from_config` register the layer that all its MoE blocks share.

    Args:
        make_mesh: the function, called with MaxText's configuration first.

    Returns:
        The function, which for `ep_runtime=True` also checks the configuration's options and mesh.
    """

    @functools.wraps(make_mesh)
    def make_mesh_and_layer(config: Any, *args: Any, **kwargs: Any) -> Mesh:
        if config.ep_runtime:
            check_options(config)
        mesh = make_mesh(config, *args, **kwargs)
        if config.ep_runtime:
            layer_of(config, mesh)
        return mesh

    return make_mesh_and_layer


def with_experts(block_class: _Class) -> _Class:
    """Makes MaxText's `RoutedMoE` compute its experts by `ep.moe` if `ep_runtime=True`.

    Args:
        block_class: the class; its methods `sparse_matmul` and `dense_matmul` are replaced.

    Returns:
        The same class.
    """
    for name in ("sparse_matmul", "dense_matmul"):
        setattr(block_class, name, _ours_or(getattr(block_class, name)))
    return block_class


def layer_of(config: Any, mesh: Mesh) -> EpLayer:
    """Returns the layer of MaxText's MoE blocks, and registers it in the first call.

    Under tracing it returns the layer registered before.

    Args:
        config: MaxText's configuration. The larger of its training and evaluation batches sets
            the tokens of a rank.
        mesh: MaxText's device mesh.

    Raises:
        InvalidArgumentError: a mesh axis larger than 1 that neither shards tokens nor weights.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    unknown = sizes.keys() - {_EP_AXIS, *_TOKEN_AXES, *_OTHER_AXES}
    if unknown:
        axis = min(unknown)
        raise InvalidArgumentError(
            f"ep_runtime=True needs MaxText's mesh axis {axis!r} to be of size 1, got {sizes[axis]}"
            f"; experts can be trained over {_EP_AXIS}, {', '.join((*_TOKEN_AXES, *_OTHER_AXES))}",
            argument=str(axis),
        )
    outer = tuple(axis for axis in _TOKEN_AXES if axis in sizes)
    ranks = math.prod(sizes.get(axis, 1) for axis in (*outer, _EP_AXIS))
    batches = (config.micro_batch_size_to_train_on, config.micro_batch_size_to_eval_on)
    tokens = max(int(each or 0) for each in batches) * config.max_target_length
    given = config.moe_expert_input_dim
    group = connect().create_group(
        "experts",
        mesh,
        ep_axis=_EP_AXIS,
        outer_axes=outer,
        num_experts=config.num_experts,
        hidden_size=given if given > 0 else config.emb_dim,
        max_tokens_per_rank=-(-tokens // ranks),
        max_top_k=config.num_experts_per_tok,
        max_token_dtype=config.dtype,
    )
    return group.register_layer("moe", top_k=config.num_experts_per_tok)


def _ours_or(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps MaxText's method: with `ep_runtime=True` our experts replace it."""

    @functools.wraps(theirs)
    def chosen(block: Any, *args: Any, **kwargs: Any) -> Any:
        compute = _experts if block.config.ep_runtime else theirs
        return compute(block, *args, **kwargs)

    return chosen


def _experts(
    block: Any,
    inputs: jax.Array,
    gate_logits: jax.Array,
    pre_bias_logits: jax.Array | None,
    w0: jax.Array,
    w1: jax.Array,
    wo: jax.Array,
    w0_bias: jax.Array | None,
    w1_bias: jax.Array | None,
    wo_bias: jax.Array | None,
    input_ids: jax.Array | None = None,
    forced_routed_experts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Runs the experts; returns the same values as MaxText's `dense_matmul`.

    Returns:
        The output, the balance loss, and the updates of the router's bias.
    """
    weights, experts = block.get_topk(
        gate_logits,
        pre_bias_logits,
        block.rngs,
        input_ids=input_ids,
        forced_routed_experts=forced_routed_experts,
    )
    loss = _balance_loss(block, experts, gate_logits, pre_bias_logits)
    updates = _bias_updates(block, experts)
    weights = weights.astype(jnp.float32)
    at_input = block.config.decoder_block.name == "LLAMA4"
    if at_input:
        weights = jax.nn.sigmoid(weights)
    if forced_routed_experts is not None:  # MaxText marks unused slots by any id out of range
        experts = jnp.where((experts >= 0) & (experts < block.num_experts), experts, -1)
    wi_bias = None if w0_bias is None or w1_bias is None else (w0_bias, w1_bias)
    output, _ = moe(
        layer_of(block.config, block.mesh),
        inputs,
        MoEParams(None, (w0, w1), wo, wi_bias, wo_bias),
        routing=Routing(experts, weights),
        activation=_activation(block),
        weights_at="input" if at_input else None,
    )
    return output, loss, updates


def _activation(block: Any) -> Any:
    """Returns a name if `ep.moe`'s kernels have the function; else MaxText's function."""
    config = block.config
    name = config.mlp_activations[0]
    is_plain = config.mlp_activations_limit <= 0 and config.decoder_block.name != "GPT_OSS"
    return name if is_plain and name in ACTIVATIONS else block.apply_ffn_activation


def _balance_loss(
    block: Any, experts: jax.Array, gate_logits: jax.Array, pre_bias_logits: jax.Array | None
) -> jax.Array | None:
    """Computes MaxText's loss, which its caller adds: per batch, or per sequence as Megatron."""
    config = block.config
    is_inference = config.model_call_mode == "inference"
    if config.load_balance_loss_weight <= 0 or is_inference or block.is_hash_routing:
        return None
    if _functions(block).uses_megatron_seq_aux_loss(config):
        return block.megatron_seq_aux_loss(
            gate_logits if pre_bias_logits is None else pre_bias_logits
        )
    shares = jax.nn.softmax(gate_logits.astype(jnp.float32), axis=-1).astype(block.dtype)
    return block.load_balance_loss(experts, shares)


def _bias_updates(block: Any, experts: jax.Array) -> jax.Array | None:
    """Returns the router bias's steps; with accumulated gradients the counts MaxText sums first."""
    if not block.should_update_load_balance():
        return None
    config, functions = block.config, _functions(block)
    if config.gradient_accumulation_steps > 1:
        return functions.calculate_expert_counts(experts, config.num_experts)
    rate = config.routed_bias_update_rate
    return functions.calculate_load_balance_updates(experts, config.num_experts, rate)


def _functions(block: Any) -> Any:
    """Returns MaxText's module that defines the class of this block."""
    (found,) = (base for base in type(block).__mro__ if base.__name__ == "RoutedMoE")
    return sys.modules[found.__module__]


def check_options(config: Any) -> None:
    """Raises for the first option that is on and would be ignored, or compute experts elsewhere.

    Args:
        config: MaxText's configuration. Options that its release does not have are off.

    Raises:
        InvalidArgumentError: with the option's name, its value, and why it must be off.
    """
    for name, reason in REFUSED.items():
        value = getattr(config, name, None)
        value = getattr(value, "value", value)  # if it is an enum
        if value > 0 if isinstance(value, int | float) else value:
            raise InvalidArgumentError(
                f"ep_runtime=True needs MaxText's {name} to be off, got {value!r}: {reason}",
                argument=name,
            )
