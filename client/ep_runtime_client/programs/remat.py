"""Chooses the values of the MoE block that rematerialization saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ep_runtime.errors import InvalidArgumentError

TAGS = ("ep_plan", "ep_kept", "ep_recv", "ep_wi", "ep_wo", "ep_q_x", "ep_q_w")


def remat_policy(
    save: Sequence[str] = ("ep_plan", "ep_kept"), offload: Sequence[str] = ()
) -> Callable[..., Any]:
    """Makes a `jax.checkpoint` policy from the names of the results to save.

    Args:
        save: tags saved on the device. The default saves the plan and the rows of `moe(keep=...)`:
            storing other rows takes longer than computing them again.
        offload: tags moved to pinned host memory and back.

    | tag | saves | without it backward repeats |
    |---|---|---|
    | ep_plan | a plan, the router's logits and choice | prepare and the router's matmul |
    | ep_kept | rows of `moe(keep="first")`, in block calls | the first matmul of the experts |
    | ep_recv, ep_wi | rows and first matmul of the composed body | its forward pass |
    | ep_recv | dispatched rows and weights, of your own `dispatch` | dispatch |
    | ep_q_x | quantized rows, of your own `grouped_gemm` | quantizing rows |
    | ep_q_w | quantized weights, a byte per value and layout | quantizing weights |

    `ep.explain` reports which body a layer runs. A block call with ep_plan starts backward from
    tokens and plan, without a forward call. The composed body repeats its forward pass unless both
    ep_recv and ep_wi are saved. ep_wo names nothing since version 0.2.

    Returns:
        The policy.

    Raises:
        InvalidArgumentError: an unknown tag, or one in both lists.

    Cost: each saved tag's bytes per layer; dispatched rows are
    `MemoryEstimate.dispatched_bytes_per_layer`.

    Source: `jax.checkpoint_policies.save_and_offload_only_these_names`.
    """
    for argument, tags in (("save", save), ("offload", offload)):
        for tag in tags:
            if tag not in TAGS:
                raise InvalidArgumentError(
                    f"{argument} must hold tags of {TAGS}, got {tag!r}", argument=argument
                )
    both = sorted(set(save) & set(offload))
    if both:
        raise InvalidArgumentError(f"save and offload both have {both}", argument="offload")
    policy: Callable[..., Any] = jax.checkpoint_policies.save_only_these_names(*save)
    if offload:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(save),
            names_which_can_be_offloaded=list(offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policy
