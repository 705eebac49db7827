"""Options of `ep-runtime bench`, checked before anything starts, and its reports."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from ep_runtime.errors import InvalidArgumentError, RuntimeUnavailableError
from ep_runtime.specs import COMBINE_PRECISIONS, DTYPE_BYTES
from ep_runtime_bench.base import model_config
from ep_runtime_bench.base.moe_cases import (
    AUTO_SPARE,
    CASES,
    CPU_CASES,
    DEFAULT_CASES,
    QUANTIZED,
    RECIPES,
    TORCH,
    WEIGHTS,
    Case,
)
from ep_runtime_bench.base.routing import ROUTINGS
from ep_runtime_bench.base.train_cases import CPU_MODELS, MODELS, REMATS
from ep_runtime_bench.base.train_cases import ROUTINGS as TRAIN_ROUTINGS
from ep_runtime_client.cli.tables import Column

BENCHES = ("dispatch", "combine", "gemm", "moe", "train", "connect", "plan")
Transport = Literal["memfd", "nvlink", "nccl", "xla"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
ON_CPU: tuple[Transport, ...] = ("memfd", "xla")
ON_GPUS: tuple[Transport, ...] = ("nvlink", "xla")
STOCK = "stock"  # JAX without this package, in `moe` and `train`
STOCK_LAYERS = ("stock-padded", "stock-dropless")  # the two layers that STOCK stands for in `moe`
MODELLED = ("moe", "train")  # benches that measure other libraries' layers and models
LAYERED = ("moe", "plan")  # benches with --cases and --config
FITTED_DTYPES = ("bfloat16", "float16")  # dtypes whose times `plan` predicts
PLANNED_RECIPES = ("none", "fp8", "fp8-block")  # of block calls with bfloat16 rows
CEILING = "ceiling"
PLAIN = "all-to-all"  # NCCL's own all-to-all of as many rows in equal blocks, to compare nccl with
ROW_ITEM_BYTES = 2  # bf16
GPU_EXPERTS = 256
# Too large for caches, but small enough that eight slabs fit a laptop's memory.
TARGET_BYTES_PER_RANK = 16 << 20
MAX_TOKENS_PER_RANK = 1024


def _option(default: Any, about: str, *, flag: str = "", choices: Iterable[str] = ()) -> Any:
    """Declares a field that is also an option of `ep-runtime bench`.

    Args:
        default: default of both; its type is the option's type, and a tuple is a list with commas.
        about: help text.
        flag: name of the option, if not the field's name.
        choices: allowed values.
    """
    return dataclasses.field(
        default=default, metadata={"about": about, "flag": flag, "choices": tuple(choices)}
    )


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Arguments of one run.

    Attributes:
        benches: some of BENCHES.
        transports: some of TRANSPORTS; ratios compare with "xla" if it is included. With "nvlink"
            or "nccl" the devices are GPUs.
        stock: whether `moe` and `train` also measure plain JAX.
        stock_layers: which of STOCK_LAYERS `moe` measures.
        torch: whether `moe` and `train` also measure PyTorch.
        tokens_per_rank: tokens of one rank on CPU; 0 chooses about TARGET_BYTES_PER_RANK of rows.
    """

    benches: tuple[str, ...] = ("dispatch", "combine")
    transports: tuple[Transport, ...] = ON_CPU
    stock: bool = False
    stock_layers: tuple[str, ...] = STOCK_LAYERS
    torch: bool = False
    tokens_per_rank: int = 0
    row_bytes: tuple[int, ...] = _option(
        (256, 1024, 4096, 16384), "on CPU: bytes of a token row, a multiple of 2 (rows are bf16)"
    )
    capacity: tuple[float, ...] = _option(
        (0.0,),
        "sizes of a rank's slab in `moe`, in even shares of all slots, such as 0,1.25; 0 has room "
        "for any routing",
    )
    routing: tuple[str, ...] = _option(
        ROUTINGS[:1], "on GPUs, and in `plan`: how tokens choose experts", choices=ROUTINGS
    )
    precision: tuple[str, ...] = _option(
        ("fast",), "how sums travel; on CPU in `moe` and `train` only", choices=COMBINE_PRECISIONS
    )
    cases: tuple[str, ...] = _option(
        DEFAULT_CASES, "layers that `moe` times, or `plan` computes", choices=CASES
    )
    config: str = _option(
        "",
        "the layer of `moe` and `plan`: sizes, router and activation in a model's Hugging Face "
        "config.json, without biases, shared experts and weights of its own, by default those "
        "of --cases",
    )
    recipes: tuple[str, ...] = _option(
        RECIPES[:1],
        "recipes of the matmuls of `moe`, `train` and `plan`; none computes in --dtype",
        flag="recipe",
        choices=RECIPES,
    )
    weights: tuple[str, ...] = _option(
        WEIGHTS[:1],
        "`moe` applies router weights before wo (hidden), or in combine (output)",
        choices=WEIGHTS,
    )
    overlap: tuple[str, ...] = _option(
        ("on",),
        "on GPUs: exchanges of `moe` and `train` overlap matmuls",
        choices=("on", "off"),
    )
    spare_experts: tuple[str, ...] = _option(
        (AUTO_SPARE,),
        "slots of each rank for copies of overfull experts, in `moe` and `train`: numbers, or "
        f"{AUTO_SPARE}",
    )
    models: tuple[str, ...] = _option(
        tuple(MODELS)[:1], "models that `train` trains", choices=MODELS
    )
    remat: tuple[str, ...] = _option(
        REMATS[:1], "remat of `train`, what backward computes again", choices=REMATS
    )
    quantized: tuple[str, ...] = _option(
        QUANTIZED[:1],
        "8-bit recipes of `moe` and `train` quantize weights once per",
        choices=QUANTIZED,
    )
    routings: tuple[str, ...] = _option(
        TRAIN_ROUTINGS[:1], "where `train` sends tokens", flag="routed", choices=TRAIN_ROUTINGS
    )
    commit_every: int = _option(
        0, "`train` also copies its state to the node's memory every N steps, and times both; 0: no"
    )
    sms: tuple[int, ...] = _option(
        (0,), "on GPUs: thread blocks of a kernel, one per SM; 0: the fastest measured"
    )
    hidden: int = _option(7168, "on GPUs: hidden size H")
    dtype: str = _option(
        "bfloat16",
        "on GPUs: dtype of rows and of weights in `moe`, `train` and `plan`",
        choices=("bfloat16", "float16", "float32"),
    )
    tokens: tuple[int, ...] = _option(
        (128, 4096, 8192),
        "tokens per device; on CPU one number, by default about 16 MiB of rows",
    )
    devices: int = _option(8, "devices D, all in one EP group; by default all GPUs if on GPUs")
    processes: int = _option(
        1, "run dispatch and combine in P processes of D / P devices under jax.distributed"
    )
    top_k: int = _option(8, "experts per token")
    num_experts: int = _option(64, f"experts; on GPUs by default {GPU_EXPERTS}", flag="experts")
    repeats: int = _option(15, "timed calls of each subject")
    nodes: int = _option(2, "nodes of the cluster of `plan`, all in one EP group")
    gpus_per_node: int = _option(8, "GPUs of each node of `plan`")
    network: float = _option(50.0, "GB/s that each GPU of `plan` sends to other nodes and receives")

    def checked(self) -> BenchOptions:
        """Returns itself; raises InvalidArgumentError with the wanted and the given value."""
        for argument, text in self._faults():
            raise InvalidArgumentError(text, argument=argument)
        if self.torch and importlib.util.find_spec("torch") is None:
            raise RuntimeUnavailableError(
                f"--transports {TORCH} needs PyTorch: install the extra torch, "
                "pip install 'ep-runtime[torch]'"
            )
        return self

    def _faults(self) -> Iterator[tuple[str, str]]:
        """Yields an argument, and the error's text, for each value that does not fit."""
        choices: dict[str, tuple[Sequence[str], Sequence[str]]] = {
            "BENCH": (self.benches, BENCHES),
            "--transports": (self.transports, TRANSPORTS),
        }
        for option in CHOSEN:
            found = getattr(self, option.name)
            known = option.metadata["choices"]
            if known:
                found = found if isinstance(found, tuple) else (found,)
                choices[flag(option)] = (found, known)
        for argument, (values, known) in choices.items():
            if not values or not {*values} <= {*known}:
                yield argument, f"{argument} must be of {known}, got {values}"
        if self.commit_every < 0 or (self.commit_every and self.benches != ("train",)):
            text = "--commit-every must be at least 0 and is for train only, got "
            yield "commit_every", f"{text}{self.commit_every} with {','.join(self.benches)}"
        wrong = [x for x in self.spare_experts if x != AUTO_SPARE and not x.isdecimal()]
        if wrong or not self.spare_experts:
            text = f"--spare-experts must be {AUTO_SPARE} or numbers of at least 0, got "
            yield "spare_experts", text + ",".join(self.spare_experts)
        least_one = ("devices", "processes", "top_k", "num_experts", "repeats")
        for argument in (*least_one, "nodes", "gpus_per_node"):
            if getattr(self, argument) < 1:
                yield argument, f"{argument} must be at least 1, got {getattr(self, argument)}"
        if self.on_gpus:
            yield from self._gpu_faults()
        yield from self._case_faults()
        if self.planned:
            yield from self._plan_faults()
        benches = ",".join(self.benches)
        peers = ",".join([STOCK] * self.stock + [TORCH] * self.torch)
        if peers and not {*self.benches} <= {*MODELLED}:
            text = f"--transports {peers} is for {' and '.join(MODELLED)} only, got it with "
            yield "transports", text + benches
        if self.devices % self.processes:
            text = f"--processes must divide --devices={self.devices}, got {self.processes}"
            yield "processes", text
        alone = [name for name in self.benches if name not in ("dispatch", "combine")]
        if self.processes > 1 and alone:
            text = f"--processes is for dispatch and combine only, got it with {', '.join(alone)}"
            yield "processes", text
        if any(size < ROW_ITEM_BYTES or size % ROW_ITEM_BYTES for size in self.row_bytes):
            text = f"--row-bytes must be multiples of {ROW_ITEM_BYTES}, got {self.row_bytes}"
            yield "row_bytes", text

    @functools.cached_property
    def model(self) -> dict[str, Any] | None:
        """The options in the `config` file, if given."""
        return model_config.read(self.config) if self.config else None

    @property
    def layers(self) -> dict[str, Case]:
        """The layers that `moe` measures, by name."""
        known = CASES if self.on_gpus else CPU_CASES
        found = {name: known[name] for name in self.cases}
        if self.model is not None:
            tokens = next(iter(known.values())).tokens
            found = {self.model["model_type"]: model_config.layer_of(self.model, tokens)}
        if self.tokens_per_rank:
            resized = {"tokens": self.tokens_per_rank}
            found = {name: dataclasses.replace(case, **resized) for name, case in found.items()}
        return found

    def _case_faults(self) -> Iterator[tuple[str, str]]:
        benches, layered = ",".join(self.benches), {*self.benches} <= {*LAYERED}
        if self.config and (not layered or self.cases != DEFAULT_CASES):
            yield (
                "config",
                f"--config is for {' and '.join(LAYERED)} only and takes the place of --cases, got "
                f"it with {benches} and --cases {','.join(self.cases)}",
            )
        known = MODELS if self.on_gpus else CPU_MODELS
        for name in self.models if "train" in self.benches else ():
            model = known[name]
            ranks, rest = divmod(self.devices, 2 if model.beside else 1)
            if rest or not ranks or model.num_experts % ranks:
                yield (
                    "devices",
                    f"--devices must be {'2 x ' if model.beside else ''}a divisor of the "
                    f"{model.num_experts} experts of {name}, got {self.devices}",
                )
        odd = self._undivided(self.devices)
        if "moe" in self.benches and odd:
            text = f"--devices must divide the experts of every case, got {self.devices} with {odd}"
            yield "devices", text
        if self.stock_layers != STOCK_LAYERS and self.benches != ("moe",):
            text = f"--transports {','.join(self.stock_layers)} is for moe only, got it with "
            yield "transports", text + benches
        if not self.capacity or any(0 != factor < 1 for factor in self.capacity):
            yield "capacity", f"--capacity must be 0 or factors of at least 1, got {self.capacity}"

    def _undivided(self, gpus: int) -> str:
        """Returns the layers whose experts do not divide over so many GPUs, as text."""
        odd = {name: case.num_experts for name, case in self.layers.items()}
        return ", ".join(f"{many} of {name}" for name, many in odd.items() if many % gpus)

    def _plan_faults(self) -> Iterator[tuple[str, str]]:
        """Checks the cluster of `plan`, whose GPUs are all one EP group."""
        if self.benches != ("plan",):
            yield "BENCH", f"plan measures nothing and runs alone, got {','.join(self.benches)}"
        if not 0 < self.network < math.inf:
            yield "network", f"--network must be finite GB/s over 0, got {self.network}"
        if self.dtype not in FITTED_DTYPES:
            yield "dtype", f"--dtype of plan must be of {FITTED_DTYPES}, got {self.dtype}"
        known = PLANNED_RECIPES if self.dtype == "bfloat16" else PLANNED_RECIPES[:1]
        if not {*self.recipes} <= {*known}:
            text = f"--recipe of plan must be of {known} with --dtype {self.dtype}, got "
            yield "recipe", text + ",".join(self.recipes)
        if odd := self._undivided(self.planned_gpus):
            text = "--nodes times --gpus-per-node must divide the experts of every case, got "
            yield "nodes", f"{text}{self.planned_gpus} with {odd}"

    @property
    def planned(self) -> bool:
        """Whether `plan` computes figures for GPUs that may not exist here."""
        return "plan" in self.benches

    @property
    def planned_gpus(self) -> int:
        """GPUs of the cluster of `plan`."""
        return self.nodes * self.gpus_per_node

    @property
    def on_gpus(self) -> bool:
        """Whether the devices are GPUs."""
        return self.planned or not {"nvlink", "nccl"}.isdisjoint(self.transports)

    @property
    def row_bytes_on_gpus(self) -> int:
        """Bytes of a token row on GPUs."""
        return self.hidden * DTYPE_BYTES[self.dtype]

    def _gpu_faults(self) -> Iterator[tuple[str, str]]:
        if "memfd" in self.transports:
            text = "memfd runs on CPU devices, nvlink on GPUs; measure them separately, got "
            yield "transports", f"{text}--transports {','.join(self.transports)}"
        lowest = {"tokens": 1, "hidden": 8, "sms": 0}
        for name, least in lowest.items():
            values = getattr(self, name)
            values = values if isinstance(values, tuple) else (values,)
            if not values or min(values) < least:
                yield name, f"--{name} must be at least {least}, got {values}"
        experts_per_rank, rest = divmod(self.num_experts, self.devices)
        if rest or self.top_k > self.num_experts or not experts_per_rank:
            yield (
                "num_experts",
                f"--experts must be a multiple of --devices={self.devices} and at least "
                f"--top-k={self.top_k}, got {self.num_experts}",
            )

    @property
    def sizes(self) -> ConnectSizes:
        """Sizes for `bench connect`: tiny on CPU, because only the path counts; real windows on
        GPUs."""
        if not self.on_gpus:
            return ConnectSizes(8, 256, self.devices, 1, "float32", 8)
        case = (max(self.tokens), self.hidden, self.num_experts, self.top_k)
        return ConnectSizes(*case, self.dtype, 128)

    def tokens_for(self, row_bytes: int) -> int:
        """Returns tokens per rank for rows of this size."""
        if self.tokens_per_rank:
            return self.tokens_per_rank
        fitting = TARGET_BYTES_PER_RANK // (self.top_k * row_bytes)
        return max(1, min(MAX_TOKENS_PER_RANK, fitting))

    def rows_for(self, row_bytes: int) -> int:
        """Returns the number of rows of all tokens of all ranks."""
        return self.tokens_for(row_bytes) * self.devices * self.top_k

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# Fields of BenchOptions that are also options of the command.
CHOSEN = tuple(field for field in dataclasses.fields(BenchOptions) if field.metadata)


def flag(option: dataclasses.Field[Any]) -> str:
    """Returns the option's name on the command line."""
    return "--" + str(option.metadata["flag"] or option.name).replace("_", "-")


@dataclasses.dataclass(frozen=True)
class ConnectSizes:
    """Sizes of the group and of the one call of `bench connect`."""

    tokens: int
    hidden: int
    num_experts: int
    top_k: int
    dtype: str
    alignment: int

    def topk_idx(self, count: int) -> Any:
        """Returns experts in round-robin order, int32 [count, K]."""
        import numpy as np

        first = np.arange(count, dtype=np.int32)[:, None] * self.top_k
        return (first + np.arange(self.top_k, dtype=np.int32)) % self.num_experts


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of every timed call of one subject (a transport or memcpy), op and row size."""

    op: str
    subject: str
    row_bytes: int
    seconds: Sequence[float]


@dataclasses.dataclass(frozen=True)
class DeviceSample:
    """Times of one op on GPUs, of every timed call.

    Attributes:
        op: "prepare", "dispatch", "combine", "pair" (both) or "clock" (one reading of it).
        subject: a transport, CEILING, PLAIN or "clock".
        tokens: tokens per rank.
        routing: one of ROUTINGS.
        precision: the group's combine_precision, or "" without a group.
        sms: requested SMs.
        blocks: blocks of the kernel; 0 if unknown.
        kernel_us: microseconds on the slowest rank's device, including one reading of the clock.
        step_s: seconds of one jitted call on the host, waited for.
        network_rows: rows that all ranks send between nodes in one dispatch; 0 if none are.
        network_least: the fewest rows needed: each row once per node that needs it.
    """

    op: str
    subject: str
    tokens: int
    routing: str
    precision: str
    sms: int
    blocks: int
    kernel_us: Sequence[float]
    step_s: Sequence[float]
    network_rows: int = 0
    network_least: int = 0


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """One table.

    Attributes:
        name: key of the table in JSON.
        title: line above the table.
        columns: columns of its rows.
        rows: values by the columns' keys.
        explains: whether it only explains another table's times: `--save` then writes none of its
            rows.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    explains: bool = False
