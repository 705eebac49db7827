"""Options of `ep-runtime bench`. Imports no JAX; the benches do."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
from collections.abc import Iterator
from typing import Any

from ep_runtime.errors import InvalidArgumentError, RuntimeUnavailableError
from ep_runtime.specs import COMBINE_PRECISIONS
from ep_runtime_bench.base.moe_cases import CASES, QUANTIZED, RECIPES, TORCH, WEIGHTS
from ep_runtime_bench.base.options import (
    ALSO,
    BENCHES,
    ON_CPU,
    ON_GPUS,
    STOCK,
    STOCK_LAYERS,
    TRANSPORTS,
    BenchOptions,
    BenchReport,
)
from ep_runtime_bench.base.routing import ROUTINGS
from ep_runtime_bench.base.saving import Saving
from ep_runtime_bench.base.train_cases import MODELS, REMATS
from ep_runtime_bench.base.train_cases import ROUTINGS as TRAIN_ROUTINGS
from ep_runtime_client.cli import render
from ep_runtime_client.cli.machine import gpus

GPU_EXPERTS = 256
# Each has `run(options)`; {} is cpu or gpu.
_MODULES = {
    # Measured together, on the same operands.
    "dispatch": "movement.{}_movement",
    "combine": "movement.{}_movement",
    "gemm": "one_device.{}_gemm",
    "moe": "moe.moe",
    "train": "train.train",
    "connect": "connect",
}


def _factors(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    default = BenchOptions()
    parser.add_argument(
        "benches",
        nargs="*",
        metavar="BENCH",
        help=f"what to measure: {', '.join(BENCHES)}; default dispatch combine",
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
    parser.add_argument(
        "--row-bytes",
        type=_sizes,
        default=default.row_bytes,
        metavar="N,N",
        help="bytes of a token row, a multiple of 2 (rows are bf16); "
        f"default {','.join(map(str, default.row_bytes))}",
    )
    parser.add_argument(
        "--capacity",
        type=_factors,
        default=default.capacity,
        metavar="F,F",
        help="sizes of a rank's slab in `moe`, in even shares of all slots, such as 0,1.25; "
        "default 0, which has room for any routing",
    )
    _add_gpu_arguments(parser)
    _add_numbers(parser)
    parser.add_argument("-o", "--output", choices=render.OUTPUTS, default="table")
    parser.add_argument(
        "--json", action="store_const", const="json", dest="output", help="the same as `-o json`"
    )
    parser.add_argument(
        "--save",
        metavar="DIR",
        help="write a JSON file per row to DIR, with machine, versions and command",
    )


def _add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    gpu = BenchOptions(transports=ON_GPUS)
    for flag, chosen, text in (
        ("--routing", gpu.routing, f"how tokens choose experts: {', '.join(ROUTINGS)}"),
        (
            "--precision",
            gpu.precision,
            f"how sums travel: {', '.join(COMBINE_PRECISIONS)}; on CPU in `moe` and `train` only",
        ),
        ("--board", gpu.board, "report progress to the board: on, off or both"),
        ("--also", gpu.also, f"ops to time too: {', '.join(ALSO)}"),
        ("--cases", gpu.cases, f"layers that `moe` times: {', '.join(CASES)}"),
        (
            "--recipe",
            gpu.recipes,
            f"recipes of the matmuls of `moe`: {', '.join(RECIPES)}; none computes in --dtype",
        ),
        (
            "--weights",
            gpu.weights,
            f"{' or '.join(WEIGHTS)}: `moe` applies router weights before wo, or in combine",
        ),
        (
            "--overlap",
            gpu.overlap,
            "exchanges of `moe` and `train` overlap matmuls: on, off or both",
        ),
        ("--models", gpu.models, f"models that `train` trains: {', '.join(MODELS)}"),
        (
            "--remat",
            gpu.remat,
            f"remat of `train`, what backward computes again: {', '.join(REMATS)}",
        ),
        (
            "--quantized",
            gpu.quantized,
            f"8-bit recipes of `moe` and `train` quantize weights per {' or per '.join(QUANTIZED)}",
        ),
        ("--routed", gpu.routings, f"where `train` sends tokens: {', '.join(TRAIN_ROUTINGS)}"),
    ):
        said = ",".join(chosen) or "none"
        anywhere = flag not in ("--routing", "--board", "--also", "--overlap")
        what = f"{'' if anywhere else 'on GPUs: '}{text}; default {said}"
        parser.add_argument(flag, type=_names, default=chosen, metavar="NAME,...", help=what)
    parser.add_argument(
        "--sms",
        type=_sizes,
        metavar="N,N",
        help="on GPUs: thread blocks of a kernel, one per SM; default 0: the fastest measured",
    )
    about = f"on GPUs: hidden size H; default {gpu.hidden}"
    parser.add_argument("--hidden", type=int, default=gpu.hidden, metavar="N", help=about)
    parser.add_argument(
        "--dtype",
        default=gpu.dtype,
        help=f"on GPUs: dtype of rows and of weights in `moe` and `train`; default {gpu.dtype}",
    )
    parser.add_argument(
        "--tokens",
        type=_sizes,
        metavar="N,N",
        help="tokens per device; on GPUs one or more numbers, default "
        f"{','.join(map(str, gpu.tokens))}; on CPU one number, default about 16 MiB of rows",
    )


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    default = BenchOptions()
    for flag, value, text in (
        (
            "--devices",
            None,
            f"devices D, all in one EP group; default {default.devices}, or all GPUs",
        ),
        (
            "--processes",
            default.processes,
            "run dispatch and combine in P processes of D / P devices under jax.distributed",
        ),
        ("--top-k", default.top_k, f"experts per token; default {default.top_k}"),
        ("--experts", None, f"experts; default {default.num_experts}, on GPUs {GPU_EXPERTS}"),
        ("--repeats", default.repeats, f"timed calls of each subject; default {default.repeats}"),
    ):
        parser.add_argument(flag, type=int, default=value, metavar="N", help=text)


def make_options(args: argparse.Namespace) -> BenchOptions:
    """The checked options; what was not said is chosen for the devices that are here.

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
    devices, experts = args.devices, args.experts
    if devices is None:
        devices = max(1, gpus.usable()) if said.on_gpus else said.devices
    if experts is None:
        experts = GPU_EXPERTS if said.on_gpus else said.num_experts
    tokens = args.tokens or ()
    if len(tokens) > 1 and not said.on_gpus:
        raise InvalidArgumentError(
            f"--tokens takes one number for CPU devices, got {tokens}", argument="tokens"
        )
    return dataclasses.replace(
        said,
        row_bytes=args.row_bytes,
        devices=devices,
        processes=args.processes,
        tokens_per_rank=tokens[0] if tokens else 0,
        tokens=tokens or said.tokens,
        hidden=args.hidden,
        dtype=args.dtype,
        routing=args.routing,
        sms=args.sms or (0,),
        precision=args.precision,
        board=args.board,
        overlap=args.overlap,
        also=args.also,
        cases=args.cases,
        capacity=args.capacity,
        recipes=args.recipe,
        weights=args.weights,
        models=args.models,
        remat=args.remat,
        quantized=args.quantized,
        routings=args.routed,
        top_k=args.top_k,
        num_experts=experts,
        repeats=args.repeats,
    ).checked()


def _default_transports(benches: tuple[str, ...]) -> tuple[str, ...]:
    """GPUs where there are some; a layer stands beside stock JAX."""
    found = ON_GPUS if gpus.usable() else ON_CPU
    return (found[0], STOCK) if benches in (("moe",), ("train",)) else found


def _check_devices(options: BenchOptions) -> None:
    """Raises RuntimeUnavailableError where there are fewer GPUs than wanted; says why."""
    if options.on_gpus and gpus.usable() < options.devices:
        found = gpus.check()
        raise RuntimeUnavailableError(
            f"--transports {','.join(options.transports)} wants {options.devices} GPUs that JAX "
            f"and this package can use, found {gpus.usable()}: {found.found}"
            + (f"; {found.advice}" if found.advice else "")
        )


def _module(name: str, options: BenchOptions) -> str:
    return _MODULES[name].format("gpu" if options.on_gpus else "cpu")


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benches and writes their tables, or one JSON document.

    Rows of a bench that reports again and again are saved every time.
    """
    options = make_options(args)
    _check_devices(options)
    modules = dict.fromkeys(_module(name, options) for name in options.benches)
    saving = Saving(args.save, options) if args.save else None
    reports: dict[str, BenchReport] = {}
    body: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "options": options.to_dict()}
    # Layers first: their processes need the devices' memory, which JAX in this one keeps.
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
