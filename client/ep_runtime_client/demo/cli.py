"""Options of `ep-runtime demo`. Imports no JAX; `run` does."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import math
import os
import shlex
import shutil
import sys

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import COMBINE_PRECISIONS
from ep_runtime_client.cli.daemon.reading import count, positive
from ep_runtime_client.cli.machine import gpus
from ep_runtime_client.demo import config as defaults
from ep_runtime_client.jobs.members import INTERRUPTED

_NUMBERS = {
    "batch": ("batch", "windows of text per step"),
    "seq": ("seq", "bytes per window"),
    "experts": ("num_experts", "experts of each layer"),
    "top-k": ("top_k", "experts per token"),
    "layers": ("num_layers", "blocks of attention and experts"),
    "hidden": ("hidden_size", "H, values of a token between layers"),
    "mlp-dim": ("mlp_dim", "M, values of a token inside an expert"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; each is named after its field of DemoConfig."""
    default, add = defaults.DemoConfig(), parser.add_argument
    add(
        "--compare",
        action="store_true",
        help="train a twin on plain JAX collectives from the same seed, compare every step's loss "
        "bit by bit, and report both speeds. On GPUs and between nodes losses may differ by "
        "0.1%%, and the twin copies the parameters every second step. The exit code is 3 if a "
        "loss differs",
    )
    add(
        "--steps",
        type=count,
        metavar="N",
        help=f"optimizer steps; default {default.steps}, "
        f"with --compare {defaults.DEFAULT_COMPARE_STEPS}",
    )
    add(
        "--platform",
        choices=("auto", *defaults.PLATFORMS),
        default="auto",
        help="auto: GPUs if JAX and this package can use enough of them, else CPU devices",
    )
    add(
        "--devices",
        type=count,
        metavar="D",
        help="number of devices. Default: the product of the axes of --mesh; without --mesh "
        f"{default.devices} on CPU, and all GPUs, down to a power of two and at most 8",
    )
    add(
        "--processes",
        type=count,
        metavar="P",
        help="train in P processes with D/P devices each, under jax.distributed; default 1, with "
        "--nodes two per node",
    )
    add(
        "--nodes",
        type=count,
        default=default.nodes,
        metavar="N",
        help="start N daemons that form a cluster on this machine, for P/N processes each; default "
        "1",
    )
    add(
        "--mesh",
        metavar="AXIS=N,...",
        help=f"mesh with axes of {', '.join(defaults.AXES)}, outermost first, such as "
        "dp=2,fsdp=2,ep=2; default dp=2,ep=D/2, with --nodes ep=D",
    )
    add(
        "--rules",
        choices=defaults.RULES,
        default=default.rules,
        help="layout of experts' weights. fsdp+ep: experts over ep, their matrices over fsdp. "
        "shard-exp-on-fsdp: experts over ep and fsdp, their matrices whole. Default "
        f"{default.rules}",
    )
    add(
        "--recipe",
        default=default.recipe,
        metavar="R[,R...]",
        help=f"number format of the experts' matmuls, of {', '.join(defaults.RECIPES)}; several "
        f"are trained one after the other; default {default.recipe}",
    )
    add(
        "--combine-precision",
        choices=COMBINE_PRECISIONS,
        default=default.combine_precision,
        help=f"precision of the sums that experts return; default {default.combine_precision}",
    )
    add(
        "--transport",
        choices=defaults.TRANSPORTS,
        default=default.transport,
        help="what moves tokens: windows in host memory (memfd) or on GPUs (nvlink), NCCL between "
        "GPUs (nccl), or plain JAX collectives (xla); default auto",
    )
    add(
        "--optimizer",
        choices=defaults.OPTIMIZERS,
        default=default.optimizer,
        help=f"optimizer of all parameters; default {default.optimizer}",
    )
    add(
        "--learning-rate",
        type=positive,
        default=default.learning_rate,
        metavar="RATE",
        help=f"peak of the learning rate, after a warm-up; default {default.learning_rate:g}",
    )
    add("--plot", metavar="FILE.png", help="draw the loss curves; needs the extra plot")
    for flag, (field, text) in _NUMBERS.items():
        value = getattr(default, field)
        add(
            f"--{flag}",
            dest=field,
            type=count,
            default=value,
            metavar="N",
            help=f"{text}; default {value}",
        )
    add(
        "--seed",
        type=int,
        default=default.seed,
        metavar="N",
        help=f"seed of parameters and batches; default {default.seed}",
    )
    add(
        "--address",
        help="daemon to use: unix:///DIR, embedded, node or none; default $EP_RUNTIME_ADDRESS, "
        "else the node's daemon, else a private one, or with --processes one that they share",
    )


def make_config(args: argparse.Namespace) -> defaults.DemoConfig:
    """The checked config of parsed options.

    Raises:
        InvalidArgumentError: an option's value does not fit the others.
    """
    fields = {field.name for field in dataclasses.fields(defaults.DemoConfig)}
    given = {name: value for name, value in vars(args).items() if name in fields}
    if args.steps is None:
        steps = defaults.DEFAULT_COMPARE_STEPS if args.compare else defaults.DEFAULT_STEPS
        given["steps"] = steps
    if args.devices is None and args.mesh is not None:
        args.devices = math.prod(defaults.parse_mesh(args.mesh).values())
    given["platform"], given["devices"] = _choose_platform(args.platform, args.devices)
    if args.processes is None:
        given["processes"] = 2 * args.nodes if args.nodes > 1 else 1
    return defaults.DemoConfig(**given, program=_program()).checked()


def _program() -> str:
    """The words that start this program in a shell: its name if PATH has it, else its path."""
    called = sys.argv[0]
    if os.path.basename(called) == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m ep_runtime_client.cli"
    found = shutil.which(os.path.basename(called))
    known = found is not None and os.path.realpath(found) == os.path.realpath(called)
    return os.path.basename(called) if known else shlex.quote(called)


def _choose_platform(wanted: str, devices: int | None) -> tuple[defaults.Platform, int]:
    """Chooses the platform, and the number of devices unless the user gave it.

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
    return platform, defaults.default_devices(found) if devices is None else devices


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code."""
    config = make_config(args)
    _require("optax", "demo", "the demo")
    if config.plot is not None:
        _require("matplotlib", "plot", "--plot")
    from ep_runtime_client.demo.render import Reporter

    Reporter(config).announce()  # JAX's import takes seconds
    try:
        if config.processes > 1:
            from ep_runtime_client.demo import processes

            return processes.run(config)
        job = importlib.import_module("ep_runtime_client.demo.job")
        return int(job.run(config))
    except KeyboardInterrupt:
        return INTERRUPTED


def _require(module: str, extra: str, who: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise InvalidArgumentError(
            f"{who} needs {module}: pip install 'ep-runtime[{extra}]'", argument=extra
        )
