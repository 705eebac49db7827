"""Options of `ep-runtime bench`. Imports no JAX; the benches import it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from ep_runtime.errors import InvalidArgumentError, RuntimeUnavailableError
from ep_runtime_bench.base.moe_cases import TORCH
from ep_runtime_bench.base.options import (
    BENCHES,
    CHOSEN,
    GPU_EXPERTS,
    ON_CPU,
    ON_GPUS,
    STOCK,
    STOCK_LAYERS,
    TRANSPORTS,
    BenchOptions,
    BenchReport,
    flag,
)
from ep_runtime_bench.base.saving import Saving
from ep_runtime_client.cli import render
from ep_runtime_client.cli.machine import gpus

# Each module has `run(options)`; {} is cpu or gpu.
_MODULES = {
    # Measured together, on the same operands.
    "dispatch": "movement.{}_movement",
    "combine": "movement.{}_movement",
    "gemm": "gemm",
    "moe": "moe.moe",
    "train": "train.train",
    "connect": "connect",
    "plan": "plan",
}


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "benches",
        nargs="*",
        metavar="BENCH",
        help=f"what to measure: {', '.join(BENCHES)}; default dispatch combine. `plan` measures "
        "nothing: it computes what layers need on a cluster that is not here",
    )
    parser.add_argument(
        "--transports",
        type=_names,
        help=f"comma-separated, of {', '.join([*TRANSPORTS, STOCK])} (plain JAX). `moe` has "
        f"{' and '.join(STOCK_LAYERS)} instead of {STOCK}; `moe` and `train` also have {TORCH}, a "
        "peer in PyTorch, if that extra is installed. Names with nvlink or nccl run on GPUs, "
        "others on CPU devices. The default is nvlink,xla if this package and JAX can use GPUs, "
        f"else memfd,xla. The default of `moe` is nvlink or memfd, and {STOCK}",
    )
    for option in CHOSEN:
        told = option.metadata
        kind, metavar = _kind(option.default)
        about = told["about"]
        if told["choices"]:
            about += f": {', '.join(told['choices'])}"
        if "by default" not in about:
            about += f"; default {_written(option.default)}"
        parser.add_argument(flag(option), dest=option.name, type=kind, metavar=metavar, help=about)
    parser.add_argument("-o", "--output", choices=render.OUTPUTS, default="table")
    parser.add_argument(
        "--json", action="store_const", const="json", dest="output", help="the same as `-o json`"
    )
    parser.add_argument(
        "--save",
        metavar="DIR",
        help="write a JSON file per row to DIR, with machine, versions and command",
    )


def _kind(default: Any) -> tuple[Callable[[str], Any], str]:
    """Returns the argparse type of an option's values, and their name in --help."""
    if isinstance(default, str | int | float):
        return type(default), "NAME" if isinstance(default, str) else "N"
    (kind,) = {type(value) for value in default}
    metavar = "NAME,..." if kind is str else "N,N"
    return lambda words: tuple(kind(word) for word in _names(words)), metavar


def _written(default: Any) -> str:
    """Returns an option's default as a user would type it."""
    values = default if isinstance(default, tuple) else (default,)
    return ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)


def make_options(args: argparse.Namespace) -> BenchOptions:
    """Returns the checked options; defaults depend on the devices of this machine.

    Raises:
        InvalidArgumentError: a value is outside its range.
    """
    benches = tuple(args.benches) or BenchOptions().benches
    transports = args.transports or _default_transports(benches)
    layers = tuple(name for name in STOCK_LAYERS if name in transports)
    others = (STOCK, *STOCK_LAYERS, TORCH)
    ours: Any = tuple(name for name in transports if name not in others)
    said = BenchOptions(
        benches=benches,
        transports=ours,
        stock=STOCK in transports or bool(layers),
        stock_layers=STOCK_LAYERS if STOCK in transports else layers or STOCK_LAYERS,
        torch=TORCH in transports,
    )
    if said.on_gpus:
        devices = max(1, gpus.usable())
        said = dataclasses.replace(said, devices=devices, num_experts=GPU_EXPERTS)
    given = {option.name: getattr(args, option.name) for option in CHOSEN}
    given = {name: value for name, value in given.items() if value is not None}
    if tokens := given.get("tokens"):
        given["tokens_per_rank"] = tokens[0]
        if len(tokens) > 1 and not said.on_gpus:
            raise InvalidArgumentError(
                f"--tokens takes one number for CPU devices, got {tokens}", argument="tokens"
            )
    return dataclasses.replace(said, **given).checked()


def _default_transports(benches: tuple[str, ...]) -> tuple[str, ...]:
    """Chooses GPUs if there are any; adds plain JAX for `moe` and `train`."""
    found = ON_GPUS if benches == ("plan",) or gpus.usable() else ON_CPU
    return (found[0], STOCK) if benches in (("moe",), ("train",)) else found


def _check_devices(options: BenchOptions) -> None:
    """Raises RuntimeUnavailableError, with the reason, if there are too few GPUs."""
    if options.on_gpus and not options.planned and gpus.usable() < options.devices:
        found = gpus.check()
        raise RuntimeUnavailableError(
            f"--transports {','.join(options.transports)} wants {options.devices} GPUs that JAX "
            f"and this package can use, found {gpus.usable()}: {found.found}"
            + (f"; {found.advice}" if found.advice else "")
        )


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benches and writes their tables, or one JSON document.

    Rows of a bench that reports repeatedly are saved every time.
    """
    options = make_options(args)
    _check_devices(options)
    kind = "gpu" if options.on_gpus else "cpu"
    modules = dict.fromkeys(_MODULES[name].format(kind) for name in options.benches)
    saving = Saving(args.save, options) if args.save else None
    reports: dict[str, BenchReport] = {}
    body: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "options": options.to_dict()}
    # Layers first, because JAX in this process would occupy memory that their processes need.
    apart = (_MODULES["moe"], _MODULES["train"])
    for module in sorted(modules, key=lambda module: module not in apart):
        found = importlib.import_module(f"ep_runtime_bench.{module}").run(options)
        for known in found if isinstance(found, Iterator) else [found]:
            for report in known if isinstance(known, list) else [known]:
                reports[report.name] = report
                body[report.name] = list(report.rows)
                if saving is not None:
                    saving.save(report)
    if args.output == "json":
        render.write_json("bench", body)
        return 0
    for report in reports.values():
        render.out(report.title)
        wide = args.output == "wide"
        render.write_table(report.columns, report.rows, wide=wide, whole=True, empty="-")
        render.out("")
    return 0
