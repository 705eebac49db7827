"""What the demo was asked to do, checked before anything is started. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal, NoReturn, get_args

from ep_runtime.errors import InvalidArgumentError

Transport = Literal["auto", "memfd", "nvlink", "nccl", "xla"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
Platform = Literal["cpu", "gpu"]
PLATFORMS: tuple[Platform, ...] = get_args(Platform)
CombinePrecision = Literal["fast", "exact", "fp8"]
# The only devices between which a transport moves rows.
_SERVES = {"memfd": "cpu", "nvlink": "gpu", "nccl": "gpu"}
RECIPES = ("f32", "bf16", "fp8", "fp8-block", "mxfp8")
RULES = ("fsdp+ep", "shard-exp-on-fsdp")
OPTIMIZERS = ("adamw", "muon")
AXES = ("dp", "fsdp", "ep", "tp")
HEADS = 4
VOCAB = 256  # bytes
# Two models share the machine, so a step of a comparison takes more than twice as long.
DEFAULT_STEPS, DEFAULT_COMPARE_STEPS = 500, 200
# Of two cores, measured with the default sizes: tracing and compiling a step, multiply-adds.
_COMPILE_S, _FLOPS = 20.0, 50e9


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Arguments of one demo, as its options name and explain them; `checked` validates.

    Attributes:
        devices: D, over all processes.
        mesh: axes with sizes, "dp=2,fsdp=2,ep=2", outermost first; None chooses dp and ep.
        recipe: one name of RECIPES, or several with commas between.
        compare: train a twin on transport "xla" and compare every step's loss: bit by bit on CPU
            devices of one node, else within `loss_tolerance`, and the twin continues from the
            model's state every other step.
        batch: windows of text per step, over all devices.
        seq: bytes per window.
        hidden_size, mlp_dim: H, and M of an expert.
        program: how the user called `ep-runtime`, for hints to paste.
        addresses: of the daemons of `nodes`, once they run.
    """

    steps: int = DEFAULT_STEPS
    devices: int = 8
    platform: Platform = "cpu"
    processes: int = 1
    nodes: int = 1
    mesh: str | None = None
    rules: str = RULES[0]
    recipe: str = RECIPES[0]
    combine_precision: CombinePrecision = "exact"
    optimizer: str = OPTIMIZERS[0]
    learning_rate: float = 3e-3
    plot: str | None = None
    transport: Transport = "auto"
    compare: bool = False
    batch: int = 16
    seq: int = 128
    num_experts: int = 8
    top_k: int = 2
    num_layers: int = 2
    hidden_size: int = 128
    mlp_dim: int = 256
    capacity_factor: float = 2.0
    seed: int = 0
    address: str | None = None
    program: str = "ep-runtime"
    addresses: tuple[str, ...] = ()

    def checked(self) -> DemoConfig:
        """Itself, or InvalidArgumentError naming the argument, what was wanted and what was got."""
        axes = self.axes
        if self.devices % self.processes:
            _refuse("processes", f"a divisor of devices={self.devices}", self.processes)
        if "ep" not in axes:
            _refuse("mesh", "axes with an ep among them", self.mesh)
        if math.prod(axes.values()) != self.devices:
            _refuse("mesh", f"axes whose product is devices={self.devices}", self.mesh)
        spread = ("ep", "fsdp") if self.rules == "shard-exp-on-fsdp" else ("ep",)
        if self.num_experts % math.prod(axes.get(axis, 1) for axis in spread):
            named = " x ".join(f"{axis}={axes[axis]}" for axis in spread if axis in axes)
            _refuse("experts", f"a multiple of {named} of the mesh", self.num_experts)
        if self.top_k > self.num_experts:
            _refuse("top_k", f"1 to experts={self.num_experts}", self.top_k)
        if self.hidden_size % HEADS:
            _refuse("hidden", f"a multiple of the {HEADS} heads", self.hidden_size)
        for axis, dim, size in (("fsdp", "H", self.hidden_size), ("tp", "M", self.mlp_dim)):
            if size % axes.get(axis, 1):
                _refuse("mesh", f"a {axis} that divides {dim}={size}", self.mesh)
        if self.batch % self.devices:
            _refuse("batch", f"a multiple of devices={self.devices}", self.batch)
        if not 2 <= self.seq <= 1024:
            _refuse("seq", "2 to 1024", self.seq)
        if unknown := [name for name in self.recipes if name not in RECIPES]:
            _refuse("recipe", f"of {RECIPES}, several with commas between", unknown[0])
        if len(self.recipes) > (1 if self.compare else len(set(self.recipes))):
            _refuse("recipe", "one with --compare, else different ones", self.recipe)
        if self.plot is not None and not Path(self.plot).absolute().parent.is_dir():
            _refuse("plot", "a file in a directory that exists", self.plot)
        self._check_transport()
        return self

    def _check_transport(self) -> None:
        if _SERVES.get(self.transport, self.platform) != self.platform:
            served = [name for name in TRANSPORTS if _SERVES.get(name) in (None, self.platform)]
            _refuse("transport", f"one of {served} with --platform {self.platform}", self.transport)
        if self.compare and self.transport == "xla":
            _refuse("transport", "auto with --compare (the twin is the xla one)", "xla")
        if self.nodes == 1:
            return
        if self.processes % self.nodes:
            _refuse("processes", f"a multiple of nodes={self.nodes}", self.processes)
        if self.transport == "nvlink":
            _refuse("transport", "auto, nccl or xla with --nodes: windows span none", "nvlink")
        if self.address is not None:
            _refuse("address", "left out with --nodes, which starts daemons", self.address)

    def of_process(self, index: int) -> DemoConfig:
        """For one process, which talks to its own node's daemon."""
        if not self.addresses:
            return self
        node = index * self.nodes // self.processes
        return dataclasses.replace(self, address=self.addresses[node])

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return self._parameters(self.num_experts)

    def _parameters(self, experts: int) -> int:
        h = self.hidden_size
        layer = 4 * h * h + h * self.num_experts + 3 * experts * h * self.mlp_dim + 2 * h
        return self.num_layers * layer + 2 * VOCAB * h + h

    @property
    def seconds_on_two_cores(self) -> float:
        """About how long the training takes there, compilation included."""
        step_s = 6 * self._parameters(self.top_k) * self.tokens_per_step / _FLOPS
        return len(self.recipes) * (1 + self.compare) * (_COMPILE_S + self.steps * step_s)

    @property
    def recipes(self) -> tuple[str, ...]:
        return tuple(self.recipe.split(","))

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, outermost first.

        By default two EP groups work next to each other if each has more than one rank; with
        several nodes one group spans them.
        """
        if self.mesh is not None:
            return parse_mesh(self.mesh)
        groups = 2 if self.nodes == 1 and self.devices >= 4 and self.devices % 2 == 0 else 1
        return {"dp": groups, "ep": self.devices // groups}

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    @property
    def loss_tolerance(self) -> float:
        """Of compared losses, relative; 0: bit-equal. XLA tunes each GPU program's matmuls, and
        over nodes a token's rows are summed node by node."""
        return 1e-3 if self.platform == "gpu" or self.nodes > 1 else 0.0

    @property
    def tokens_per_rank(self) -> int:
        """Devices along tp hold the same tokens."""
        return self.tokens_per_step * self.axes.get("tp", 1) // self.devices


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes by axis of "dp=2,fsdp=2,ep=2".

    Raises:
        InvalidArgumentError: another form, an unknown axis, or one that comes twice.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in axes or not size.isdecimal() or int(size) < 1:
            _refuse("mesh", f"as dp=2,fsdp=2,ep=2 with axes of {AXES}", text)
        axes[name] = int(size)
    return axes


def default_devices(gpus: int) -> int:
    """The most of 1, 2, 4 and 8 devices that so many GPUs are; CPU devices if there are none."""
    return next((n for n in (8, 4, 2, 1) if n <= gpus), DemoConfig.devices)


def _refuse(argument: str, wanted: str, got: object) -> NoReturn:
    flag = "--" + argument.replace("_", "-")
    raise InvalidArgumentError(f"{flag} must be {wanted}, got {got!r}", argument=argument)
