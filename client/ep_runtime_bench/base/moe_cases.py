"""Cases, orders and results of `bench moe`, and the base of all orders.

Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ep_runtime.specs import COMBINE_PRECISIONS

PADDED = "stock padded"
DROPLESS = "stock dropless"
TORCH = "torch"  # PyTorch, in `moe` and `train`
REMAT = "remat"
# Rounds of steps that are enqueued without waiting, and steps of a round.
ROUNDS, ENQUEUED = 5, 10
# Number formats of the experts' matmuls; "none" is the layer's dtype.
RECIPES = ("none", "bf16", "fp8", "fp8-block", "mxfp8")
EIGHT_BIT = RECIPES[2:]
# When weights of an 8-bit recipe are quantized: in every call, or once per step. `moe` does not
# time the quantization per step, because many layers of a model share a step.
QUANTIZED = ("call", "step")
AUTO_SPARE = "auto"  # slots for copies as the group chooses
# The router's weights multiply the activations before wo, or the outputs in combine.
WEIGHTS = ("hidden", "output")


@dataclasses.dataclass(frozen=True)
class Case:
    """One MoE layer, gated.

    Attributes:
        tokens: T, tokens of one rank.
        hidden: H.
        inner: M, the width of an expert.
        num_experts: E.
        top_k: K.
    """

    tokens: int
    hidden: int
    inner: int
    num_experts: int
    top_k: int

    @property
    def flops(self) -> int:
        """FLOPs of one rank's step: all matmuls of every slot, forward once and backward twice."""
        return 3 * 2 * self.tokens * self.top_k * 3 * self.hidden * self.inner


CASES: dict[str, Case] = {
    "deepseek-like": Case(4096, 7168, 2048, 64, 8),
    "mixtral-like": Case(8192, 4096, 14336, 8, 2),
    "small-experts": Case(8192, 2048, 768, 128, 8),
    "8-layers": Case(8192, 2048, 1024, 64, 8),  # one layer of `train`'s model "8-layers"
    "deepseek-v3-like": Case(4096, 7168, 2048, 256, 8),  # its weights need eight GPUs
}
DEFAULT_CASES = ("deepseek-like", "mixtral-like", "small-experts")
# The same proportions, small enough for a laptop.
CPU_CASES: dict[str, Case] = {
    "deepseek-like": Case(64, 128, 64, 16, 4),
    "mixtral-like": Case(64, 64, 256, 8, 2),
    "small-experts": Case(64, 64, 32, 32, 4),
    "8-layers": Case(32, 64, 32, 16, 4),
    "deepseek-v3-like": Case(64, 128, 64, 64, 4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The subject and settings that one fresh process measures.

    Attributes:
        subject: a transport, PADDED, DROPLESS or TORCH.
        name: of the case or model, and of the routing if it is not the router's.
        devices: N, the number of devices.
        platform: "gpu" or "cpu".
        dtype: dtype of tokens and parameters.
        repeats: timed steps, or rounds of them; fewer if they are slow.
        address: address of the daemon.
        capacity_factor: size of our slabs as a multiple of the even share of slots; 0 is room for
            any routing.
        recipe: one of RECIPES.
        overlap: whether exchanges overlap matmuls, "on" or "off".
        spare_experts: slots of each rank for copies of experts, or AUTO_SPARE.
        precision: the group's combine_precision.
        quantized: one of QUANTIZED.
        config: options of a model's config.json, from which our router and activation are made;
            None means those of Mixtral.
    """

    bench: ClassVar[str]
    subject: str
    name: str
    devices: int
    platform: str
    dtype: str
    repeats: int
    address: str
    capacity_factor: float = 0.0
    recipe: str = RECIPES[0]
    overlap: str = "on"
    spare_experts: int | str = AUTO_SPARE
    precision: str = COMBINE_PRECISIONS[0]
    quantized: str = QUANTIZED[0]
    config: Mapping[str, Any] | None = None

    @property
    def own_label(self) -> str:
        """Settings that only this kind of order has, unless they have the default."""
        return ""

    @property
    def label(self) -> str:
        """The subject, and its settings that differ from the defaults."""
        words = [self.subject]
        words += [self.recipe] * (self.recipe != RECIPES[0])
        words += [f"{self.capacity_factor:g}x"] * (self.capacity_factor != 0)
        words += [self.own_label] * bool(self.own_label)
        words += [f"overlap {self.overlap}"] * (self.overlap != "on")
        words += [f"{self.spare_experts} spare"] * (self.spare_experts != AUTO_SPARE)
        words += [f"{self.precision} sums"] * (self.precision != COMBINE_PRECISIONS[0])
        words += ["weights once"] * (self.quantized != QUANTIZED[0])
        return " ".join(words)

    @property
    def is_stock(self) -> bool:
        return self.subject in (PADDED, DROPLESS, TORCH)

    @property
    def module(self) -> str:
        """The module in the bench's package that measures the order."""
        return f"ep_runtime_bench.{self.bench}.{'torch_' if self.subject == TORCH else ''}client"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOrder(Order):
    """An order for one MoE layer; `weights` is one of WEIGHTS."""

    bench: ClassVar[str] = "moe"
    case: Case
    weights: str = WEIGHTS[0]

    @property
    def own_label(self) -> str:
        return self.weights if self.weights != WEIGHTS[0] else ""

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> LayerOrder:
        return cls(**{**said, "case": Case(**said["case"])})


def settings(options: Any, **own: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns fields of an order for every combination of the options, without repeats.

    Recipes without 8-bit weights run once, whatever `quantized` is.

    Args:
        options: BenchOptions.
        own: values of fields that only this kind of order has.
    """
    axes: dict[str, Sequence[Any]] = {
        "subject": options.transports,
        "recipe": options.recipes,
        "capacity_factor": options.capacity,
        **own,
        "overlap": options.overlap,
        "spare_experts": [n if n == AUTO_SPARE else int(n) for n in options.spare_experts],
        "precision": options.precision,
        "quantized": options.quantized,
    }
    found = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        if chosen["recipe"] not in EIGHT_BIT:
            chosen["quantized"] = QUANTIZED[0]
        found += [chosen] * (chosen not in found)
    return found


def of_all(options: Any, address: str) -> dict[str, Any]:
    """Returns fields that all orders of a run share."""
    return {
        "devices": options.devices,
        "platform": "gpu" if options.on_gpus else "cpu",
        "dtype": options.dtype,
        "repeats": options.repeats,
        "address": address,
    }


@dataclasses.dataclass(frozen=True)
class Step:
    """Times and memory of one program.

    Attributes:
        variant: "" or REMAT.
        step_s: seconds of every step that the host waited for.
        enqueued_s: seconds of a step if many are enqueued without waiting, the median.
        peak_bytes: the most bytes that the fullest device held so far; None if unknown.
        planned_bytes: bytes of the program's operands, results and temporaries on one device.
        joules: joules that all devices use in a step; None without a counter.
    """

    variant: str
    step_s: Sequence[float]
    enqueued_s: float
    peak_bytes: int | None
    planned_bytes: int
    joules: float | None = None


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """Time of all kernels of one name in one part of a step.

    Attributes:
        part: forward or backward, and the scope: "backward experts/grouped_gemm"; "" if the profile
            does not tell.
        kernel: its name.
        calls: calls in a step.
        step_s: seconds of all these calls in a step of device 0.
    """

    part: str
    kernel: str
    calls: float
    step_s: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """Kernels of one step, averaged over consecutive steps.

    Attributes:
        kernels: the kernels, longest first.
        step_s: seconds of one step on device 0.
        idle_s: seconds of these in which no kernel ran there.
    """

    kernels: Sequence[KernelTime] = ()
    step_s: float = 0.0
    idle_s: float = 0.0

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Profile:
        return cls(**{**said, "kernels": [KernelTime(**one) for one in said["kernels"]]})


@dataclasses.dataclass(frozen=True)
class Measured:
    """Results of one process.

    Attributes:
        steps: results of every variant.
        window_bytes: bytes of windows per rank, which XLA's allocators do not count.
        profile: profile of the variant without remat; empty for plain JAX.
        dropped: slots of a step that got no row, on all devices; None if not counted.
        given_bytes: bytes of operands and their gradients on one device.
        estimated_bytes: `estimate_memory`'s result for group and layer; None for plain JAX.
    """

    steps: Sequence[Step]
    window_bytes: int = 0
    profile: Profile = Profile()
    dropped: int | None = None
    given_bytes: int = 0
    estimated_bytes: int | None = None

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Measured:
        steps = [Step(**one) for one in said["steps"]]
        profile = Profile.from_dict(said["profile"])
        return cls(**{**said, "steps": steps, "profile": profile})
