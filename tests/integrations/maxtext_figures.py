"""Compares MaxText's own expert paths with ours: ms a step and memory, in one run.

    PYTHONPATH=tests python tests/integrations/maxtext_figures.py --maxtext FILE

FILE is the wheel of MaxText's release (docs/integrations/maxtext.md). What is in it gets the page's
patch; MaxText's trainer then runs once for every path, each in a process of its own, one
after the other, on all GPUs there are or on CPU devices. Data is synthetic; of MaxText's imports,
input pipelines, dashboards and clouds are stand-ins (maxtext_stubs.py), so that a machine needs
jax, flax, optax, orbax and what MaxText's layers import (aqt, qwix, tokamax, grain, pydantic).

Every step is waited for; the first ones do not count. Memory is that of the fullest device. A path
that ends in an error says why and the next one runs. The exit code is 0 where ours ran, 1 where it
did not, 130 after Ctrl-C, which still prints what is known.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from integrations.maxtext_sources import patched_copy

from ep_runtime_client.cli import render, tables

STEPS = Path(__file__).with_name("maxtext_steps.py")
WARM_STEPS = 3
_OLD_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses it together with its new name
LONGEST = 200  # characters of an error
GIB = 2**30
FUSED = "--xla_gpu_experimental_use_ragged_dot_fusion=true"  # cuDNN 9.22; without it, the same
# MaxText's ring passes groups of all experts and an offset to its products. Only its TPU kernels
# support that; ragged_dot refuses it. With a bounded buffer it passes those of a device.
RING = {"use_ring_of_experts": True, "use_ragged_sort": True, "ragged_buffer_factor": 1.5}


class Variant(NamedTuple):
    """One of MaxText's paths through its experts; `flags` are for XLA."""

    name: str
    says: str
    settings: Mapping[str, Any]
    flags: str = ""


VARIANTS = (
    Variant("ours", "no drops", {"ep_runtime": True}),
    Variant("dense", "drops past 1.25 shares", {"sparse_matmul": False, "capacity_factor": 1.25}),
    Variant("dense-all", "every expert on every token", {"sparse_matmul": False}),
    Variant("ragged", "lax.ragged_dot", {}),
    Variant("ragged-fusion", "the same, fused by XLA", {}, FUSED),
    Variant("ragged-tokamax", "Tokamax's kernels", {"use_tokamax_gmm": True}),
    Variant("ring", "lax.ragged_dot, drops past 1.5 shares", RING),
    Variant("ring-fusion", "the same, fused by XLA", RING, FUSED),
)
COLUMNS = (
    tables.Column("name", "PATH"),
    tables.Column("ms", "MS/STEP", "count"),
    tables.Column("min_ms", "MIN", "count"),
    tables.Column("tokens_per_s", "TOKENS/S", "count"),
    tables.Column("times_best", "X BEST OF THEIRS", "count"),
    tables.Column("xla_gib", "XLA GIB", "count"),
    tables.Column("runtime_gib", "RUNTIME GIB", "count"),
    tables.Column("loss", "LAST LOSS", "count"),
    tables.Column("says", "HOW"),
)


def chosen(names: str) -> list[Variant]:
    """Variants by name, in that order.

    Raises:
        argparse.ArgumentTypeError: a name that there is not.
    """
    known = {each.name: each for each in VARIANTS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no path {unknown[0]!r}: there are {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--maxtext", type=Path, required=True, metavar="FILE", help="its wheel")
    add("--paths", type=chosen, default=VARIANTS, help=", ".join(each.name for each in VARIANTS))
    add("--steps", type=int, default=10, help="timed ones (%(default)s)")
    add("--devices", type=int, help="all GPUs that JAX sees; without GPUs, 8 CPU devices")
    sizes = {"layers": 8, "hidden": 2048, "inner": 1024, "experts": 64, "top-k": 8}
    for name, size in {**sizes, "sequence": 2048, "vocab": 32000}.items():
        add(f"--{name}", type=int, default=size, help="(%(default)s)")
    add("--tokens", type=int, default=8192, help="of one device, whole sequences (%(default)s)")
    add("--dtype", default="bfloat16", help="of weights and rows (%(default)s)")
    add("--limit-s", type=float, default=300.0, help="of one path (%(default)s)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="of MaxText, every path")
    add("--logs", type=Path, metavar="FOLDER", help="keep there what every path's process said")
    add("-o", "--output", choices=("table", "json"), default="table")
    return parser


class Machine(NamedTuple):
    """Devices that every path runs on."""

    is_gpu: bool
    devices: int

    @classmethod
    def found(cls, wanted: int | None) -> Machine:
        """Returns the devices that JAX sees in a separate process, because this one must hold none.

        Raises:
            ValueError: more GPUs wanted than there are.
        """
        asks = "import jax; print(jax.default_backend(), jax.local_device_count())"
        backend, count = subprocess.check_output([sys.executable, "-c", asks], text=True).split()
        if backend != "gpu":
            return cls(False, wanted or 8)
        if wanted is not None and wanted > int(count):
            raise ValueError(f"--devices {wanted}: JAX sees {count} GPUs")
        return cls(True, wanted or int(count))

    def environment(self, flags: str) -> dict[str, str]:
        """Environment of a process that sees only these devices."""
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        if not self.is_gpu:
            flags += f" --xla_force_host_platform_device_count={self.devices}"
            return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.devices)))
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[: self.devices]),
            "XLA_FLAGS": flags,
            # Allocated at once, so that no path fails on fragments; ours needs some memory besides
            # XLA's.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
            "XLA_CLIENT_MEM_FRACTION": "0.9",
        }


def settings_of(args: argparse.Namespace, machine: Machine, variant: Variant) -> dict[str, Any]:
    """MaxText's, of one run: a model of Mixtral's blocks, experts over all devices."""
    head = min(128, args.hidden // 4)
    return {
        "run_name": "figures",
        "dataset_type": "synthetic",
        "steps": WARM_STEPS + args.steps,
        "hardware": "gpu" if machine.is_gpu else "cpu",
        "attention": "cudnn_flash_jax" if machine.is_gpu else "dot_product",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "enable_tensorboard": False,
        "tokenizer_type": "tiktoken",
        "override_model_config": True,
        "sharding_tolerance": 1.0,
        "decoder_block": "mixtral",
        "base_num_decoder_layers": args.layers,
        "base_emb_dim": args.hidden,
        "base_num_query_heads": args.hidden // head,
        "base_num_kv_heads": args.hidden // head,
        "head_dim": head,
        "base_mlp_dim": args.inner,
        "base_moe_mlp_dim": args.inner,
        "vocab_size": args.vocab,
        "max_target_length": args.sequence,
        "per_device_batch_size": args.tokens // args.sequence,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "dtype": args.dtype,
        "weight_dtype": args.dtype,
        "load_balance_loss_weight": 0.01,
        "capacity_factor": -1.0,
        "megablox": False,
        "ici_fsdp_parallelism": 1,
        "ici_expert_parallelism": machine.devices,
        **variant.settings,
        **dict(pair.split("=", 1) for pair in args.set),
    }


def measured(
    args: argparse.Namespace, machine: Machine, patched: Path
) -> Iterator[tuple[Variant, dict[str, Any]]]:
    """Runs every path in its process; returns each one's figures, or its `error`."""
    for number, variant in enumerate(args.paths, 1):
        render.err(f"[{number}/{len(args.paths)}] {variant.name}: {variant.says}")
        out = patched / variant.name
        out.mkdir()
        kept = {"base_output_directory": out, "jax_cache_dir": out / "programs"}
        settings = {**settings_of(args, machine, variant), **kept}
        found = run(patched, out, settings, machine.environment(variant.flags), args.limit_s)
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(out / "log", args.logs / f"{variant.name}.log")
        yield variant, found


def run(
    patched: Path,
    out: Path,
    settings: Mapping[str, Any],
    environment: Mapping[str, str],
    limit_s: float,
) -> dict[str, Any]:
    """Runs one path in a separate process; its output goes to a file next to its result."""
    result = out / "result.json"
    words = [f"{name}={value}" for name, value in settings.items()]
    inherited = {name: value for name, value in os.environ.items() if name != _OLD_NAME}
    path = os.pathsep.join([str(patched), *filter(None, sys.path)])
    with (out / "log").open("w") as log:
        try:
            code = subprocess.run(
                [sys.executable, str(STEPS), str(result), *words],
                cwd=patched,
                env={**inherited, "PYTHONPATH": path, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"had not ended after {limit_s:g} s"}
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))
    lines = (out / "log").read_text(encoding="utf-8", errors="replace").splitlines()
    return {"error": f"exit code {code}: {next(filter(None, reversed(lines)), 'no word')}"}


def row_of(variant: Variant, found: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """A path's line; without figures where it failed."""
    if "error" in found:
        return {"name": variant.name, "says": found["error"][:LONGEST]}
    timed = [1e3 * each for each in found["seconds"][WARM_STEPS:]]
    gib = {key: found[f"{key}_bytes"] for key in ("xla", "runtime")}
    return {
        "name": variant.name,
        "ms": round(statistics.median(timed), 1),
        "min_ms": round(min(timed), 1),
        "tokens_per_s": round(1e3 * tokens / statistics.median(timed)),
        **{f"{key}_gib": size and round(size / GIB, 2) for key, size in gib.items()},
        "loss": round(found["loss"], 4),
        "says": variant.says,
    }


def tell(args: argparse.Namespace, machine: Machine, rows: Sequence[Mapping[str, Any]]) -> None:
    kind = "GPUs" if machine.is_gpu else "CPU devices"
    if args.output == "json":
        sizes = {key: value for key, value in vars(args).items() if isinstance(value, int | str)}
        said = {**sizes, "devices": machine.devices, "kind": kind}
        render.write_json("maxtext_figures", {**said, "rows": beside_theirs(rows)})
        return
    experts = f"{args.layers} layers, H={args.hidden}, M={args.inner}, E={args.experts}"
    tokens = f"K={args.top_k}, {args.tokens} tokens a device, {args.dtype}"
    render.out(f"MaxText on {machine.devices} {kind}: {experts}, {tokens}")
    render.write_table(COLUMNS, beside_theirs(rows), wide=False, empty="no path")


def beside_theirs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with how many times as fast as MaxText's fastest each of them is."""
    theirs = [row["ms"] for row in rows if "ms" in row and row["name"] != "ours"]
    best = min(theirs, default=None)
    known = [best is not None and "ms" in row for row in rows]
    return [
        {**row, "times_best": round(best / row["ms"], 2)} if is_known else dict(row)
        for row, is_known in zip(rows, known, strict=True)
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = arguments()
    args = parser.parse_args(words)
    if args.tokens % args.sequence:
        parser.error(f"--tokens {args.tokens} are not whole sequences of {args.sequence}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="maxtext-") as folder:
        try:
            patched = patched_copy(args.maxtext.resolve(), Path(folder, "maxtext"))
            machine = Machine.found(args.devices)
        except ValueError as error:
            parser.error(str(error))
        try:
            for variant, found in measured(args, machine, patched):
                rows.append(row_of(variant, found, args.tokens * machine.devices))
                render.err(f"    {rows[-1].get('ms', 'no figures')}: {rows[-1]['says']}")
        except KeyboardInterrupt:
            tell(args, machine, rows)
            return 130
    tell(args, machine, rows)
    return 0 if any(row["name"] == "ours" and "ms" in row for row in rows) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
