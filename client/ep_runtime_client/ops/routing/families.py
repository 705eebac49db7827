"""The routers of published models: arguments of `ep.Router` from their Hugging Face configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ep_runtime import allowed_names
from ep_runtime.errors import InvalidArgumentError

Arguments = dict[str, Any]
# Options of a config that tell how tokens are routed, each with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "moe_norm_min": (),
    "moe_normalize_expert_weights": (),
    "moe_router_activation_func": (),
    "n_group": (1,),
    "norm_topk_prob": (),
    "routed_scaling_factor": (1.0,),
    "scoring_func": (),
    "topk_group": (1,),
    "topk_method": (),
    "zero_expert_num": (0,),
}
# Other names that some configs use.
_ALSO = {"n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize"}
# Keys under which configs of whole models have these options.
_PARTS = {"dbrx": "ffn_config", "gemma4": "text_config", "llama4": "text_config"}


class _Config:
    """Reads a config's options, and records which were read."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._read: set[str] = set()
        self.model_type = self("model_type")

    def __call__(self, name: str, default: Any = None) -> Any:
        """Returns an option, or its family's default, because config files leave defaults out."""
        self._read.add(name)
        for each in (name, _ALSO.get(name, name)):
            if isinstance(self._given, Mapping) and each in self._given:
                return self._given[each]
            if hasattr(self._given, each):
                return getattr(self._given, each)
        return default

    def only(self, **wanted: Any) -> None:
        """Raises InvalidArgumentError if an option has another value than the family supports."""
        for name, value in wanted.items():
            found = self(name)
            if found not in (None, value):
                self._refuse(name, found, f", only {value!r}")

    def check_rest(self) -> None:
        """Raises InvalidArgumentError for an option of routing that the family does not have."""
        for name, neutral in _NEUTRAL.items():
            if name not in self._read and (found := self(name)) not in (None, *neutral):
                self._refuse(name, found, "")

    def _refuse(self, name: str, found: Any, known: str) -> None:
        raise InvalidArgumentError(
            f"Router.from_hf does not know {name}={found!r} of {self.model_type!r}{known}; build "
            "the ep.Router of your model yourself, or route by your own code (moe's routing=)",
            argument=name,
        )


def _always(only: Mapping[str, Any], **arguments: Any) -> Callable[[_Config], Arguments]:
    """Returns a reader of routers with these arguments; `only`: options and their only values."""

    def read(config: _Config) -> Arguments:
        config.only(**only)
        return arguments

    return read


_softmax = _always({"norm_topk_prob": True})
_llama4 = _always({}, score_function="sigmoid", normalize_weights=False)


def _shares(config: _Config) -> Arguments:
    return {"use_pre_softmax": True, "normalize_weights": bool(config("norm_topk_prob", False))}


def _dbrx(config: _Config) -> Arguments:
    config.only(moe_normalize_expert_weights=1.0)  # the order of a norm, which is the sum
    norm = config("moe_normalize_expert_weights", 1.0)
    return {"use_pre_softmax": True, "normalize_weights": norm is not None}


def _deepseek_v2(config: _Config) -> Arguments:
    config.only(scoring_func="softmax", norm_topk_prob=False)
    groups = {"num_groups": config("n_group"), "group_topk": config("topk_group")}
    if config("topk_method", "greedy") == "greedy":
        groups = {}
    else:
        config.only(topk_method="group_limited_greedy")
        groups["group_score_topk"] = 1
    return {"use_pre_softmax": True, "scaling_factor": _scale(config, 1.0), **groups}


def _deepseek_v3(
    groups: int = 1, norm: bool = True, scale: float = 1.0
) -> Callable[..., Arguments]:
    """Returns a reader of routers with sigmoid scores and groups, with a family's defaults."""

    def arguments(config: _Config) -> Arguments:
        config.only(
            scoring_func="sigmoid", topk_method="noaux_tc", moe_router_activation_func="sigmoid"
        )
        return {
            "score_function": "sigmoid",
            "num_groups": config("n_group", groups) or 1,
            "group_topk": config("topk_group", max(groups // 2, 1)) or 1,
            "group_score_topk": 2,
            "normalize_weights": bool(config("norm_topk_prob", norm)),
            "scaling_factor": _scale(config, scale),
        }

    return arguments


def _deepseek_v4(config: _Config) -> Arguments:
    config.only(scoring_func="sqrtsoftplus", norm_topk_prob=True, topk_method="noaux_tc")
    scores = {"score_function": "sqrtsoftplus", "normalize_weights": True}
    return {**scores, "scaling_factor": _scale(config, 1.5)}


def _lfm2(config: _Config) -> Arguments:
    normalize = bool(config("norm_topk_prob", True))
    scores = {"score_function": "sigmoid", "normalize_weights": normalize}
    return {**scores, "scaling_factor": _scale(config, 1.0)}


def _longcat(config: _Config) -> Arguments:
    config("zero_expert_num", 0)
    config.only(norm_topk_prob=False)
    return {"use_pre_softmax": True, "scaling_factor": _scale(config, 6.0)}


def _phimoe(config: _Config) -> Arguments:
    raise InvalidArgumentError(
        "Phi-3.5 picks experts by SparseMixer, which is not an ep.Router: route by your own code, "
        "as phimoe of docs/families.md does, and give moe the result as routing=",
        argument="model_type",
    )


def _scale(config: _Config, default: float) -> float:
    found = config("routed_scaling_factor", default)
    return 1.0 if found is None else float(found)


_FAMILIES: Mapping[str, Callable[[_Config], Arguments]] = {
    "dbrx": _dbrx,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3(groups=8, scale=2.5),
    "deepseek_v4": _deepseek_v4,
    "dots1": _deepseek_v3(norm=False),
    "ernie4_5_moe": _always({"moe_norm_min": 1e-12}, use_pre_softmax=True, normalize_weights=True),
    "gemma4": _softmax,
    "gemma4_text": _softmax,
    "glm4_moe": _deepseek_v3(),
    "gpt_oss": _softmax,
    "granitemoe": _softmax,
    "hunyuan_v1_moe": _softmax,
    "kimi_k2": _deepseek_v3(scale=2.827),
    "kimi_linear": _deepseek_v3(scale=2.446),
    "lfm2_moe": _lfm2,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "longcat_flash": _longcat,
    "mimo_v2_flash": _deepseek_v3(),
    "minimax_m2": _always(
        {"scoring_func": "sigmoid"}, score_function="sigmoid", normalize_weights=True
    ),
    "mixtral": _softmax,
    "olmoe": _shares,
    "phimoe": _phimoe,
    "qwen2_moe": _shares,
    "qwen3_moe": _shares,
}


def arguments_of(given: Any) -> Arguments:
    """Returns the arguments of `ep.Router` for a model, from its Hugging Face config.

    Raises:
        InvalidArgumentError: the model type, or an option of routing, is unknown.
    """
    config = _Config(given)
    if config.model_type is None:
        raise InvalidArgumentError(
            "config must be a Hugging Face config, or a dict, with a model_type, got "
            f"{type(given).__name__} without one",
            argument="config",
        )
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise InvalidArgumentError(
            f"Router.from_hf does not know the model type {config.model_type!r}"
            + allowed_names.hint(str(config.model_type), _FAMILIES)
            + f"; it knows {', '.join(_FAMILIES)}",
            argument="model_type",
        )
    part = _Config(part_with_experts(given))
    part.model_type = config.model_type
    found = family(part)
    part.check_rest()
    return found


def part_with_experts(given: Any) -> Any:
    """Returns the part of a config with routing and experts: for most models all of it."""
    config = _Config(given)
    part = config(_PARTS.get(config.model_type, ""))
    return given if part is None else part
