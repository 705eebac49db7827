"""Options of the demo, checked before anything starts. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
from typing import Literal, NoReturn, get_args

from ep_runtime.errors import InvalidArgumentError

Transport = Literal["auto", "memfd", "nvlink", "nccl", "xla"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
Platform = Literal["cpu", "gpu"]
PLATFORMS: tuple[Platform, ...] = get_args(Platform)
# Transports that support devices of only one platform.
_SERVES = {"memfd": "cpu", "nvlink": "gpu", "nccl": "gpu"}
RECIPES = ("f32", "bf16", "fp8", "fp8-block", "mxfp8")
AXES = ("dp", "fsdp", "ep", "tp")
HEADS = 4
VOCAB = 256  # bytes
# A comparison trains two models on the machine, so its steps take more than twice as long.
DEFAULT_STEPS, DEFAULT_COMPARE_STEPS = 500, 200
# Enough for a copy of the state before the death and for steps after it.
MIN_SURVIVE_STEPS = 8
# Measured on two cores with the default sizes: seconds to compile a step, and FLOP/s.
_COMPILE_S, _FLOPS = 20.0, 50e9


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Arguments of one demo, named after its options; `checked` validates them.

    Attributes:
        mesh: axes with sizes, "dp=2,fsdp=2,ep=2", outermost first; None chooses dp and ep.
        compare: train a twin on transport "xla" and compare every step's loss. On CPU devices
            losses must be bit-equal. Elsewhere they may differ by `loss_tolerance`, and the twin
            copies the model's state every other step.
        survive: whether the last process kills itself half way and the others continue to train.
        devices, batch: totals over all processes.
        program: the command with which the user called `ep-runtime`, for hints to paste.
    """

    steps: int = DEFAULT_STEPS
    devices: int = 8
    platform: Platform = "cpu"
    processes: int = 1
    mesh: str | None = None
    recipe: str = RECIPES[0]
    transport: Transport = "auto"
    compare: bool = False
    survive: bool = False
    batch: int = 16
    seq: int = 128
    num_experts: int = 8
    top_k: int = 2
    num_layers: int = 2
    hidden_size: int = 128
    mlp_dim: int = 256
    seed: int = 0
    address: str | None = None
    program: str = dataclasses.field(default_factory=lambda: shlex.quote(sys.argv[0]))

    def checked(self) -> DemoConfig:
        """Returns itself; raises InvalidArgumentError with the wanted and the given value."""
        axes, devices, experts = self.axes, self.devices, self.num_experts
        ep, h, m = axes.get("ep", 1), self.hidden_size, self.mlp_dim
        # Each entry: a value that must be false, option, wanted value, given value.
        for wrong, option, wanted, got in (
            (devices % self.processes, "processes", f"a divisor of {devices=}", self.processes),
            ("ep" not in axes, "mesh", "axes with an ep among them", self.mesh),
            (math.prod(axes.values()) != devices, "mesh", f"axes of product {devices=}", self.mesh),
            (experts % ep, "experts", f"a multiple of {ep=} of the mesh", experts),
            (self.top_k > experts, "top_k", f"1 to {experts=}", self.top_k),
            (h % HEADS, "hidden", f"a multiple of the {HEADS} heads", h),
            (h % axes.get("fsdp", 1), "mesh", f"an fsdp that divides {h=}", self.mesh),
            (m % axes.get("tp", 1), "mesh", f"a tp that divides {m=}", self.mesh),
            (self.batch % devices, "batch", f"a multiple of {devices=}", self.batch),
            (not 2 <= self.seq <= 1024, "seq", "2 to 1024", self.seq),
        ):
            if wrong:
                _refuse(option, wanted, got)
        least = MIN_SURVIVE_STEPS
        for wrong, option, wanted, got in (
            (self.processes < 2, "processes", "at least 2", self.processes),
            (self.steps < least, "steps", f"at least {least}", self.steps),
            (self.mesh is not None, "mesh", "left to fit_mesh", self.mesh),
            (self.compare, "compare", "off", self.compare),
            (self.address == "none", "address", "a daemon's, which keeps the state", "none"),
        ):
            if self.survive and wrong:
                _refuse(option, f"{wanted} with --survive", got)
        if _SERVES.get(self.transport, self.platform) != self.platform:
            served = [name for name in TRANSPORTS if _SERVES.get(name) in (None, self.platform)]
            _refuse("transport", f"one of {served} with --platform {self.platform}", self.transport)
        if self.compare and self.transport == "xla":
            _refuse("transport", "auto with --compare (the twin is the xla one)", "xla")
        return self

    def num_parameters(self, experts: int) -> int:
        """Number of parameters of the model, with so many experts in a layer."""
        h = self.hidden_size
        layer = 4 * h * h + h * self.num_experts + 3 * experts * h * self.mlp_dim + 2 * h
        return self.num_layers * layer + 2 * VOCAB * h + h

    @property
    def seconds_on_two_cores(self) -> float:
        """Estimated seconds of the training on two cores, compilation included."""
        step_s = 6 * self.num_parameters(self.top_k) * self.tokens_per_step / _FLOPS
        return (1 + self.compare) * (_COMPILE_S + self.steps * step_s)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, outermost first.

        By default there are two EP groups if each then has more than one rank.
        """
        if self.mesh is not None:
            return parse_mesh(self.mesh)
        if self.survive:
            return {"ep": self.devices}
        groups = 2 if self.devices >= 4 and self.devices % 2 == 0 else 1
        return {"dp": groups, "ep": self.devices // groups}

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    @property
    def loss_tolerance(self) -> float:
        """Largest relative difference of losses; not 0 on GPUs, where XLA tunes each program."""
        return 1e-3 if self.platform == "gpu" else 0.0


def parse_mesh(text: str) -> dict[str, int]:
    """Parses a mesh such as "dp=2,fsdp=2,ep=2" into sizes by axis.

    Raises:
        InvalidArgumentError: another form, an unknown axis, or a repeated axis.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in axes or not size.isdecimal() or int(size) < 1:
            _refuse("mesh", f"as dp=2,fsdp=2,ep=2 with axes of {AXES}", text)
        axes[name] = int(size)
    return axes


def _refuse(argument: str, wanted: str, got: object) -> NoReturn:
    flag = "--" + argument.replace("_", "-")
    raise InvalidArgumentError(f"{flag} must be {wanted}, got {got!r}", argument=argument)
