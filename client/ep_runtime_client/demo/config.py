"""What the demo was asked to do, checked before anything is started. Imports no JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from ep_runtime.errors import InvalidArgumentError

Transport = Literal["auto", "memfd", "xla"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
DEFAULT_STEPS = 500
# Two models share the machine, so a step of a comparison takes more than twice as long.
DEFAULT_COMPARE_STEPS = 200


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Arguments of one demo. `checked` validates.

    Attributes:
        steps: optimizer steps.
        devices: D, CPU devices of the mesh (dp x ep).
        processes: P, each with D / P of the devices.
        ep_size: ranks of one EP group; D / ep_size groups work beside each other.
        transport: "auto", "memfd" or "xla".
        compare: train a twin on transport "xla" and compare every step's loss bit by bit.
        batch: windows per step, over all devices.
        seq: bytes per window.
        seed: of parameters, batches and sampling.
        address: of a runtime; None finds or starts one.
    """

    steps: int = DEFAULT_STEPS
    devices: int = 8
    processes: int = 1
    ep_size: int = 4
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

    def checked(self) -> DemoConfig:
        """Itself, or InvalidArgumentError naming the argument, what was wanted and what was got."""
        for argument in ("steps", "devices", "processes", "ep_size", "batch", "num_layers"):
            if getattr(self, argument) < 1:
                _refuse(argument, "at least 1", getattr(self, argument))
        if self.devices % self.processes:
            _refuse("processes", f"a divisor of devices={self.devices}", self.processes)
        if self.devices % self.ep_size:
            _refuse("ep_size", f"a divisor of devices={self.devices}", self.ep_size)
        if self.num_experts % self.ep_size:
            _refuse("num_experts", f"a multiple of ep_size={self.ep_size}", self.num_experts)
        if not 1 <= self.top_k <= self.num_experts:
            _refuse("top_k", f"1 to num_experts={self.num_experts}", self.top_k)
        if self.batch % self.devices:
            _refuse("batch", f"a multiple of devices={self.devices}", self.batch)
        if not 2 <= self.seq <= 1024:
            _refuse("seq", "2 to 1024", self.seq)
        if self.transport not in TRANSPORTS:
            _refuse("transport", f"one of {TRANSPORTS}", self.transport)
        if self.compare and self.transport == "xla":
            _refuse("transport", "auto or memfd with --compare (the twin is the xla one)", "xla")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    @property
    def tokens_per_rank(self) -> int:
        return self.tokens_per_step // self.devices


def default_ep_size(devices: int) -> int:
    """Half of the devices where that leaves an EP group of more than one rank, else all."""
    return devices // 2 if devices % 2 == 0 and devices >= 4 else devices


def _refuse(argument: str, wanted: str, got: object) -> None:
    flag = "--" + argument.replace("_size", "").replace("num_", "").replace("_", "-")
    raise InvalidArgumentError(f"{flag} must be {wanted}, got {got!r}", argument=argument)
