"""Models, orders and results of `bench train`.

Imports no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ep_runtime_bench.base import routing
from ep_runtime_bench.base.moe_cases import Case, Order, Profile

FIRST = 8  # steps that report losses, before the timed steps
ROUND = 6  # consecutive steps, timed together
# Values saved for backward: all, the default of `ep.remat_policy()`, or only the named ones.
REMATS = ("none", "default", "plan", "rows")
# How tokens get experts: from the initial router, or drawn beforehand.
ROUTINGS = ("router", "uniform", "zipf", "double")


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder with an MoE block in every layer; its experts are gated.

    Attributes:
        layers: number of layers, which a scan runs.
        hidden: H.
        heads: attention heads.
        inner: M of an expert.
        num_experts: E.
        top_k: K.
        sequence: S.
        batch: sequences per device.
        vocabulary: rows of the embedding, which is also the head.
        beside: a mesh axis of two devices in addition to ep, "fsdp" or "tp"; "" for ep alone.
    """

    layers: int
    hidden: int
    heads: int
    inner: int
    num_experts: int
    top_k: int
    sequence: int
    batch: int
    vocabulary: int
    beside: str = ""

    @property
    def case(self) -> Case:
        """The sizes of one of its MoE layers."""
        tokens = self.batch * self.sequence
        return Case(tokens, self.hidden, self.inner, self.num_experts, self.top_k)

    @property
    def flops(self) -> int:
        """FLOPs of one step on a device: projections, causal attention, router, head, experts."""
        dense = 8 * self.hidden**2 + 2 * self.sequence * self.hidden
        dense += 2 * self.hidden * self.num_experts
        forward = self.layers * dense + 2 * self.hidden * self.vocabulary
        return 3 * self.case.tokens * forward + self.layers * self.case.flops


_SMALL = Model(8, 2048, 16, 1024, 64, 8, 2048, 4, 32_000)
_TINY = Model(2, 64, 4, 32, 16, 4, 32, 1, 128)
MODELS: dict[str, Model] = {
    "8-layers": _SMALL,
    "deepseek-like": Model(2, 7168, 56, 2048, 64, 8, 2048, 2, 32_000),
    "fsdp-ep": dataclasses.replace(_SMALL, beside="fsdp"),
    "ep-tp": dataclasses.replace(_SMALL, beside="tp"),
    # One rank's share of a group of four, for one GPU: its experts, and as many rows.
    "8-layers-quarter": dataclasses.replace(_SMALL, num_experts=_SMALL.num_experts // 4),
}
# Small enough for a laptop.
CPU_MODELS: dict[str, Model] = {
    "8-layers": _TINY,
    "deepseek-like": dataclasses.replace(_TINY, hidden=128, heads=8, inner=64),
    "fsdp-ep": dataclasses.replace(_TINY, beside="fsdp"),
    "ep-tp": dataclasses.replace(_TINY, beside="tp"),
    "8-layers-quarter": dataclasses.replace(_TINY, num_experts=_TINY.num_experts // 4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOrder(Order):
    """An order for one model; `remat` is one of REMATS, `routing` one of ROUTINGS, `commit_every`
    the steps from one copy of the state to the next, 0 for none."""

    bench: ClassVar[str] = "train"
    model: Model
    remat: str = REMATS[0]
    routing: str = ROUTINGS[0]
    commit_every: int = 0

    @property
    def own_label(self) -> str:
        return f"remat {self.remat}" if self.remat != REMATS[0] else ""

    @property
    def axes(self) -> dict[str, int]:
        """Returns the mesh axes: ep is the last, or before tp."""
        if not self.model.beside:
            return {"ep": self.devices}
        sizes = {self.model.beside: 2, "ep": self.devices // 2}
        return sizes if self.model.beside == "fsdp" else dict(reversed(sizes.items()))

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> TrainOrder:
        return cls(**{**said, "model": Model(**said["model"])})


@dataclasses.dataclass(frozen=True)
class Committed:
    """Times of steps with copies of the state and without, in turns, one value per round.

    Attributes:
        without_s: seconds of a step without a copy.
        with_s: seconds of a step, of which the first of a round begins a copy. The round ends when
            its steps and its copy have ended.
        copy_s: seconds from the begin of a copy until it is committed.
        copied_bytes: bytes of a copy that this process writes.
    """

    without_s: Sequence[float]
    with_s: Sequence[float]
    copy_s: Sequence[float]
    copied_bytes: int


@dataclasses.dataclass(frozen=True)
class Trained:
    """Results of one process.

    Attributes:
        step_s: seconds of a step, one value per round of consecutive steps.
        losses: losses of the first steps.
        peak_bytes: the most bytes that the fullest device held; None if unknown.
        window_bytes: bytes of windows per rank, which XLA's allocators do not count.
        planned_bytes: bytes of the program's operands, results and temporaries on one device.
        profile: the kernels of a step.
        joules: joules that all devices use in a step; None without a counter.
        committed: the cost of copies of the state; None if they were not asked for.
    """

    step_s: Sequence[float]
    losses: Sequence[float]
    peak_bytes: int | None
    window_bytes: int
    planned_bytes: int
    profile: Profile = Profile()
    joules: float | None = None
    committed: Committed | None = None

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Trained:
        profile, committed = Profile.from_dict(said["profile"]), said["committed"]
        known = {"profile": profile, "committed": committed and Committed(**committed)}
        return cls(**{**said, **known})


BATCHES = 4  # used again in the same order


def batches(model: Model, groups: int) -> list[Any]:
    """Returns batches int32 [sequences, S + 1] of few words, so that a model can learn."""
    rng, shape = np.random.default_rng(0), (groups * model.batch, model.sequence + 1)
    words = min(256, model.vocabulary)
    return [rng.integers(0, words, shape).astype(np.int32) for _ in range(BATCHES)]


def expert_ids(model: Model, name: str, ranks: int, groups: int) -> Any:
    """Returns experts int32 [sequences, S, K] of that routing; None if the router chooses them.

    "double": the first rank's experts get twice their even share of the slots.

    Args:
        ranks: number of ranks of the EP group.
        groups: number of devices with different tokens.
    """
    if name == "router":
        return None
    tokens = model.case.tokens * groups
    if name == "double":
        share = np.ones(model.num_experts)
        share[: model.num_experts // ranks] = 2 * (ranks - 1) / max(ranks - 2, 0.1)
        idx = routing.drawn(np.random.default_rng(0), share, tokens, model.top_k)
    else:
        idx = routing.topk_idx(name, tokens, model.num_experts, model.top_k)
    return idx.reshape(groups * model.batch, model.sequence, model.top_k)
