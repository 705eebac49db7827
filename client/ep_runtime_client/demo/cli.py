"""Options of `ep-runtime demo`. Imports no JAX; `run` does."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import COMBINE_PRECISIONS
from ep_runtime_client.cli.machine import gpus
from ep_runtime_client.demo import config as defaults
from ep_runtime_client.jobs.members import INTERRUPTED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    default = defaults.DemoConfig()
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"optimizer steps; default {default.steps}, "
        f"with --compare {defaults.DEFAULT_COMPARE_STEPS}",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="D",
        help=f"devices; default {default.devices} on CPU, on GPUs 1, 2, 4 or 8 as there are; "
        "with --mesh the product of its axes",
    )
    parser.add_argument(
        "--platform",
        choices=("auto", *defaults.PLATFORMS),
        default="auto",
        help="auto: GPUs where JAX and this package were installed for them and enough are there, "
        "else CPU devices",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="P",
        help="processes that share the devices, D/P each, under jax.distributed; default 1, with "
        "--nodes two per node",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=default.nodes,
        metavar="N",
        help="daemons that form a cluster on this machine, P/N processes each; tokens go through "
        "windows inside a node, and between nodes over XLA's collectives, on GPUs over NCCL; "
        "default 1",
    )
    parser.add_argument(
        "--ep",
        type=int,
        metavar="N",
        help="ranks of one EP group, a divisor of D; default half of D, so that two groups work "
        "beside each other, with --nodes all of D, so that one spans the nodes",
    )
    _add_layout_arguments(parser, default)
    parser.add_argument(
        "--transport",
        choices=defaults.TRANSPORTS,
        default=default.transport,
        help="what tokens travel through: windows in host memory (memfd) or on GPUs (nvlink), NCCL "
        "between GPUs (nccl), or stock collectives (xla); default auto",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="train a twin on transport xla from the same seed and compare every step's loss, bit "
        "by bit (on GPUs within 0.1%%, the twin taking over the parameters every other step); exit "
        "code 3 and the first step that differs otherwise",
    )
    for flag, value, text in (
        ("--batch", default.batch, "windows of text per step"),
        ("--seq", default.seq, "bytes per window"),
        ("--experts", default.num_experts, "experts of each layer"),
        ("--top-k", default.top_k, "experts per token"),
        ("--layers", default.num_layers, "blocks of attention and experts"),
        ("--hidden", default.hidden_size, "H, values of a token between layers"),
        ("--mlp-dim", default.mlp_dim, "M, values of a token inside an expert"),
        ("--sample", default.sample_bytes, "bytes of text to write at the end"),
        ("--seed", default.seed, "of parameters, batches and the sample"),
    ):
        parser.add_argument(flag, type=int, default=value, metavar="N", help=f"{text}; {value}")
    parser.add_argument(
        "--address",
        help="runtime to use: unix:///DIR, embedded, node or none; default $EP_RUNTIME_ADDRESS, "
        "else the node's daemon, else an embedded one, with --processes the shared one of node",
    )


def _add_layout_arguments(parser: argparse.ArgumentParser, default: defaults.DemoConfig) -> None:
    """Mesh, layout, recipe, optimizer, picture."""
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help=f"mesh with axes of {', '.join(defaults.AXES)}, outermost first, such as "
        "dp=2,fsdp=2,ep=2; instead of --ep",
    )
    parser.add_argument(
        "--rules",
        choices=defaults.RULES,
        default=default.rules,
        help="where experts' weights lie: experts on ep and their matrices on fsdp, or experts on "
        f"ep and fsdp and their matrices whole; default {default.rules}",
    )
    parser.add_argument(
        "--recipe",
        default=default.recipe,
        metavar="R[,R...]",
        help=f"number format of the experts' matmuls, of {', '.join(defaults.RECIPES)}; several "
        f"are trained one after the other; default {default.recipe}",
    )
    parser.add_argument(
        "--combine-precision",
        choices=COMBINE_PRECISIONS,
        default=default.combine_precision,
        help=f"how sums of experts' rows travel back; default {default.combine_precision}",
    )
    parser.add_argument(
        "--optimizer",
        choices=defaults.OPTIMIZERS,
        default=default.optimizer,
        help=f"default {default.optimizer}",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=default.learning_rate,
        metavar="RATE",
        help=f"its peak, after a warm-up; {default.learning_rate:g}",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="write the loss curves of all recipes as a picture; needs the extra plot",
    )


def make_config(args: argparse.Namespace) -> defaults.DemoConfig:
    """The checked config of parsed options.

    Raises:
        InvalidArgumentError: an option's value does not fit the others.
    """
    steps = defaults.DEFAULT_COMPARE_STEPS if args.compare else defaults.DEFAULT_STEPS
    if args.mesh is not None and args.ep is not None:
        raise InvalidArgumentError(
            f"--ep must be left out with --mesh, got {args.ep} and {args.mesh}", argument="ep_size"
        )
    devices = args.devices
    if devices is None and args.mesh is not None:
        devices = math.prod(defaults.parse_mesh(args.mesh).values())
    platform, devices = _choose_platform(args.platform, devices)
    return defaults.DemoConfig(
        steps=steps if args.steps is None else args.steps,
        devices=devices,
        platform=platform,
        processes=_default_processes(args.nodes) if args.processes is None else args.processes,
        nodes=args.nodes,
        ep_size=_default_ep_size(devices, args.nodes) if args.ep is None else args.ep,
        mesh=args.mesh,
        rules=args.rules,
        recipe=args.recipe,
        combine_precision=args.combine_precision,
        optimizer=args.optimizer,
        plot=args.plot,
        transport=args.transport,
        compare=args.compare,
        batch=args.batch,
        seq=args.seq,
        num_experts=args.experts,
        top_k=args.top_k,
        num_layers=args.layers,
        hidden_size=args.hidden,
        mlp_dim=args.mlp_dim,
        learning_rate=args.learning_rate,
        sample_bytes=args.sample,
        seed=args.seed,
        address=args.address,
    ).checked()


def _default_processes(nodes: int) -> int:
    return 2 * nodes if nodes > 1 else defaults.DemoConfig.processes


def _default_ep_size(devices: int, nodes: int) -> int:
    return devices if nodes > 1 else defaults.default_ep_size(devices)


def _choose_platform(wanted: str, devices: int | None) -> tuple[defaults.Platform, int]:
    """What to run on, and on how many devices where that was not said.

    Raises:
        InvalidArgumentError: GPUs are wanted, and none can be used.
    """
    found = gpus.usable() if wanted != "cpu" else 0
    if wanted == "gpu" and devices is None and not found:
        state = gpus.check()
        raise InvalidArgumentError(
            f"--platform gpu needs GPUs that JAX and this package can use; {state.found}"
            + (f" ({state.advice})" if state.advice else ""),
            argument="platform",
        )
    enough = found > 0 and (devices is None or found >= devices)
    platform: defaults.Platform = "gpu" if wanted == "gpu" or enough else "cpu"
    if devices is None:
        devices = defaults.default_devices(found)
    return platform, devices


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code."""
    config = make_config(args)
    _require("optax", "demo", "the demo")
    if config.plot is not None:
        _require("matplotlib", "plot", "--plot")
    if config.processes > 1:
        from ep_runtime_client.demo import processes

        return processes.run(config)
    try:
        job = importlib.import_module("ep_runtime_client.demo.job")
        return int(job.run(config))
    except KeyboardInterrupt:
        return INTERRUPTED


def _require(module: str, extra: str, who: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise InvalidArgumentError(
            f"{who} needs {module}: pip install 'ep-runtime[{extra}]'", argument=extra
        )
