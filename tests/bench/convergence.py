"""Trains the demo's model by several number formats and by plain JAX, and compares the losses.

    python tests/bench/convergence.py OUT --gpus 0,1 --recipes bf16,fp8,fp8-block,stock --seeds 0,1

With server and client on PYTHONPATH; needs optax. Each pair of a recipe and a seed is a run, each
run is a process with --devices GPUs, and all runs train at the same time. Runs of one seed start
from equal values and see equal batches. "stock" computes the experts in plain JAX: bf16 like ours,
every expert on every token, with no drops. The others call `ep.moe` without a capacity factor, so
they drop nothing either. "bf16-slots" is bf16 with a slot on each rank for every expert of a rank.
Attention, router and optimizer are the demo's, in float32.

The text is the source of Python's standard library without its tests. Every 20th file is held out.

A run stops after --steps, or after --seconds if that is sooner. It writes OUT/RECIPE-SEED.json, and
the end of all runs prints one table of every file in OUT.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

STARTED = time.monotonic()
STOCK = "stock"
SLOTS = "bf16-slots"
RECIPES = ("bf16", SLOTS, "fp8", "fp8-block", STOCK)
EVERY = 10  # steps whose losses are averaged to one number of the file
LAST = 100 // EVERY  # last numbers, whose mean is the final training loss
HELD_OUT_BATCHES = 32
HELD_OUT_FILES = 20  # every how many files one is held out
END_S = 60.0  # how long after --seconds a run may compute its held-out loss and end
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests"}


def run_all(args: argparse.Namespace) -> bool:
    """Starts one process per run, in turns over the GPUs; returns whether all ended well."""
    runs = [(recipe, seed) for seed in args.seeds for recipe in args.recipes]
    started = []
    for number, (recipe, seed) in enumerate(runs):
        command = [sys.executable, __file__, *sys.argv[1:]]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if args.platform == "gpu":
            first = number * args.devices
            some = [args.gpus[(first + k) % len(args.gpus)] for k in range(args.devices)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(some)
        command += ["--recipes", recipe, "--seeds", str(seed)]
        started.append(subprocess.Popen(command, env=environment))
    well = True
    try:
        for process, (recipe, seed) in zip(started, runs, strict=True):
            left = args.seconds + END_S - (time.monotonic() - STARTED)
            if process.wait(max(1.0, left)):
                well = False
                _say(f"{recipe}-{seed} failed with {process.returncode}, see above")
    except subprocess.TimeoutExpired:
        well = False
        _say(f"a run has not ended {END_S:.0f} s after its {args.seconds:.0f} s, and is killed")
    finally:
        for process in started:
            process.kill()
            process.wait()
    return well


def run_one(args: argparse.Namespace, recipe: str, seed: int) -> None:
    """Trains in this process and writes the file of the run."""
    import jax
    import numpy as np

    import ep_runtime as ep
    from ep_runtime_client.demo import job, trainer, transformer
    from ep_runtime_client.demo.config import DemoConfig
    from ep_runtime_client.jobs.members import Member, start_jax

    sizes = {field: getattr(args, field) for field in _SIZES}
    devices = args.devices
    sizes |= {"devices": devices, "mesh": f"ep={devices}"}
    config = DemoConfig(seed=seed, steps=args.steps, **sizes).checked()
    name, session = f"{recipe}-{seed}", None
    if recipe != STOCK:
        session = ep.connect("embedded", timeout_s=120.0)
    start_jax(devices, Member(), args.platform)
    mesh = trainer.make_mesh(dataclasses.replace(config, platform=args.platform))
    rules = ep.sharding.rules("fsdp+ep").on(mesh)
    experts, hidden = config.num_experts, config.hidden_size
    names = [f"block{number}" for number in range(config.num_layers)]
    shape: dict[str, int] = {"num_experts": experts, "hidden_size": hidden}
    specs = [ep.LayerSpec(each, top_k=config.top_k, **shape) for each in names]
    layers: list[Any] = specs
    how: dict[str, Any] = {}
    if session is not None:
        group = session.create_group(
            "convergence",
            mesh,
            rules=rules,
            max_tokens_per_rank=config.tokens_per_step // devices,
            max_top_k=config.top_k,
            max_token_dtype="bfloat16",
            spare_experts=experts // devices if recipe == SLOTS else 0,
            **shape,
        )
        layers = [group.register_layer(each, top_k=config.top_k) for each in names]
        made = None if recipe in ("bf16", SLOTS) else transformer.RECIPES[recipe]
        how = {"recipe": made, "compute_dtype": "bfloat16", "params_spec": rules}
    optimizer = trainer.make_optimizer(config.steps)

    def loss_fn(params: Any, window: Any) -> Any:
        found = SimpleNamespace(moe=ep.moe if session is not None else stock_moe(config.top_k))
        with mock.patch.object(transformer, "ep", found):
            return transformer.loss_fn(params, window, layers=layers, **how)

    def step(state: Any, window: Any) -> Any:
        gradient, (loss, _) = jax.grad(loss_fn, has_aux=True)(state[0], window)
        updates, moments = optimizer.update(gradient, state[1], state[0])
        return (jax.tree.map(lambda p, u: p + u, state[0], updates), moments), loss

    def start(key: Any) -> Any:
        params = transformer.init_params(key, config, specs)
        return params, optimizer.init(params)

    training, held_out = texts()
    batches = job.training_batches(training, batch=config.batch, seq=config.seq, seed=seed)
    others = job.training_batches(held_out, batch=config.batch, seq=config.seq, seed=0)
    state = jax.jit(start)(jax.random.key(seed))
    window = next(others)
    lowered = jax.jit(step, donate_argnums=0).lower(state, window)
    bodies = sorted(set(re.findall(r"moe\.\w+\.\w+", lowered.as_text(debug_info=True))))
    advance = lowered.compile()
    judge = jax.jit(lambda params, window: loss_fn(params, window)[1][0]).lower(state[0], window)
    judge = judge.compile()
    size = config.num_parameters(config.num_experts)
    _say(
        f"{name}: {size:,} parameters, {config.tokens_per_step:,} of "
        f"{len(training):,} bytes a step, experts by {bodies or 'plain JAX'}; compiled"
    )
    losses: list[float] = []
    first = now = time.monotonic()
    while len(losses) * EVERY < args.steps and now - STARTED < args.seconds:
        some = []
        for _ in range(EVERY):
            state, loss = advance(state, next(batches))
            some.append(loss)
        losses.append(float(np.mean(jax.device_get(some))))
        now = time.monotonic()
        if len(losses) in (1, 10) or len(losses) % 25 == 0:
            _say(f"{name}: step {len(losses) * EVERY}, loss {losses[-1]:.4f}")
    found = [float(judge(state[0], next(others))) for _ in range(HELD_OUT_BATCHES)]
    if session is not None:
        group.check()
        if devices > 1:
            load = group.load()
            own = [each.ranks.max() / each.ranks.mean() for each in load.layers.values()]
            fullest = load.computed.max() / load.computed.mean()
            _say(
                f"{name}: a rank's own experts got up to {max(own):.3f} of the even share of a "
                f"layer's rows; over all layers a rank computed up to {fullest:.3f} even shares"
            )
        session.close()
    steps = len(losses) * EVERY
    result = {
        "recipe": recipe,
        "seed": seed,
        "steps": steps,
        "wanted_steps": args.steps,
        "ms": 1e3 * (now - first) / steps,
        "experts_by": bodies,
        "every": EVERY,
        "losses": losses,
        "held_out": float(np.mean(found)),
        "device": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "text_bytes": [len(training), len(held_out)],
        "num_parameters": size,
        "tokens_per_step": config.tokens_per_step,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    _say(f"{name}: ends after {steps} steps, held-out loss {result['held_out']:.4f}")


def stock_moe(top_k: int) -> Callable[..., Any]:
    """Computes `ep.moe` in plain JAX: the same router, loss and weights, with experts in bf16."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def moe(
        _: Any, x: jax.Array, params: Any, *, aux_loss_coeff: float, return_stats: bool
    ) -> tuple[jax.Array, jax.Array, Any]:
        rows = x.reshape(-1, x.shape[-1])
        logits = jnp.dot(rows, params.router, precision=lax.Precision.HIGHEST)
        picked, idx = lax.top_k(logits, top_k)
        tokens, experts = logits.shape
        chosen = jax.nn.one_hot(idx, experts)  # [T, K, E]
        weights = (chosen * jax.nn.softmax(picked)[..., None]).sum(1)
        shares, slots = jax.nn.softmax(logits).sum(0), chosen.sum((0, 1))
        scale = aux_loss_coeff * experts / (top_k * tokens**2)
        narrow, wi, wo = (a.astype(jnp.bfloat16) for a in (rows, params.wi, params.wo))
        hidden = jnp.einsum("th,ehgm->getm", narrow, wi)
        out = jnp.einsum("etm,emh->eth", jax.nn.silu(hidden[0]) * hidden[1], wo)
        y = jnp.einsum("te,eth->th", weights, out.astype(jnp.float32))
        stats = SimpleNamespace(dropped=jnp.zeros((), jnp.int32)) if return_stats else None
        return y.reshape(x.shape), scale * (shares * lax.stop_gradient(slots)).sum(), stats

    return moe


def texts() -> tuple[Any, Any]:
    """Returns (training bytes, held-out bytes): whole files of the standard library, by path."""
    import numpy as np

    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    files = [path for path in files if not NOT_TEXT & {*path.relative_to(root).parts}]
    held_out = files[::HELD_OUT_FILES]
    training = [path for path in files if path not in set(held_out)]
    training_text, held_out_text = (
        np.frombuffer(b"\n".join(path.read_bytes() for path in some), np.uint8)
        for some in (training, held_out)
    )
    return training_text, held_out_text


def report(folder: Path) -> Iterator[str]:
    """Prints a table of a folder's runs, then each recipe's distance from plain JAX, or else from
    the first recipe, and the noise.
    """
    runs = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    by = {(run["recipe"], run["seed"]): run for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    recipes = [recipe for recipe in RECIPES if any((recipe, seed) in by for seed in seeds)]
    base = STOCK if STOCK in recipes else next(iter(recipes), STOCK)
    yield "| recipe | seed | steps | ms a step | loss, last 100 steps | held out | experts by |"
    yield "|---|---|---|---|---|---|---|"
    for recipe in recipes:
        for seed in seeds:
            if (run := by.get((recipe, seed))) is not None:
                cut = "" if run["steps"] >= run["wanted_steps"] else f" of {run['wanted_steps']}"
                yield (
                    f"| {recipe} | {seed} | {run['steps']}{cut} | {run['ms']:.1f} | "
                    f"{final(run):.4f} | {run['held_out']:.4f} | "
                    f"{' '.join(run['experts_by']) or 'plain JAX'} |"
                )
    for title, value in (("last 100 steps", final), ("held out", lambda run: run["held_out"])):
        spread = []
        for recipe in recipes:
            found = {seed: value(by[recipe, seed]) for seed in seeds if (recipe, seed) in by}
            gaps = [
                one - value(by[base, seed]) for seed, one in found.items() if (base, seed) in by
            ]
            if len(found) > 1:
                spread.append(statistics.variance(found.values()))
            text = f"{title}: {recipe} mean {statistics.fmean(found.values()):.4f}"
            if gaps and recipe != base:
                said = " ".join(f"{gap:+.4f}" for gap in gaps)
                text += f"; minus {base} by seed: {said}, mean {statistics.fmean(gaps):+.4f}"
            yield text
        if spread:
            noise = statistics.fmean(spread) ** 0.5
            yield f"{title}: standard deviation between seeds of one recipe {noise:.4f}"


def final(run: dict[str, Any]) -> float:
    """Mean training loss of the last 100 steps."""
    return statistics.fmean(run["losses"][-LAST:])


def _say(text: str) -> None:
    sys.stdout.write(f"[{time.monotonic() - STARTED:6.1f} s] {text}\n")
    sys.stdout.flush()


# Options of the model's sizes, with the values of 52 million parameters.
_SIZES = {
    "batch": 32,
    "seq": 256,
    "hidden_size": 512,
    "mlp_dim": 512,
    "num_layers": 7,
    "num_experts": 8,
    "top_k": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, help="folder of the runs' files")
    default = [name for name in RECIPES if name != SLOTS]  # slots need several devices
    add("--recipes", type=_names, default=default, help="default " + ",".join(default))
    add("--seeds", type=_numbers, default=[0, 1], help="of initial values and batches; default 0,1")
    add("--gpus", type=lambda text: text.split(","), default=["0"], help="default 0")
    add("--devices", type=int, default=1, help="of a run, all in one EP group; default 1")
    add("--platform", choices=("gpu", "cpu"), default="gpu")
    add("--steps", type=int, default=2000, help=f"a multiple of {EVERY}; default 2000")
    add("--seconds", type=float, default=400.0, help="limit of a run with compiling; default 400")
    for field, value in _SIZES.items():
        add(f"--{field.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    args = parser.parse_args()
    if len(args.recipes) == len(args.seeds) == 1:
        run_one(args, args.recipes[0], args.seeds[0])
        return 0
    well = run_all(args)
    for line in report(args.out):
        sys.stdout.write(line + "\n")
    return 0 if well else 1


def _names(text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in RECIPES]:
        raise argparse.ArgumentTypeError(f"{wrong} are not among {RECIPES}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
