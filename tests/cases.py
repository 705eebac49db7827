"""Named shapes and routings that tests of every transport and platform share."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import numpy.typing as npt

# Settings of `create_group` that most tests of groups have.
SMALL: dict[str, Any] = {
    "ep_axis": "ep",
    "num_experts": 8,
    "hidden_size": 16,
    "max_tokens_per_rank": 8,
    "max_top_k": 2,
    "alignment": 8,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of dispatch and combine.

    Attributes:
        name: what it is about.
        axes: the mesh, axis by axis.
        ep_axis, outer_axes: as in create_group.
        num_experts, top_k, alignment, hidden: E, K, rows, H.
        tokens: T of one rank.
        split: for 3-D tokens, which token axes lie on dim 0 and dim 1, and the block's two dims.
        dtype: of tokens.
        idx_dtype: of topk_idx.
        routing: how experts are chosen; see `routing`.
        weighted: whether topk_weights are given.
        capacity: of the call.
        precision: combine_precision.
    """

    name: str
    axes: tuple[tuple[str, int], ...] = (("ep", 8),)
    ep_axis: tuple[str, ...] = ("ep",)
    outer_axes: tuple[str, ...] = ()
    num_experts: int = 16
    top_k: int = 2
    alignment: int = 8
    hidden: int = 16
    tokens: int = 8
    split: tuple[tuple[str, ...], tuple[str, ...], int, int] | None = None
    dtype: str = "float32"
    idx_dtype: str = "int32"
    routing: str = "uniform"
    weighted: bool = True
    capacity: int | None = None
    precision: str = "exact"

    def tolerance(self, of_dtype: dict[str, float]) -> float:
        """The tolerance of sums in its dtype; for 8-bit sums half a unit of e4m3's last place,
        2^-4.
        """
        return 2.0**-4 if self.precision == "fp8" else of_dtype[self.dtype]

    @property
    def group_name(self) -> str:
        """The case's name, in characters that group names may have."""
        return re.sub(r"\W+", "-", self.name)

    @property
    def group_settings(self) -> dict[str, Any]:
        return {
            "axes": dict(self.axes),
            "ep_axis": self.ep_axis,
            "outer_axes": self.outer_axes,
            "num_experts": self.num_experts,
            "hidden_size": self.hidden,
            "max_tokens_per_rank": max(self.tokens, 1),
            "max_top_k": self.top_k,
            "max_token_dtype": self.dtype,
            "alignment": self.alignment,
            "combine_precision": self.precision,
        }


DP_EP = {"axes": (("dp", 2), ("ep", 4)), "outer_axes": ("dp",)}

CASES = (
    Case("plain"),
    Case("top-1", top_k=1),
    Case("top-8", top_k=8, tokens=5),
    Case("no weights", top_k=3, weighted=False),
    Case("alignment 1", alignment=1, top_k=3),
    Case("alignment 16", alignment=16),
    Case("alignment 128", alignment=128, num_experts=8),
    Case("bfloat16 fast", dtype="bfloat16", precision="fast", top_k=4),
    Case("bfloat16 exact", dtype="bfloat16", top_k=4),
    Case("float16", dtype="float16", precision="fast", hidden=7),
    Case("8-bit sums", precision="fp8", top_k=4, hidden=168),
    Case("bfloat16, 8-bit sums", dtype="bfloat16", precision="fp8", top_k=4, hidden=1040),
    Case("one expert gets all", routing="one", top_k=2),
    Case("an expert gets none", routing="skip"),
    Case("a rank receives nothing", routing="skip rank", top_k=2),
    Case("unused slots", routing="unused", top_k=3),
    Case("nothing used", routing="none"),
    Case("a rank sends nothing", routing="silent rank"),
    Case("experts twice in a token", routing="twice", alignment=1),
    Case("one token per rank", tokens=1),
    Case("no tokens", tokens=0),
    Case("ep of size 1", axes=(("dp", 8), ("ep", 1)), outer_axes=("dp",), num_experts=4),
    Case("one device", axes=(("ep", 1),), num_experts=4),
    Case("dp x ep", top_k=3, **DP_EP),
    Case("3-D on dim 0", split=(("dp", "ep"), (), 2, 3), **DP_EP),
    Case("3-D over both dims", split=(("dp",), ("ep",), 2, 3), **DP_EP),
    Case("3-D over both dims, crossed", split=(("ep",), ("dp",), 1, 3), **DP_EP),
    Case("3-D on dim 1", split=((), ("dp", "ep"), 3, 2), **DP_EP),
    Case(
        "ep of two axes beside tp",
        axes=(("a", 2), ("tp", 2), ("b", 2)),
        ep_axis=("b", "a"),
        num_experts=8,
    ),
    Case("drops", capacity=16, top_k=4, num_experts=8),
    Case("drops, uneven", capacity=24, top_k=4, num_experts=16, routing="skewed", **DP_EP),
)


def fitted(case: Case, devices: int) -> Case:
    """Shrinks the case's longest axis so that it fits that many devices."""
    sizes = dict(case.axes)
    while int(np.prod([*sizes.values()])) > devices:
        longest = max(sizes, key=lambda axis: sizes[axis])
        sizes[longest] //= 2
    return dataclasses.replace(case, axes=tuple(sizes.items()))


def routing(case: Case, slabs: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """topk_idx [R, T, K] of a case; distinct experts per token unless the case says otherwise."""
    rng = np.random.default_rng(seed)
    experts, shape = case.num_experts, (slabs, case.tokens, case.top_k)
    allowed = np.arange(experts)
    if case.routing == "skip":
        allowed = np.delete(allowed, 5)
    if case.routing == "skip rank":
        allowed = allowed[2:]  # of 16 experts on 8 ranks: nothing for rank 0
    odds = np.ones(len(allowed))
    if case.routing == "skewed":
        odds = 1.0 / np.arange(1, len(allowed) + 1) ** 2
    idx = np.empty(shape, np.int32)
    for place in np.ndindex(*shape[:2]):
        idx[place] = rng.choice(allowed, case.top_k, replace=False, p=odds / odds.sum())
    if case.routing == "one":
        idx[:] = 3
        idx[..., 1:] = -1
    elif case.routing == "unused":
        idx[rng.random(shape) < 0.4] = -1
    elif case.routing == "none":
        idx[:] = -1
    elif case.routing == "silent rank":
        idx[0] = -1
    elif case.routing == "twice":
        idx[..., 1] = idx[..., 0]
    return idx
