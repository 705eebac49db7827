"""Writes docs/results.md from the rows of docs/results/*.json, which `bench --save` writes.

    python docs/results_page.py [--check]

With --check it writes nothing and ends with 1 if the page is not what the rows say. A newer row of
the same machine, model and subject replaces an older one in a table, so a new run is a copy of its
files into the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "results.md"

Row = dict[str, Any]

BY = {
    "nvlink": "ep-runtime",
    "nccl": "ep-runtime over NCCL",
    "torch": "PyTorch",
    "stock padded": "plain JAX, padded",
    "stock dropless": "plain JAX, dropless",
}
INTRO = """# Results

Current figures, one table per question, written by `docs/results_page.py` from the rows in
`docs/results`. [Run this on your cluster](your-cluster.md) says how to add yours. Devices are of
one host with NVLink, tokens are bf16 and figures are medians unless a row says more. "-" was not
measured.
"""


@dataclasses.dataclass(frozen=True)
class Table:
    """One question.

    Attributes:
        title: its heading.
        text: what a reader must know of its rows.
        benches: whose rows.
        columns: heading, key of the row, and name of FORMATS.
        wanted: which of them.
    """

    title: str
    text: str
    benches: tuple[str, ...]
    columns: tuple[tuple[str, str, str], ...]
    wanted: Callable[[Row], bool] = lambda row: True


def _number(digits: int) -> Callable[[Any], str]:
    return lambda value: f"{value:,.{digits}f}"


FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "0": _number(0),
    "1": _number(1),
    "2": _number(2),
    "3": _number(3),
    "hundreds": lambda value: f"{round(value, -2):,}",
    "percent": lambda value: f"{value:.0%}",
    "GiB": lambda value: f"{value / 2**30:.1f}",
}
MACHINE = ("machine", "machine", "text")
SPEEDS = (
    ("by", "by", "text"),
    ("ms", "ms", "1"),
    ("tokens/s", "tokens_per_s", "hundreds"),
    ("TFLOP/s", "tflops", "0"),
    ("MFU", "mfu", "percent"),
    ("joules", "joules", "0"),
    ("GiB", "memory_bytes", "GiB"),
    ("ep-runtime is faster", "faster", "2"),
)
MODEL, CASE = ("model", "model", "text"), ("layer", "case", "text")
SHORT = (*SPEEDS[:2], ("GiB", "memory_bytes", "GiB"))


def peers(row: Row) -> bool:
    """Rows of runs that measured ours and another's."""
    return row["subject"] in BY and row["compared"] and not over_nccl(row)


def narrow(row: Row) -> bool:
    """Rows of 8-bit weights that are quantized once, and of remat in whole steps."""
    remat, step = "remat" in row["subject"], row["bench"] == "train"
    once = "weights once" in row["subject"] and (step or not remat)
    wanted = once or (step and remat and "fp8" not in row["subject"])
    return wanted and "plan" not in row["subject"] and not over_nccl(row)


def over_nccl(row: Row) -> bool:
    return "nccl" in row["command"]


def routed(row: Row) -> bool:
    """Rows of drawn experts; even ones only beside copies of experts, to compare with."""
    if "--spare-experts" in row["command"]:
        return not over_nccl(row)
    return peers(row) and " " in row["model"] and not row["model"].endswith(" uniform")


TABLES = (
    Table(
        "Beside PyTorch and plain JAX",
        """\
A whole training step: `ep-runtime bench train --transports nvlink,stock,torch`. Tokens/s and
joules are those of all GPUs, TFLOP/s those of one, MFU is of the card's dense bf16 peak.

- **ep-runtime** drops nothing and has room for any routing.
- **PyTorch** is written as its trainers write the layer: tokens sorted by expert,
  `all_to_all_single` whose sizes the host reads, `torch._grouped_mm`, `torch.compile` around
  activation, combine and dense parts, fused AdamW. No DeepEP. It drops nothing.
- **plain JAX, padded** is the bench's `stock padded`: `all_to_all` and batched matmuls, with room
  for 1.25 even shares of each expert. It drops tokens past that.

FLOPs are those that the model needs; padding and remat count nothing. With T tokens of a GPU, L
layers, S the sequence and V the vocabulary, a step needs 3 T (L (8 HH + 2 S H + 2 H E) + 2 H V) +
18 L T K H M. Its last term is the experts' share, and all that counts in rows of layers.""",
        ("train",),
        (MACHINE, MODEL, *SPEEDS),
        lambda row: peers(row) and " " not in row["model"],
    ),
    Table(
        "One layer",
        """\
Forward and backward: `ep-runtime bench moe --transports nvlink,stock,torch`. The layer `8-layers`
is one layer of the model `8-layers`. Plain JAX without drops is `ragged_all_to_all` with
`ragged_dot`.""",
        ("moe",),
        (MACHINE, CASE, *SPEEDS),
        peers,
    ),
    Table(
        "A skewed router",
        """\
`ep-runtime bench train --routed uniform,zipf,double` draws experts beforehand. If one rank gets
more rows than others, plain JAX drops them. With `--spare-experts 16` each rank has 16 slots for
[copies of experts](capacity.md#copies-of-experts), here as many as it has experts.""",
        ("train",),
        (MACHINE, MODEL, *SPEEDS),
        routed,
    ),
    Table(
        "8-bit matmuls, and remat",
        """\
`bench train` and `bench moe`, `--recipe none,fp8-block --quantized step`: weights are quantized
once a step, in a layer before the timing. Remat `default` saves what `ep.remat_policy()` says. On
one H200 (2026-11-29) fp8-block takes 0.93 of the step 8-layers, and of the layers 8-layers,
deepseek-like, mixtral-like and small-experts 0.76, 0.70, 0.68 and 0.81.""",
        ("train", "moe"),
        (
            MACHINE,
            ("what", "what", "text"),
            *SHORT,
            ("of the same without 8 bits", "of_plain", "2"),
        ),
        narrow,
    ),
    Table(
        "Rows over NCCL",
        """\
`ep-runtime bench train --transports nvlink,nccl,stock`, each GPU a node of its own: NVLink is the
network. It has not been measured on a real one. Dispatch of 8,192 tokens takes 720 us and combine
756, NCCL's all-to-all of these rows 482 (2x H200, 2026-11-29, `bench dispatch combine`); on two
H100s dispatch took 845 us and combine 921 (2026-11-25).""",
        ("train",),
        (MACHINE, MODEL, *SPEEDS[:3], *SPEEDS[6:]),
        over_nccl,
    ),
    Table(
        "Token movement",
        """\
`ep-runtime bench dispatch combine --transports nvlink,xla` with H=7168, K=8, E=256: time on the
device, GB/s that cross a link per GPU and direction. The ceiling is a kernel that only copies
these rows. "one" sends every token to one expert. Sums are bf16 unless said: `exact` sends
float32, `fp8` 8 bits. XLA is the same op by its own collectives.
By `tests/gpu/harness/run.sh kernels few`, as `ep.moe` calls them (2x H100, 2026-11-27): prepare,
dispatch and combine of 1, 8, 32 and 128 tokens a rank take 55, 58, 64 and 78 us together; dispatch
alone 25, 278 and 532 us of 128, 4,096 and 8,192. Combine's times are from before its reads were
mended: 8,192 uniform tokens took 545 us before and 579 after (2x H200, 40 SMs, 2026-11-29).""",
        ("movement",),
        (
            MACHINE,
            ("op", "op", "text"),
            ("T", "tokens", "0"),
            ("routing", "routing", "text"),
            ("sums", "precision", "text"),
            ("by", "by", "text"),
            ("us", "kernel_p50_us", "0"),
            ("GB/s", "physical_gb_per_s", "0"),
            ("of the ceiling", "ratio_to_ceiling", "2"),
            ("times as fast as XLA", "ratio_to_xla", "1"),
        ),
        lambda row: (
            row["op"] in ("dispatch", "combine")
            and row["transport"] in BY
            and row.get("tokens") == 8192
            and row.get("routing") != "zipf"  # between the others
            and row.get("board") != "off"
        ),
    ),
    Table(
        "Products of experts",
        """\
`ep-runtime bench gemm`: bf16, K'=7168, N'=4096, 32,768 rows in even groups; TFLOP/s, and the share
of one dense product of as many rows in the same run.""",
        ("gemm",),
        (
            MACHINE,
            ("product", "product", "text"),
            ("groups", "groups", "0"),
            ("TFLOP/s", "tflops", "0"),
            ("of dense", "ratio_to_dense", "2"),
        ),
        lambda row: (
            row.get("load") == "uniform"
            and row["recipe"] == "none"
            and row["in_features"] == 7168
            and row["groups"] != 32
            and row["product"] != "data grad"  # within 1% of forward
        ),
    ),
    Table(
        "The first call",
        """\
`ep-runtime bench connect --transports nvlink`: ms in a fresh process beside a warm daemon, without
JAX's own imports, tracing and compiling, which take seconds.""",
        ("connect",),
        (
            MACHINE,
            ("stage", "stage", "text"),
            ("ms", "median_ms", "0"),
            ("with EP_RUNTIME_NCCL=0", "without_ms", "0"),
        ),
        lambda row: row["stage"] in ("create_group", "connect to end of first handler"),
    ),
    Table(
        "MaxText",
        """\
Its trainer on 8 scanned Mixtral blocks by [its own expert paths and
ours](integrations/maxtext.md), default remat, release 0.2.5.""",
        ("maxtext",),
        (
            MACHINE,
            ("path", "path", "text"),
            ("ms", "step_ms", "1"),
            ("tokens/s", "tokens_per_s", "hundreds"),
            ("GiB", "memory_bytes", "GiB"),
            ("loss", "loss", "3"),
        ),
    ),
    Table(
        "What recipes learn",
        """\
Losses of the [demo](demo.md)'s model of 52 million parameters, in nats per byte: 2,000 steps of
8,192 bytes of Python's library, one GPU a run, means of 4 seeds. A seed sets initial values and
batches. Plain JAX multiplies every token by every expert. Between seeds, held-out losses have a
standard deviation of 0.008, so a gap has a standard error of 0.006, which no gap exceeds.
Loss after 200 steps with sums sent in 8 bits (and exact): bf16 1.394 (1.384), fp8-block 1.361
(1.384); held out, bf16 1.245 (1.251), fp8-block 1.240 (1.236). 1x H100, 2026-11-24.
Slots for copies of experts change the loss by +0.002 and -0.010 after 880 and 1,060 steps of two
seeds (2x H200, 2026-11-29, `--devices 2 --recipes bf16,bf16-slots`).""",
        ("convergence",),
        (
            ("recipe", "recipe", "text"),
            ("step 250", "at_250", "3"),
            ("500", "at_500", "3"),
            ("1,000", "at_1000", "3"),
            ("1,500", "at_1500", "3"),
            ("last 100 of 2,000", "last_100", "3"),
            ("held out", "held_out", "3"),
            ("minus plain JAX", "gap", "text"),
            ("by seed", "gaps", "text"),
        ),
    ),
)


def load() -> list[Row]:
    """Returns rows of all files, each with its file's facts about the run; older
    rows come first.
    """
    files = [json.loads(path.read_text("utf-8")) for path in sorted(DOCS.glob("results/*.json"))]
    rows: list[Row] = []
    for run in sorted(files, key=lambda run: str(run["date"])):
        kinds = [re.sub(r"^NVIDIA (\w+).*", r"\1", name) for name in run["machine"]["gpus"]]
        machine = f"{run['devices']}x {kinds[0]}" if kinds else "CPU"
        said = {key: run[key] for key in ("date", "command", "bench", "versions")}
        said |= {"machine": machine, "driver": run["machine"]["driver"]}
        said["note"] = [run["note"]] if "note" in run else []
        rows += [{**said, **row} for row in run["rows"]]
    return [_completed(row, rows) for row in rows]


def _completed(row: Row, rows: list[Row]) -> Row:
    """Adds `ms`, a peer's `faster`, and a recipe's `of_plain`, from rows of the same run."""
    subject = row.get("subject") or row.get("transport") or ""
    made = {**row, "by": _by(subject), "ms": _ms(row)}
    made["what"] = f"{_thing(row)}, {'step' if row['bench'] == 'train' else 'layer'}"
    others = {each["subject"] for each in _alike(row, rows) if each.get("subject") in BY}
    made["compared"] = len(others) > 1 or "ours_times_as_fast" in row
    if subject in BY and subject not in ("nvlink", "nccl"):
        ours = _like(row, "nvlink", rows)
        made["faster"] = row.get("ours_times_as_fast") or _ratio(_ms(row), ours)
    if subject.split()[:1] == ["nvlink"] and "fp8" in subject:
        plain = re.sub(r" (fp8\S*|weights once)", "", subject)
        made["of_plain"] = _ratio(_ms(row), _like(row, plain, rows))
    return made


def _by(subject: str) -> str:
    """Returns the subject's name on the page, followed by its settings."""
    name = next((name for name in BY if subject.startswith(name)), "")
    return f"{BY.get(name, '')}{subject.removeprefix(name)}"


def _ms(row: Row) -> float | None:
    return row.get("step_ms") if row["bench"] != "moe" else row.get("enqueued_ms")


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _like(row: Row, subject: str, rows: list[Row]) -> float | None:
    """Milliseconds of another subject in the same run."""
    return next((_ms(each) for each in _alike(row, rows) if each.get("subject") == subject), None)


def _alike(row: Row, rows: list[Row]) -> list[Row]:
    """Rows of the same run and model."""
    keys = ("command", "date", "machine", "bench", "model", "case")
    return [each for each in rows if all(each.get(key) == row.get(key) for key in keys)]


def newest(table: Table, rows: Iterable[Row]) -> list[Row]:
    """The table's rows: of each machine and subject the last one, machines and models together."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["bench"] in table.benches and table.wanted(row):
            named = [key for _, key, form in table.columns if form in ("text", "0")]
            ms = (
                "kernel_p50_us",
                "median_ms",
                "without_ms",
                "tflops",
                "joules",
                "physical_gb_per_s",
            )
            found[tuple(row.get(key) for key in named if key not in ms)] = row
    dates: dict[str, str] = {}  # the newest of each machine
    for row in found.values():
        dates[row["machine"]] = max(row["date"], dates.get(row["machine"], ""))
    order = sorted(sorted(dates), key=lambda machine: dates[machine], reverse=True)
    things = list(dict.fromkeys(_thing(row) for row in found.values()))
    subjects = [*BY, None]

    def place(row: Row) -> tuple[int, ...]:
        subject = row.get("subject") if row.get("subject") in BY else None
        return order.index(row["machine"]), things.index(_thing(row)), subjects.index(subject)

    return sorted(found.values(), key=place)


def _thing(row: Row) -> Any:
    return row.get("model") or row.get("case")


def section(table: Table, rows: Iterable[Row]) -> Iterable[str]:
    """Lines of one question: heading, text, table, and which runs its rows are of."""
    shown = newest(table, rows)
    if not shown:
        return
    runs = "; ".join(dict.fromkeys(_run(row) for row in shown))
    yield from ("", f"## {table.title}", "", f"{_filled(table.text)} Runs: {runs}.", "")
    yield f"| {' | '.join(heading for heading, _, _ in table.columns)} |"
    yield "|" + "---|" * len(table.columns)
    for row in shown:
        values = [(row.get(key), FORMATS[form]) for _, key, form in table.columns]
        yield f"| {' | '.join('-' if v is None else form(v) for v, form in values)} |"


def _filled(text: str) -> str:
    """Wraps paragraphs at 118 characters; lists keep their lines."""
    return "\n\n".join(
        part if part.startswith("- ") else textwrap.fill(part, 118) for part in text.split("\n\n")
    )


def _run(row: Row) -> str:
    named = {"jax": "JAX", "torch": "PyTorch", "nccl": "NCCL", "cuda": "CUDA"}
    versions = [
        f"{name} {row['versions'][key]}" for key, name in named.items() if key in row["versions"]
    ]
    driver = [f"driver {row['driver']}"] if row["driver"] else []
    told = [row["machine"], row["date"], *driver, *versions, f"`{row['command']}`", *row["note"]]
    return ", ".join(told)


def page() -> str:
    """The text of results.md."""
    rows = load()
    return INTRO + "\n".join(line for table in TABLES for line in section(table, rows)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not args.check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write("docs/results.md is not what docs/results says: run docs/results_page.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
