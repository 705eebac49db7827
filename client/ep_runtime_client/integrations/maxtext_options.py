"""Options of MaxText that `ep_runtime=True` refuses; its page lists the others."""

from __future__ import annotations

from typing import Any

from ep_runtime.errors import InvalidArgumentError

_NO_DROPS = "no token is dropped, and memory follows what arrives"
_DROPLESS = "no step or layer has to be repeated, because no token is dropped"
_RING = "the ring of experts does not run"
_RING_FIGURE = "the ring of experts, which does not run, computes this figure"
_TE = "TransformerEngine's block would compute the experts"
_QUANTIZED = "MaxText's quantization does not reach the experts, which compute in `dtype`"
_SCHEDULE = "this schedule computes experts by code of its own"
_VLLM = "MaxText has this only in its path for vLLM"
_MESH = "mesh axes are those of MaxText's default"

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


def check_options(config: Any) -> None:
    """Raises for the first option that is on and would be ignored, or compute experts elsewhere.

    Args:
        config: MaxText's configuration. Options that its release does not have are off.

    Raises:
        InvalidArgumentError: with the option's name, its value, and why it must be off.
    """
    for name, reason in REFUSED.items():
        value = getattr(config, name, None)
        value = getattr(value, "value", value)  # of an enum
        if value > 0 if isinstance(value, int | float) else value:
            raise InvalidArgumentError(
                f"ep_runtime=True needs MaxText's {name} to be off, got {value!r}: {reason}",
                argument=name,
            )
