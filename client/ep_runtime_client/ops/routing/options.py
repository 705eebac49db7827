"""The options of `route`, and what it refuses."""

from __future__ import annotations

import dataclasses

import jax

from ep_runtime.errors import InvalidArgumentError

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclasses.dataclass(frozen=True)
class RouteOptions:
    """The static arguments of `route`."""

    top_k: int
    score_function: str
    use_pre_softmax: bool
    num_groups: int | None
    group_topk: int | None
    group_score_topk: int | None
    normalize_weights: bool | None
    scaling_factor: float

    @property
    def summed_scores(self) -> int:
        """Of how many scores a routing group's is the sum."""
        if self.group_score_topk is not None:
            return self.group_score_topk
        return self.top_k // (self.group_topk or 1)

    @property
    def normalizes(self) -> bool:
        """Whether the K weights of a token sum to one."""
        if self.normalize_weights is not None:
            return self.normalize_weights
        if self.score_function == "softmax":
            return not self.use_pre_softmax
        return self.top_k > 1


def _fail(argument: str, message: str) -> None:
    raise InvalidArgumentError(message, argument=argument)


def check(experts: int, options: RouteOptions, expert_bias: jax.Array | None) -> None:
    """Raises InvalidArgumentError where options do not fit E or each other."""
    top_k, score_function = options.top_k, options.score_function
    if not 1 <= top_k <= experts:
        _fail("top_k", f"top_k must be 1 to {experts} (the experts in logits), got {top_k}")
    if score_function not in SCORE_FUNCTIONS:
        _fail(
            "score_function",
            f"score_function must be one of {SCORE_FUNCTIONS}, got {score_function!r}",
        )
    if not isinstance(options.normalize_weights, bool | None):
        _fail(
            "normalize_weights",
            f"normalize_weights must be None, True or False, got {options.normalize_weights!r}",
        )
    if expert_bias is not None and expert_bias.shape != (experts,):
        _fail("expert_bias", f"expert_bias must be [{experts}], got {list(expert_bias.shape)}")
    _check_groups(experts, options)


def _check_groups(experts: int, options: RouteOptions) -> None:
    top_k, num_groups, group_topk = options.top_k, options.num_groups, options.group_topk
    summed = options.group_score_topk
    if (num_groups is None) != (group_topk is None):
        _fail("group_topk", f"give both, got num_groups={num_groups} and group_topk={group_topk}")
    if num_groups is None or group_topk is None:
        if summed is not None:
            _fail(
                "group_score_topk",
                f"group_score_topk={summed} goes with num_groups and group_topk, got neither",
            )
        return
    if num_groups < 1 or experts % num_groups:
        _fail("num_groups", f"num_groups={num_groups} does not divide the {experts} experts")
    if not 1 <= group_topk <= num_groups or (summed is None and top_k % group_topk):
        _fail(
            "group_topk",
            f"group_topk must be 1 to num_groups={num_groups} and divide top_k={top_k} "
            f"unless group_score_topk is given, got {group_topk}",
        )
    if top_k > group_topk * (experts // num_groups):
        _fail(
            "group_topk",
            f"top_k={top_k} over group_topk={group_topk} routing groups asks for "
            f"{-(-top_k // group_topk)} experts of a group of {experts // num_groups}",
        )
    if summed is not None and not 1 <= summed <= experts // num_groups:
        _fail(
            "group_score_topk",
            f"group_score_topk must be 1 to {experts // num_groups} (the experts of a routing "
            f"group), got {summed}",
        )
