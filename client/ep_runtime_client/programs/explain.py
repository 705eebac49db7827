"""Finds the collectives that our ops cause in a compiled program, and tells why.

It reads the compiled HLO, not the traced program, because the partitioner adds collectives if
operands are not sharded as an op needs them. A collective is ours if its metadata name one of our
scopes, or if its result goes into one of our ops through elementwise instructions only.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import jax

from ep_runtime_client.base import jax_internals
from ep_runtime_client.moe import bodies
from ep_runtime_client.ops.tracing import scopes

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_SUMS = ("all-reduce", "reduce-scatter")
# An op name ends with a collective's name if the program called it, and with "ep_partitioned" if a
# sharding rule did. Other names are the partitioner's. A ")" follows if XLA merged two ops.
_WRITTEN = re.compile(
    r"/(psum\w*|pmax|pmin|all_to_all|all_gather\w*|ppermute|pbroadcast|reduce_scatter"
    r"|ep_partitioned)\)?$"
)
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) "
    r"(?P<op>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_APPLIES = re.compile(r"\bto_apply=%?([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
# An instruction that does more than move or map elements ends the search for one of our ops.
_ENDS = frozenset(
    {
        "dot",
        "convolution",
        "reduce",
        "sort",
        "scatter",
        "gather",
        "custom-call",
        "while",
        "conditional",
        "call",
        *_SUMS,
    }
)

_OWN = {
    "router": "the router's weights are replicated: their gradient is summed over the tokens' "
    "shards",
    "aux_loss": "the balancing loss sums over the global batch",
    "stats": "the statistics sum over the global batch",
}
_RESHARD = {
    "experts": "an expert weight, its gradient or the rows are not sharded over ep on dim 0",
    "router": "logits or the router's weights are resharded",
}
_MATMUL = frozenset({"grouped_gemm", "grouped_quantize", "dense", "block", "block_bwd"})
_AMAX = "the amax of a scale is the largest over the axes that split the values which share it"
_GATHERED = "a weight is sharded over outer axes, which split the tokens: it is gathered over them"
_GATHERED_BEFORE = (
    "an operand is gathered before the op: a weight sharded over outer axes, or rows not sharded "
    "as the group needs them"
)
_MOVED_BEFORE = "an operand or a result is not sharded as the sharding rules need it"
_FORWARD_SUM = "products are added up over the axes that split the contracted dim K'"
_BACKWARD_SUM = (
    "gradients are added up: a weight's over the outer axes that share it, the rows' over the axes "
    "that split N'"
)
_COPIED = (
    "weights of experts go to slots for their copies, and gradients come home (spare_experts), or "
    'rows move on transport "xla" and between nodes'
)
_SCATTERED = "a weight's gradient is added up over the weight's outer axes, and stays sharded"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective that an op of the runtime adds to a compiled program.

    Attributes:
        kind: XLA's name of the collective, such as "all-gather".
        op: prepare, dispatch, combine, dispatch_bwd, combine_bwd, block, block_bwd, grouped_gemm,
            grouped_quantize, dense, router, aux_loss or stats; "experts" for the rest
            of `moe`.
        layer: the layer's name (layer 0's name for a stack), with "." for "/"; "-" without a
            layer.
        cause: "own" (the op consists of it), "sum" (it adds up partial results), "amax" (a scale
            needs the largest value of all devices) or "reshard". A reshard changes an operand or a
            result to the sharding that an op needs.
        why: the cause in words.
        bytes: size of its result on one device.
        instruction: its name in the compiled program.
    """

    kind: str
    op: str
    layer: str
    cause: str
    why: str
    bytes: int
    instruction: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.bytes:,} bytes at ep.{self.op} of {self.layer!r}: {self.why}"


@dataclasses.dataclass(frozen=True)
class MoEPath:
    """How `moe` runs the experts of one layer, and why.

    Attributes:
        layer: the layer's name (layer 0's name for a stack), with "." for "/".
        path: the body that runs them: "cuda" or "cuda_nodes" (one custom call forward and one
            backward), or "composed" (separate ops, on arrays that have room for the worst case).
        why: the reason for "composed"; empty for the others.
        spare_experts: slots of each rank for copies of other ranks' experts; 0 if its calls do
            not spread rows over copies.
    """

    layer: str
    path: str
    why: str
    spare_experts: int = 0

    def __str__(self) -> str:
        copies = f"; {self.spare_experts} slots of a rank for copies" if self.spare_experts else ""
        why = f": {self.why}" if self.why else ""
        return f"ep.moe of {self.layer!r}: {self.path}{why}{copies}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str(result)` is a report.

    Attributes:
        collectives: collectives that ops of the runtime cause, in program order.
        num_others: the program's other collectives.
        paths: how each layer's `moe` runs, in program order.
        fallback: why ops run in a shard_map instead of asking the partitioner; empty with every
            supported JAX.
    """

    collectives: tuple[Collective, ...]
    num_others: int
    paths: tuple[MoEPath, ...] = ()
    fallback: str = ""

    def __str__(self) -> str:
        lines = [f"{len(self.collectives)} collectives by ep ops, {self.num_others} others"]
        lines += [f"  {each}" for each in (*self.collectives, *self.paths, self.fallback) if each]
        return "\n".join(lines)


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Reports which collectives the runtime adds to a program, how its experts run, and why.

    Args:
        f: a function of arrays, jitted or not; pass the result of jax.jit if it has static
            arguments or shardings. It is compiled, not run.
        *args: its arguments: arrays with the shardings of the real call, or
            jax.ShapeDtypeStructs with them.
        **kwargs: likewise, by keyword.

    Returns:
        An Explanation. With transport "memfd" on one node, no spare_experts, and tokens sharded as
        the group needs them, forward has no collectives, and backward only sums gradients of
        replicated weights.

    Raises:
        TypeError: f is not callable; also any error of tracing and compiling it.

    Cost: one trace and one compilation.
    """
    lower = f.lower if hasattr(f, "lower") else jax.jit(f).lower
    return explain_text(lower(*args, **kwargs).compile().as_text() or "")


def explain_text(text: str) -> Explanation:
    """Like `explain`, for the text of a compiled program."""
    program = _Program(text)
    ours, others = [], 0
    for item in program.instructions.values():
        kind = item.op.removesuffix("-start")
        if kind not in KINDS:
            continue
        found = _attribute(program, item, kind)
        if found is None:
            others += 1
        else:
            ours.append(found)
    return Explanation(tuple(ours), others, tuple(_paths(program)), jax_internals.fallback())


def _paths(program: _Program) -> list[MoEPath]:
    names = (item.op_name for item in program.instructions.values())
    ways = dict.fromkeys(way for name in names for way in scopes.ways(name))
    return [
        MoEPath(layer, way, bodies.REASONS.get(why, ""), int(spare))
        for way, why, spare, layer in ways
    ]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    op: str
    shape: str
    rest: str  # operands and attributes

    @property
    def op_name(self) -> str:
        found = _OP_NAME.search(self.rest)
        return found.group(1) if found else ""

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def place(self) -> tuple[str, str] | None:
        """Returns (op, layer) if the instruction is one of ours, else None."""
        return scopes.innermost(self.op_name)


class _Program:
    """Instructions of a compiled program by name, with their users."""

    def __init__(self, text: str) -> None:
        self.instructions: dict[str, _Instruction] = {}
        self.users: dict[str, list[_Instruction]] = {}
        self._inside: dict[str, set[str]] = {}
        for computation, item in _read(text):
            self.instructions[item.name] = item
            self._inside.setdefault(computation, set()).add(item.op)
            for operand in item.operands:
                self.users.setdefault(operand, []).append(item)

    def maps_elements(self, item: _Instruction) -> bool:
        """Whether an instruction only moves or maps elements."""
        called = _CALLS.search(item.rest)
        inside: Mapping[str, set[str]] = self._inside
        ops = {item.op} | (inside.get(called.group(1), set()) if called else set())
        return not ops & _ENDS

    def uses_maximum(self, item: _Instruction) -> bool:
        """Whether a reduction takes the largest value instead of the sum."""
        applied = _APPLIES.search(item.rest)
        return applied is not None and "maximum" in self._inside.get(applied.group(1), ())

    def reached(self, start: _Instruction) -> tuple[str, str] | None:
        """Returns (op, layer) of the first of our ops that the result of `start` reaches."""
        queue, seen = deque([start]), {start.name}
        while queue:
            for user in self.users.get(queue.popleft().name, []):
                if user.place is not None:
                    return user.place
                if user.name not in seen and self.maps_elements(user):
                    seen.add(user.name)
                    queue.append(user)
        return None


def _read(text: str) -> Iterator[tuple[str, _Instruction]]:
    """Yields (computation, instruction) for every instruction in HLO text."""
    computation = ""
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found:
            yield computation, _Instruction(*found.group("name", "op", "shape", "rest"))
        elif line.rstrip().endswith("{"):
            computation = line.split("(")[0].replace("ENTRY", "").strip().lstrip("%")


def _attribute(program: _Program, item: _Instruction, kind: str) -> Collective | None:
    place = item.place
    written = _WRITTEN.search(item.op_name) is not None
    if place is None:
        if written or kind in _SUMS:
            return None
        place = program.reached(item)
    if place is None:
        return None
    op, layer = place
    if op in _MATMUL and written and program.uses_maximum(item):
        cause, why = "amax", _AMAX
    elif op in _MATMUL:
        cause, why = _why_matmul(item, kind, written)
    else:
        cause, why = _why(op, kind, written)
    return Collective(kind, op, layer, cause, why, _bytes(item.shape), item.name)


def _why(op: str, kind: str, written: bool) -> tuple[str, str]:
    if op in _OWN and (written or kind in _SUMS):
        return "sum", _OWN[op]
    if written:
        return "own", (
            'JAX collectives move rows on transport "xla" and between nodes of a group, and plan '
            "copies of experts"
        )
    wanted = "an operand or a result is not sharded as the group needs it: token axes on its "
    return "reshard", _RESHARD.get(op, wanted + "leading dims, every other dim whole")


def _why_matmul(item: _Instruction, kind: str, written: bool) -> tuple[str, str]:
    if written and kind == "all-to-all" and scopes.COPIED in item.op_name:
        return "own", _COPIED
    # Collectives that the partitioner adds at a partitioning rule have the rule's name.
    if kind not in ("all-gather", *_SUMS):
        return "reshard", _MOVED_BEFORE
    if not written:
        return "reshard", _GATHERED_BEFORE if kind == "all-gather" else _MOVED_BEFORE
    if kind == "all-gather":
        quantized = {dtype for dtype, _ in _ARRAY.findall(item.shape)} == {"u8"}
        return "own", _GATHERED + ("; these are its 1-byte data or scales" if quantized else "")
    if "transpose(" not in item.op_name:
        return "sum", _FORWARD_SUM
    return "sum", _SCATTERED if kind == "reduce-scatter" else _BACKWARD_SUM


def _bytes(shape: str) -> int:
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        digits = re.search(r"\d+", dtype)
        bits = 8 if digits is None else int(digits.group())
        total += prod(int(size) for size in dims.split(",") if size) * bits // 8
    return total
