"""What the demo was asked to do, checked before anything is started. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal, NoReturn, get_args

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import COMBINE_PRECISIONS

Transport = Literal["auto", "memfd", "nvlink", "nccl", "xla"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
Platform = Literal["cpu", "gpu"]
CombinePrecision = Literal["fast", "exact", "fp8"]
PLATFORMS: tuple[Platform, ...] = get_args(Platform)
# Between which devices alone a transport moves rows.
_SERVES = {"memfd": "cpu", "nvlink": "gpu", "nccl": "gpu"}
RECIPES = ("f32", "bf16", "fp8", "fp8-block", "mxfp8")
RULES = ("fsdp+ep", "shard-exp-on-fsdp")
OPTIMIZERS = ("adamw", "muon")
AXES = ("dp", "fsdp", "ep", "tp")
HEADS = 4
VOCAB = 256  # bytes
DEFAULT_STEPS = 500
# Two models share the machine, so a step of a comparison takes more than twice as long.
DEFAULT_COMPARE_STEPS = 200


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Arguments of one demo. `checked` validates.

    Attributes:
        steps: optimizer steps.
        devices: D, devices of the mesh.
        platform: "cpu" or "gpu".
        processes: P, each with D / P of the devices.
        ep_size: ranks of one EP group where `mesh` is None; D / ep_size groups work beside each
            other.
        mesh: axes with sizes, "dp=2,fsdp=2,ep=2", outermost first.
        rules: layout of the experts' weights, a kind of `ep.sharding.rules`.
        recipe: of the experts' matmuls, a name of RECIPES; several, with commas between, are
            trained one after the other.
        combine_precision: how sums of experts' rows travel, as of `Session.create_group`.
        optimizer: a name of OPTIMIZERS.
        plot: picture of the loss curves to write.
        transport: a name of TRANSPORTS.
        compare: train a twin on transport "xla" and compare every step's loss: bit by bit on CPU
            devices of one node, else within `loss_tolerance`, and the twin goes on from the
            model's state every other step.
        batch: windows per step, over all devices.
        seq: bytes per window.
        hidden_size: H.
        mlp_dim: M of an expert.
        learning_rate: the peak of the optimizer's schedule.
        seed: of parameters, batches and sampling.
        address: of a runtime; None finds or starts one.
        nodes: daemons of a cluster on this machine, between which the processes are divided.
        addresses: of these daemons, once they run.
    """

    steps: int = DEFAULT_STEPS
    devices: int = 8
    platform: Platform = PLATFORMS[0]
    processes: int = 1
    ep_size: int = 4
    mesh: str | None = None
    rules: str = RULES[0]
    recipe: str = RECIPES[0]
    combine_precision: CombinePrecision = "exact"
    optimizer: str = OPTIMIZERS[0]
    plot: str | None = None
    transport: Transport = "auto"
    compare: bool = False
    batch: int = 16
    seq: int = 128
    hidden_size: int = 128
    mlp_dim: int = 256
    num_experts: int = 8
    top_k: int = 2
    num_layers: int = 2
    capacity_factor: float = 2.0
    learning_rate: float = 3e-3
    sample_bytes: int = 160
    seed: int = 0
    address: str | None = None
    nodes: int = 1
    addresses: tuple[str, ...] = ()

    def checked(self) -> DemoConfig:
        """Itself, or InvalidArgumentError naming the argument, what was wanted and what was got."""
        counts = ("steps", "devices", "processes", "ep_size", "batch", "num_layers", "mlp_dim")
        for argument in counts:
            if getattr(self, argument) < 1:
                _refuse(argument, "at least 1", getattr(self, argument))
        if self.devices % self.processes:
            _refuse("processes", f"a divisor of devices={self.devices}", self.processes)
        if not 0 < self.learning_rate < math.inf:
            _refuse("learning_rate", "more than 0", self.learning_rate)
        for argument, choices in (
            ("rules", RULES),
            ("optimizer", OPTIMIZERS),
            ("combine_precision", COMBINE_PRECISIONS),
        ):
            if getattr(self, argument) not in choices:
                _refuse(argument, f"one of {choices}", getattr(self, argument))
        self._check_mesh()
        self._check_sizes()
        self._check_recipes()
        self._check_transport()
        self._check_nodes()
        if self.plot is not None and not Path(self.plot).absolute().parent.is_dir():
            _refuse("plot", "a file in a directory that exists", self.plot)
        return self

    def _check_transport(self) -> None:
        if self.platform not in PLATFORMS:
            _refuse("platform", f"one of {PLATFORMS}", self.platform)
        if self.transport not in TRANSPORTS:
            _refuse("transport", f"one of {TRANSPORTS}", self.transport)
        if _SERVES.get(self.transport, self.platform) != self.platform:
            served = [name for name in TRANSPORTS if _SERVES.get(name) in (None, self.platform)]
            _refuse("transport", f"one of {served} with --platform {self.platform}", self.transport)
        if self.compare and self.transport == "xla":
            _refuse("transport", "auto with --compare (the twin is the xla one)", "xla")

    def _check_nodes(self) -> None:
        if self.nodes < 1:
            _refuse("nodes", "at least 1", self.nodes)
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

    def _check_mesh(self) -> None:
        if self.mesh is None:
            if self.devices % self.ep_size:
                _refuse("ep_size", f"a divisor of devices={self.devices}", self.ep_size)
            return
        axes = parse_mesh(self.mesh)
        if "ep" not in axes:
            _refuse("mesh", "axes with an ep among them", self.mesh)
        if math.prod(axes.values()) != self.devices:
            _refuse("mesh", f"axes whose product is devices={self.devices}", self.mesh)

    def _check_sizes(self) -> None:
        axes = self.axes
        spread = ("ep", "fsdp") if self.rules == "shard-exp-on-fsdp" else ("ep",)
        shards = math.prod(axes.get(axis, 1) for axis in spread)
        if self.num_experts % shards:
            named = " x ".join(f"{a}_size={axes[a]}" for a in spread if a in axes)
            _refuse("num_experts", f"a multiple of {named}", self.num_experts)
        if not 1 <= self.top_k <= self.num_experts:
            _refuse("top_k", f"1 to num_experts={self.num_experts}", self.top_k)
        if self.hidden_size < HEADS or self.hidden_size % HEADS:
            _refuse("hidden_size", f"a multiple of the {HEADS} heads", self.hidden_size)
        for axis, dim, size in (("fsdp", "H", self.hidden_size), ("tp", "M", self.mlp_dim)):
            if size % axes.get(axis, 1):
                _refuse("mesh", f"a {axis} that divides {dim}={size}", self.mesh)
        if self.batch % self.devices:
            _refuse("batch", f"a multiple of devices={self.devices}", self.batch)
        if not 2 <= self.seq <= 1024:
            _refuse("seq", "2 to 1024", self.seq)

    def _check_recipes(self) -> None:
        for name in self.recipes:
            if name not in RECIPES:
                _refuse("recipe", f"of {RECIPES}, several with commas between", name)
        if len(set(self.recipes)) < len(self.recipes):
            _refuse("recipe", "different ones", self.recipe)
        if self.compare and len(self.recipes) > 1:
            _refuse("recipe", "one with --compare", self.recipe)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        h, e = self.hidden_size, self.num_experts
        experts = 3 * e * h * self.mlp_dim
        layer = 4 * h * h + h * e + experts + 2 * h
        return self.num_layers * layer + 2 * VOCAB * h + h

    @property
    def recipes(self) -> tuple[str, ...]:
        return tuple(self.recipe.split(","))

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, outermost first."""
        if self.mesh is not None:
            return parse_mesh(self.mesh)
        return {"dp": self.devices // self.ep_size, "ep": self.ep_size}

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
        InvalidArgumentError: not of that form, an axis that is none of AXES or comes twice.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in axes or not size.isdecimal() or int(size) < 1:
            _refuse("mesh", f"as dp=2,fsdp=2,ep=2 with axes of {AXES}", text)
        axes[name] = int(size)
    return axes


def default_devices(gpus: int) -> int:
    """The most of 1, 2, 4 and 8 devices that so many GPUs are; CPU devices where there are none."""
    return next((n for n in (8, 4, 2, 1) if n <= gpus), DemoConfig.devices)


def default_ep_size(devices: int) -> int:
    """Half of the devices where that leaves an EP group of more than one rank, else all."""
    return devices // 2 if devices % 2 == 0 and devices >= 4 else devices


def _refuse(argument: str, wanted: str, got: object) -> NoReturn:
    flag = "--" + argument.replace("_size", "").replace("num_", "").replace("_", "-")
    raise InvalidArgumentError(f"{flag} must be {wanted}, got {got!r}", argument=argument)
