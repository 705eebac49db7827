"""Options of `ep-runtime bench`. Imports no JAX; the benches do."""

from __future__ import annotations

import argparse
import importlib
import os
from math import prod
from typing import Any

from ep_runtime_client.bench.options import BENCHES, TRANSPORTS, BenchOptions
from ep_runtime_client.cli import render


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _axes(text: str) -> tuple[tuple[str, int], ...]:
    pairs = (part.partition("=") for part in _names(text))
    return tuple((name, int(size)) for name, _, size in pairs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    default = BenchOptions()
    parser.add_argument(
        "benches",
        nargs="*",
        metavar="BENCH",
        help=f"of {', '.join(BENCHES)}; default dispatch combine",
    )
    parser.add_argument(
        "--transports",
        type=_names,
        default=default.transports,
        help=f"comma-separated, of {', '.join(TRANSPORTS)}; default memfd,xla",
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
        "--mesh",
        type=_axes,
        default=default.mesh,
        metavar="AXIS=N,...",
        help='mesh of `compile`, such as dp=2,fsdp=2,ep=2; default "ep" over all devices',
    )
    for flag, value, text in (
        ("--devices", default.devices, "CPU devices D, all in one EP group"),
        (
            "--processes",
            default.processes,
            "processes P under jax.distributed with D / P devices each, for dispatch and combine",
        ),
        ("--tokens", default.tokens_per_rank, "tokens per device; 0 = about 16 MiB of rows"),
        ("--top-k", default.top_k, "experts per token"),
        ("--experts", default.num_experts, "experts"),
        ("--repeats", default.repeats, "timed calls of each"),
        ("--layers", default.num_layers, "layers that `control` registers in one call"),
        ("--model-layers", default.model_layers, "layers of the model that `compile` compiles"),
    ):
        parser.add_argument(flag, type=int, default=value, metavar="N", help=f"{text}; {value}")
    parser.add_argument("-o", "--output", choices=render.OUTPUTS, default="table")


def make_options(args: argparse.Namespace) -> BenchOptions:
    """The checked options.

    Raises:
        InvalidArgumentError: a value is outside its range.
    """
    return BenchOptions(
        benches=tuple(args.benches) or BenchOptions().benches,
        transports=args.transports,
        row_bytes=args.row_bytes,
        devices=prod(size for _, size in args.mesh) if args.mesh else args.devices,
        mesh=args.mesh,
        processes=args.processes,
        tokens_per_rank=args.tokens,
        top_k=args.top_k,
        num_experts=args.experts,
        repeats=args.repeats,
        num_layers=args.layers,
        model_layers=args.model_layers,
    ).checked()


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benches and writes their tables, or one JSON document."""
    options = make_options(args)
    # Dispatch and combine are measured together, on the same operands.
    modules = dict.fromkeys(
        "movement" if name in ("dispatch", "combine") else name for name in options.benches
    )
    reports = [
        importlib.import_module(f"ep_runtime_client.bench.{module}").run(options)
        for module in modules
    ]
    if args.output == "json":
        body: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "options": options.to_dict()}
        for report in reports:
            body[report.name] = list(report.rows)
        render.write_json("bench", body)
        return 0
    for report in reports:
        render.out(report.title)
        render.write_table(report.columns, report.rows, wide=args.output == "wide", empty="-")
        render.out("")
    return 0
