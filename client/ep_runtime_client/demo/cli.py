"""`ep-runtime demo`: options, and with `--processes P` the start of P processes of this module.

Imports no JAX; only the job does.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import math
import tempfile
from pathlib import Path
from typing import Any

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.cli.daemon.reading import count
from ep_runtime_client.cli.machine import gpus
from ep_runtime_client.daemons import addresses
from ep_runtime_client.demo import config as defaults
from ep_runtime_client.jobs.members import (
    INTERRUPTED,
    Member,
    Members,
    reserved_coordinator,
    run_member,
)

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
    text = (
        "train a twin on plain JAX collectives from the same seed, compare every step's loss bit "
        "by bit, and report both speeds. On GPUs losses must agree within 0.1%%, and the twin "
        "takes over the parameters every other step. The exit code is 3 if a step differs"
    )
    add("--compare", action="store_true", help=text)
    text = (
        "kill the last process half way, and train on in the others, from a copy of the state in "
        "memory. Shows the loss before and after, and what the daemon saw"
    )
    add("--survive", action="store_true", help=text)
    text = f"optimizer steps; default {default.steps}, "
    text += f"with --compare {defaults.DEFAULT_COMPARE_STEPS}"
    add("--steps", type=count, metavar="N", help=text)
    platforms = ("auto", *defaults.PLATFORMS)
    text = "auto: GPUs if JAX and this package can use enough of them, else CPU devices"
    add("--platform", choices=platforms, default="auto", help=text)
    text = f"devices; default {default.devices} on CPU, the most of 1, 2, 4 or 8 on GPUs; "
    text += "with --mesh the product of its axes"
    add("--devices", type=count, metavar="D", help=text)
    text = "train in P processes with D/P devices each, under jax.distributed; default 1"
    add("--processes", type=count, default=1, metavar="P", help=text)
    text = f"mesh with axes of {', '.join(defaults.AXES)}, outermost first, such as "
    text += "dp=2,fsdp=2,ep=2; default dp=2,ep=D/2"
    add("--mesh", metavar="AXIS=N,...", help=text)
    text = f"number format of the experts' matmuls; default {default.recipe}"
    add("--recipe", choices=defaults.RECIPES, default=default.recipe, help=text)
    text = "what moves tokens: windows in host memory (memfd) or on GPUs (nvlink), NCCL between "
    text += "GPUs (nccl), or plain JAX collectives (xla); default auto"
    add("--transport", choices=defaults.TRANSPORTS, default=default.transport, help=text)
    for flag, (field, text) in _NUMBERS.items():
        value = getattr(default, field)
        said = f"{text}; default {value}"
        add(f"--{flag}", dest=field, type=count, default=value, metavar="N", help=said)
    text = "seed of all random numbers; default 0"
    add("--seed", type=int, default=default.seed, metavar="N", help=text)
    text = "daemon to use: unix:///DIR, embedded, node or none; default $EP_RUNTIME_ADDRESS, else "
    text += "the node's daemon, else a private one, or with --processes one that they share"
    add("--address", help=text)


def make_config(args: argparse.Namespace) -> defaults.DemoConfig:
    """Returns the checked config of parsed options, for GPUs if there are enough of them.

    Raises:
        InvalidArgumentError: an option's value does not fit the others, or no GPU can be used.
    """
    fields = {field.name for field in dataclasses.fields(defaults.DemoConfig)}
    given = {name: value for name, value in vars(args).items() if name in fields}
    steps = defaults.DEFAULT_COMPARE_STEPS if args.compare else defaults.DEFAULT_STEPS
    devices = args.devices
    if devices is None and args.mesh is not None:
        devices = math.prod(defaults.parse_mesh(args.mesh).values())
    found = gpus.usable() if args.platform != "cpu" else 0
    if args.platform == "gpu" and devices is None and not found:
        raise InvalidArgumentError(
            "--platform gpu needs GPUs that JAX and this package can use; `ep-runtime doctor` says "
            "what is missing",
            argument="platform",
        )
    if devices is None:
        devices = next((n for n in (8, 4, 2, 1) if n <= found), defaults.DemoConfig.devices)
    on_gpus = args.platform == "gpu" or 0 < devices <= found
    given |= {"steps": args.steps or steps, "devices": devices}
    return defaults.DemoConfig(**given | {"platform": "gpu" if on_gpus else "cpu"}).checked()


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code."""
    config = make_config(args)
    if importlib.util.find_spec("optax") is None:
        text = "the demo needs optax: pip install 'ep-runtime[demo]'"
        raise InvalidArgumentError(text, argument="demo")
    from ep_runtime_client.demo.reporter import Reporter

    Reporter(config).announce()  # before JAX's import, which takes seconds
    try:
        return _run_processes(config) if config.processes > 1 else _run_job(config)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run_processes(config: defaults.DemoConfig) -> int:
    """Runs the demo's processes; returns the exit code of the first one that failed, else 0."""
    from ep_runtime_client.sessions import connect

    if config.address is None and connect.choose(None).kind == addresses.EMBEDDED:
        config = dataclasses.replace(config, address=addresses.NODE)
    with (
        tempfile.TemporaryDirectory(prefix="ep-runtime-demo-") as directory,
        reserved_coordinator() as coordinator,
        Members(
            "ep_runtime_client.demo.cli",
            dataclasses.asdict(config),
            processes=config.processes,
            directory=Path(directory),
            coordinator=coordinator,
            may_die=config.processes - 1 if config.survive else None,
        ) as started,
    ):
        return started.wait()


def _run_job(config: defaults.DemoConfig, member: Member | None = None) -> int:
    job: Any = importlib.import_module("ep_runtime_client.demo.job")
    return int(job.run(config, member))


def _work(order: dict[str, Any], member: Member) -> int:
    return _run_job(defaults.DemoConfig(**order), member)


if __name__ == "__main__":
    run_member(_work, "ep-runtime demo")
