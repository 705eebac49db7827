"""Which values of the MoE block a rematerialised backward pass keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ep_runtime.errors import InvalidArgumentError

TAGS = ("ep_plan", "ep_kept", "ep_recv", "ep_wi", "ep_wo", "ep_q_x", "ep_q_w")


def remat_policy(
    save: Sequence[str] = ("ep_plan", "ep_kept"), offload: Sequence[str] = ()
) -> Callable[..., Any]:
    """Makes a policy for `jax.checkpoint` that names which results of the runtime's ops to save.

    Args:
        save: tags kept on the device. With "ep_plan" the backward pass runs no second prepare
            and no second router matmul, with "ep_recv" no second dispatch. The default keeps a
            plan, and what `moe(keep=...)` says: rows that are stored take longer than those that
            are made again.
        offload: tags moved to pinned host memory and back.

    Tags: ep_plan (a plan's arrays, the router's logits and choice), ep_recv (dispatched rows and
    weights; rows that came quantized are ep_q_x too), ep_wi and ep_wo (what the experts' matmuls
    return), ep_q_x and ep_q_w (quantized operands; weights in both layouts, a byte each, where GPU
    kernels make both and ep_wi and ep_wo are not kept). Of a block call, which `ep.explain` tells,
    there are three: ep_plan, with which backward begins with tokens and plan, no forward call
    before it; ep_kept, the rows that `moe(keep="first")` keeps; and ep_q_w, of a recipe. Without
    ep_kept backward makes rows, as with "nothing", and without ep_q_w it quantizes weights again.

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
