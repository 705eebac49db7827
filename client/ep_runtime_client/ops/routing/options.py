"""Defines `ep.Router`, its checks, and the older arguments that it replaced."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from ep_runtime.arguments import check_at_least, check_whole
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.routing import families

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def _fail(argument: str, message: str) -> None:
    raise InvalidArgumentError(message, argument=argument)


@dataclasses.dataclass(frozen=True)
class Router:
    """How `moe`, `route` and flax's modules choose and weight experts by the router's logits.

    Frozen and hashable: its values are static in a program. Its constructor checks them.

    Attributes:
        score_function: the score of an expert: "softmax" is its logit (with use_pre_softmax its
            share of the softmax over all E), "sigmoid" is sigmoid(logit), and "sqrtsoftplus" is
            sqrt(log(1 + exp(logit))).
        use_pre_softmax: softmax over all E before the choice. With top_k=1 the router
            gets a gradient only if this is True, because the softmax over one logit is 1; if it is
            False, a warning appears once.
        num_groups: number of routing groups of E / num_groups experts each; needs group_topk.
        group_topk: number of routing groups that a token may use: those with the highest scores.
        group_score_topk: a group's score is the sum of this many of its highest biased scores.
            None is K // group_topk; group_topk must divide K. DeepSeek-V3 has 2, V2 1.
        normalize_weights: whether the K weights of a token are divided by their sum. False: a
            weight is the expert's score, or with "softmax" its share of the softmax over all E.
            True: that value divided by the sum over the K (+ 1e-20; with use_pre_softmax at least
                1e-12).
            None: True, except with use_pre_softmax, and with "sigmoid" and "sqrtsoftplus" if K is
            1.
        scaling_factor: multiplies the weights, after they are normalised.

    Raises:
        InvalidArgumentError: an attribute is wrong, or does not fit another one.

    Source: a softmax over the picked logits is from Shazeer et al. 2017 (arXiv:1701.06538). Routing
    groups and sigmoid scores are DeepSeek-V3's (arXiv:2412.19437), "sqrtsoftplus" is DeepSeek-V4's,
    1e-20 DeepSeek's, and 1e-12 Ernie-4.5's `moe_norm_min`. Attributes are named as in Transformer
    Engine's fused router.

    Examples:
        >>> ep.Router("sigmoid", num_groups=8, group_topk=4, scaling_factor=2.5).use_pre_softmax
        False
    """

    score_function: str = "softmax"
    use_pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    group_score_topk: int | None = None
    normalize_weights: bool | None = None
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.score_function not in SCORE_FUNCTIONS:
            _fail(
                "score_function",
                f"score_function must be one of {SCORE_FUNCTIONS}, got {self.score_function!r}",
            )
        if not isinstance(self.use_pre_softmax, bool):
            _fail(
                "use_pre_softmax",
                f"use_pre_softmax must be True or False, got {self.use_pre_softmax!r}",
            )
        if not isinstance(self.normalize_weights, bool | None):
            _fail(
                "normalize_weights",
                f"normalize_weights must be None, True or False, got {self.normalize_weights!r}",
            )
        check_at_least("scaling_factor", self.scaling_factor, -math.inf)
        self._check_groups()

    def _check_groups(self) -> None:
        for name in ("num_groups", "group_topk", "group_score_topk"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_whole(name, value))
        num_groups, group_topk, summed = self.num_groups, self.group_topk, self.group_score_topk
        if (num_groups is None) != (group_topk is None):
            _fail(
                "group_topk", f"give both, got num_groups={num_groups} and group_topk={group_topk}"
            )
        if num_groups is None or group_topk is None:
            if summed is not None:
                _fail(
                    "group_score_topk",
                    f"group_score_topk={summed} goes with num_groups and group_topk, got neither",
                )
        elif group_topk > num_groups:
            _fail(
                "group_topk", f"group_topk must be 1 to num_groups={num_groups}, got {group_topk}"
            )

    @classmethod
    def from_hf(cls, config: Any) -> Router:
        """Returns the router of a model from its Hugging Face config.

        docs/families.md lists the models, and what else their blocks need: a bias for the choice
        (`expert_bias=`), an activation, or weights on the experts' inputs.

        Args:
            config: a config object, or the dict that its config.json holds.

        Returns:
            The Router.

        Raises:
            InvalidArgumentError: the model type is unknown, or an option of routing is unknown or
                has an unknown value; the error names it.

        Examples:
            >>> router = ep.Router.from_hf({"model_type": "qwen3_moe", "norm_topk_prob": True})
            >>> router == ep.Router(use_pre_softmax=True, normalize_weights=True)
            True
        """
        return cls(**families.arguments_of(config))


def summed_scores(router: Router, top_k: int) -> int:
    """Returns the number of scores whose sum is a routing group's score."""
    if router.group_score_topk is not None:
        return router.group_score_topk
    return top_k // (router.group_topk or 1)


def normalizes(router: Router, top_k: int) -> bool:
    """Whether the K weights of a token sum to one."""
    if router.normalize_weights is not None:
        return router.normalize_weights
    if router.score_function == "softmax":
        return not router.use_pre_softmax
    return top_k > 1


# Arguments of `moe`, `route` and flax's modules before 0.2, and what replaces each of them.
REMOVED = {
    field.name: f"router=ep.Router({field.name}=...)" for field in dataclasses.fields(Router)
}
REMOVED["apply_topk_weights_early"] = 'weights_at="hidden" of ep.moe for True, "output" for False'
REMOVED["apply_topk_weights_to_input"] = 'weights_at="input" of ep.moe for True'


def check(experts: int, top_k: int, router: Any, expert_bias: jax.Array | None) -> None:
    """Raises InvalidArgumentError if K, the router or the bias does not fit E experts."""
    if not isinstance(router, Router):
        _fail("router", f"router must be an ep.Router, got {router!r}")
    if not 1 <= top_k <= experts:
        _fail("top_k", f"top_k must be 1 to {experts} (the experts in logits), got {top_k}")
    if expert_bias is not None and expert_bias.shape != (experts,):
        _fail("expert_bias", f"expert_bias must be [{experts}], got {list(expert_bias.shape)}")
    num_groups, group_topk, summed = router.num_groups, router.group_topk, router.group_score_topk
    if num_groups is None:
        return
    if experts % num_groups:
        _fail("num_groups", f"num_groups={num_groups} does not divide the {experts} experts")
    if summed is None and top_k % group_topk:
        _fail(
            "group_topk",
            f"group_topk must divide top_k={top_k} unless group_score_topk is given, "
            f"got {group_topk}",
        )
    if top_k > group_topk * (experts // num_groups):
        _fail(
            "group_topk",
            f"top_k={top_k} over group_topk={group_topk} routing groups asks for "
            f"{-(-top_k // group_topk)} experts of a group of {experts // num_groups}",
        )
    if summed is not None and summed > experts // num_groups:
        _fail(
            "group_score_topk",
            f"group_score_topk must be 1 to {experts // num_groups} (the experts of a routing "
            f"group), got {summed}",
        )
