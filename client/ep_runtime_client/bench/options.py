"""What to measure, checked before anything is started; and what a bench hands back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, get_args

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.cli.render import Column

BENCHES = ("dispatch", "combine", "gemm", "connect", "control", "compile")
Transport = Literal["memfd", "xla"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
ROW_ITEM_BYTES = 2  # bf16
# Enough to be past every cache, little enough that eight slabs fit a laptop.
TARGET_BYTES_PER_RANK = 16 << 20
MAX_TOKENS_PER_RANK = 1024


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Arguments of one run.

    Attributes:
        benches: of BENCHES.
        transports: of TRANSPORTS; ratios compare with "xla" where it is there.
        row_bytes: sizes of a token row.
        devices: D, CPU devices, one EP group.
        mesh: (axis, size) of every axis of the mesh that `compile` uses, "ep" among them, D devices
            together; without any it is ep alone.
        processes: P, each with D / P of the devices; for dispatch and combine.
        tokens_per_rank: 0 chooses about TARGET_BYTES_PER_RANK of rows.
        top_k: K.
        num_experts: E.
        repeats: timed calls of each subject.
        num_layers: that `control` registers in one call.
        model_layers: of the model that `compile` compiles.
    """

    benches: tuple[str, ...] = ("dispatch", "combine")
    transports: tuple[Transport, ...] = TRANSPORTS
    row_bytes: tuple[int, ...] = (256, 1024, 4096, 16384)
    devices: int = 8
    mesh: tuple[tuple[str, int], ...] = ()
    processes: int = 1
    tokens_per_rank: int = 0
    top_k: int = 8
    num_experts: int = 64
    repeats: int = 15
    num_layers: int = 10_000
    model_layers: int = 24

    def checked(self) -> BenchOptions:
        """Itself, or InvalidArgumentError naming the argument, what was wanted and what was got."""
        checks: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
            ("BENCH", self.benches, BENCHES),
            ("--transports", self.transports, TRANSPORTS),
        )
        for argument, values, choices in checks:
            unknown = [value for value in values if value not in choices]
            if unknown or not values:
                raise InvalidArgumentError(
                    f"{argument} must be of {choices}, got {values}", argument=argument
                )
        counts = (
            "devices",
            "processes",
            "top_k",
            "num_experts",
            "repeats",
            "num_layers",
            "model_layers",
        )
        for argument in counts:
            if getattr(self, argument) < 1:
                raise InvalidArgumentError(
                    f"{argument} must be at least 1, got {getattr(self, argument)}",
                    argument=argument,
                )
        self._check_mesh()
        if self.devices % self.processes:
            raise InvalidArgumentError(
                f"--processes must divide --devices={self.devices}, got {self.processes}",
                argument="processes",
            )
        alone = [name for name in self.benches if name not in ("dispatch", "combine")]
        if self.processes > 1 and alone:
            raise InvalidArgumentError(
                f"--processes is of dispatch and combine, got it with {', '.join(alone)}",
                argument="processes",
            )
        if any(size < ROW_ITEM_BYTES or size % ROW_ITEM_BYTES for size in self.row_bytes):
            raise InvalidArgumentError(
                f"--row-bytes must be multiples of {ROW_ITEM_BYTES}, got {self.row_bytes}",
                argument="row_bytes",
            )
        return self

    def _check_mesh(self) -> None:
        sizes = dict(self.mesh)
        if self.mesh and ("ep" not in sizes or prod(sizes.values()) != self.devices):
            raise InvalidArgumentError(
                f'--mesh must have an axis "ep" and {self.devices} devices, got {self.mesh}',
                argument="mesh",
            )

    def tokens_for(self, row_bytes: int) -> int:
        """Tokens per rank for rows of this size."""
        if self.tokens_per_rank:
            return self.tokens_per_rank
        fitting = TARGET_BYTES_PER_RANK // (self.top_k * row_bytes)
        return max(1, min(MAX_TOKENS_PER_RANK, fitting))

    def rows_for(self, row_bytes: int) -> int:
        """Rows that all tokens of all ranks become."""
        return self.tokens_for(row_bytes) * self.devices * self.top_k

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of every timed call of one subject (a transport or memcpy) of one op and row size."""

    op: str
    subject: str
    row_bytes: int
    seconds: Sequence[float]


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """One table: `name` is its key in JSON."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
