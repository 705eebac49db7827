"""The calls that `bench dispatch combine` times on GPUs, in each of its processes.

All programs are compiled first, then measured case by case. Each case has its own programs, because
a CUDA graph that XLA recorded would continue with the group and the blocks of its recording.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime_bench.base import device_bench, routing
from ep_runtime_bench.base.device_bench import (
    AXIS,
    ROWS,
    Bench,
    Operands,
    Program,
    alone,
    meeting,
    token_rows,
)
from ep_runtime_bench.base.options import CEILING, PLAIN, BenchOptions, DeviceSample
from ep_runtime_bench.movement import device_ops
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.cli import render
from ep_runtime_client.groups.group import Group
from ep_runtime_client.jobs.members import Member, start_jax
from ep_runtime_client.ops.calls.call import Call, world_rank
from ep_runtime_client.ops.calls.plan import Dispatched, Plan, arrays_type
from ep_runtime_client.ops.movement.prepare import make_call
from ep_runtime_client.ops.transports import nodes_plan

CALLS = 10  # of one program
SLOW_CALLS = 2  # of transports that take tens of milliseconds
SLOW_REPEATS = 3
PAIR_TOKENS = 512  # pairs are timed up to this many tokens, as in decoding
OP_TIMEOUT_S = 60.0
_CLOCK = "clock"


def measure(options: BenchOptions, address: str, member: Member) -> list[DeviceSample]:
    """Measures every transport and case, in the same order in every process."""
    start_jax(options.devices, member, "gpu")
    with ep.connect(address) as session:
        mesh = Mesh(np.array(jax.devices("gpu")[: options.devices]), (AXIS,))
        together = meeting(mesh) if member.processes > 1 else alone
        return measure_all(Bench(options, session, mesh, device_bench.gpu_clock, together))


def measure_all(bench: Bench) -> list[DeviceSample]:
    """Compiles and measures our ops, then their peers."""
    options = bench.options
    groups = [*_groups(options)]
    leads: dict[bool, int] = {}  # plans over nodes have more arrays, so they need other operands
    for number, (transport, _) in enumerate(groups):
        leads.setdefault(transport == "nccl", number)
    rounds = [_Round(bench, *group, lead=i in leads.values()) for i, group in enumerate(groups)]
    for one in rounds:
        one.compile()
    bench.programs.wait()
    bench.say("programs are compiled")
    known: dict[tuple[Any, ...], Operands] = {}
    for one in rounds:
        one.measure(known)
        one.close()
    known.clear()
    return bench.samples


def _groups(options: BenchOptions) -> Iterator[tuple[str, str]]:
    """Yields (transport, precision) of every group."""
    for transport in options.transports:
        if transport == "xla":
            yield transport, "fast"
        else:
            yield from ((transport, precision) for precision in options.precision)


class _Round:
    """Measures groups that differ only in their number of SMs, one after the other."""

    def __init__(self, bench: Bench, transport: str, precision: str, *, lead: bool) -> None:
        self.transport = transport
        self._lead = lead
        self._bench, self._precision = bench, precision
        self._sms = (0,) if transport in ("xla", "nccl") else bench.options.sms
        self._cases: list[_Case] = []
        self._opened: tuple[int, Group] | None = None

    def open(self, sms: int) -> EpLayer:
        """Returns the layer of a group with that number of SMs."""
        if self._opened is not None and self._opened[0] == sms:
            layer = self._opened[1].layer("layer")
            assert isinstance(layer, EpLayer)  # registered below
            return layer
        self.close()
        bench, options = self._bench, self._bench.options
        settings: dict[str, Any] = {
            "num_experts": options.num_experts,
            "hidden_size": options.hidden,
            "max_tokens_per_rank": max(options.tokens),
            "max_top_k": options.top_k,
            "max_token_dtype": options.dtype,
            "combine_precision": self._precision,
            "transport": self.transport,
            "op_timeout_s": OP_TIMEOUT_S,
            "num_sms": sms or None,
        }
        name = f"bench-{self.transport}-{self._precision}"
        group = bench.session.create_group(name, bench.mesh, ep_axis=AXIS, **settings)
        self._opened = (sms, group)
        return group.register_layer("layer", top_k=options.top_k)

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
        self._opened = None

    def compile(self) -> None:
        """Starts to compile every case; programs depend on names and sizes, but not on SMs."""
        layer = self.open(self._sms[0])
        for sms in self._sms:
            for tokens in self._bench.options.tokens:
                first = sms == self._sms[0]
                lead = first and self._lead
                self._cases.append(_Case(self._bench, layer, tokens, sms, first, lead))
                self._cases[-1].compile()

    def measure(self, known: dict[tuple[Any, ...], Operands]) -> None:
        """Measures every case with every routing; `known` saves operands for later cases."""
        for case in self._cases:
            self.open(case.sms)
            for name in self._bench.options.routing:
                key = (case.tokens, name, self.transport == "nccl")
                if key not in known:
                    known[key] = case.operands(name)
                case.measure(name, known[key])


@dataclasses.dataclass
class _Case:
    """One number of tokens on one group.

    Attributes:
        sms: number of SMs of the group.
        first: whether it is the first number of SMs, which also times ops that SMs do not affect.
        lead: whether it is in the first group, which makes the operands that all cases share.
    """

    bench: Bench
    layer: EpLayer
    tokens: int
    sms: int
    first: bool
    lead: bool

    def __post_init__(self) -> None:
        spec, mesh = self.layer.group_spec, self.bench.mesh
        self._transport, self._precision = spec.transport, spec.combine_precision
        lead = (self.tokens * mesh.size,)
        self._call = make_call(self.layer, mesh, lead, (ROWS,), handle=0, capacity=None)
        self._ops = device_ops.our_ops(self._call)
        self._slow = self._transport in ("xla", "nccl")

    def compile(self) -> None:
        """Starts to compile all programs of this case."""
        given = self._abstract()
        for name, (function, needs) in self._programs().items():
            operands = {key: given[key] for key in needs}
            self.bench.programs.add((self._key, name), function, operands)

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self._transport, self._precision, self.tokens, self.sms)

    def _run(self, name: str) -> Program:
        return self.bench.programs[self._key, name]

    def _wanted(self) -> list[str]:
        """Returns names of the ops to time; only once if SMs or precision do not affect them."""
        options = self.bench.options
        once = self._slow or self._precision == options.precision[0]
        found = ["prepare"] * (self.first and once)
        found += ["dispatch"] * ("dispatch" in options.benches and once)
        found += ["combine"] * ("combine" in options.benches)
        if self.first:
            both = {"dispatch", "combine"} <= {*options.benches}
            found += ["pair"] * (both and self.tokens <= PAIR_TOKENS)
        return found

    @property
    def _ceilings(self) -> list[str]:
        """Ops whose ceiling to measure, once for all precisions."""
        known = self._precision != self.bench.options.precision[0]
        if self._slow or known or not self.bench.with_ceiling:
            return []
        return [op for op in self._wanted() if op in ("dispatch", "combine")]

    @property
    def _plain(self) -> bool:
        """Whether to time NCCL's own all-to-all here, once for all precisions."""
        return self._transport == "nccl" and self._precision == self.bench.options.precision[0]

    def _programs(self) -> dict[str, tuple[Program, tuple[str, ...]]]:
        """Returns by name: a function of operands, and the names of its operands."""
        bench, call = self.bench, self._call
        found: dict[str, tuple[Program, tuple[str, ...]]] = {}
        chained = {op: self._ops[op] for op in self._wanted()}
        for op in self._ceilings:
            copy = chained[f"{CEILING} {op}"] = device_ops.ceiling(call, op)
            once = bench.mapped(lambda given, copy=copy: copy(world_rank(call.group), given))  # type: ignore[misc]
            found[f"blocks {op}"] = (once, device_ops.NEEDS[CEILING])
        if self._plain:
            chained[PLAIN] = device_ops.plain_exchange(call)
        if self.lead:
            chained[_CLOCK] = device_bench.nothing
        calls = SLOW_CALLS if self._slow else CALLS
        for name, timed in chained.items():
            token = lambda: world_rank(call.group)  # noqa: E731
            hold_ns = device_bench.LONG_HOLD_NS if self._slow else device_bench.HOLD_NS
            gate = self._ops["prepare"]
            body = device_bench.chain(bench.clock, token, gate, timed, calls, hold_ns)
            needs = device_ops.NEEDS[name.split()[0]]
            found[f"{name} chain"] = (bench.mapped(body), tuple({*needs, "idx"}))
        steps = {*self._wanted()} if self.first else set()
        if self.lead:
            steps |= {"prepare", "dispatch"}
        for name, function in self._steps().items():
            if name in steps:
                found[name] = (function, device_ops.NEEDS[name])
        return found

    def _steps(self) -> dict[str, Program]:
        """Returns the public functions, as functions of operands."""
        layer, meta = self.layer, self._call.meta

        def plan(given: Operands) -> Plan:
            return Plan(arrays_type(layer.group_spec)(*given["plan"]), meta)

        def dispatch(given: Operands) -> Any:
            return ep.dispatch(layer, given["x"], None, given["weights"], plan=plan(given))

        def combine(given: Operands) -> Any:
            # combine reads only the plan of a dispatch's result.
            rows, arrays = given["rows"], arrays_type(layer.group_spec)(*given["plan"])
            num_recv = arrays.num_recv.reshape(-1)
            sent = Dispatched(rows, rows[..., 0], arrays.group_sizes, num_recv, plan(given))
            return ep.combine(layer, sent, rows)

        def pair(given: Operands) -> Any:
            sent = dispatch(given)
            return ep.combine(layer, sent, sent.tokens)

        return {
            "prepare": lambda given: ep.prepare(layer, given["idx"]).arrays,
            "dispatch": lambda given: dispatch(given).tokens,
            "combine": combine,
            "pair": pair,
        }

    def _abstract(self) -> Operands:
        """Describes operands to compile for."""
        options, ranks = self.bench.options, self.bench.mesh.size
        count, capacity = self.tokens * ranks, self._call.capacity
        array, dtype = self.bench.abstract, jnp.dtype(options.dtype)
        prepare = lambda idx: ep.prepare(self.layer, idx).arrays  # noqa: E731
        idx = array(count, options.top_k)
        plan = jax.eval_shape(prepare, idx)
        return {
            "idx": idx,
            "x": array(count, options.hidden, dtype=dtype),
            "weights": array(count, options.top_k, dtype=jnp.float32),
            "plan": tuple(array(*part.shape) for part in plan),
            "rows": array(ranks, capacity, options.hidden, dtype=dtype),
            "dst_rank": array(count, ranks),
            "dst_row": array(count, ranks),
            "blocks": array(*_network_shape(self.bench, self.tokens), dtype=dtype),
        }

    def operands(self, name: str) -> Operands:
        """Makes the operands of every op for that routing; all transports share them."""
        bench, options = self.bench, self.bench.options
        idx = bench.idx(self.tokens, name)
        dst_rank, dst_row = routing.destinations(idx, bench.mesh.size, options.num_experts)
        given: dict[str, Any] = {
            "idx": bench.put(idx),
            "x": token_rows(bench, self.tokens),
            "weights": bench.put(np.full(idx.shape, 1.0 / idx.shape[1], np.float32)),
            "dst_rank": bench.put(dst_rank),
            "dst_row": bench.put(dst_row),
        }
        if self._plain:
            blank = functools.partial(jnp.zeros, _network_shape(bench, self.tokens), options.dtype)
            given["blocks"] = jax.jit(blank, out_shardings=bench.spread)()
        given["plan"] = tuple(self._run("prepare")(_only(given, "prepare")))
        given["rows"] = self._run("dispatch")(_only(given, "dispatch"))
        return given

    def measure(self, name: str, given: Operands) -> None:
        """Measures every op with that routing."""
        if not self.bench.samples:
            self._add(_CLOCK, _CLOCK, "", self._kernel_us(_CLOCK, given))
        if self._plain and name == self.bench.options.routing[0]:
            self._add("dispatch", PLAIN, name, self._kernel_us(PLAIN, given))
        for op in self._ceilings:
            counted = self._run(f"blocks {op}")(_only(given, CEILING))
            blocks = int(np.asarray(counted.addressable_shards[0].data)[0])
            self.bench.blocks[op, self.sms] = blocks
            self._add(op, CEILING, name, self._kernel_us(f"{CEILING} {op}", given))
        for op in self._wanted():
            try:
                self._measure_op(op, name, given)
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                # Report ours without a peer's, unless other processes may be in a collective.
                if not self._slow or self.bench.options.processes > 1:
                    raise
                render.err(f"no figures of {op} on {self._transport}: {error}")
        # A failed call ends at once and leaves NaN, so its time would look good.
        self.layer.group.check()

    def _measure_op(self, op: str, name: str, given: Operands) -> None:
        kernel_us = self._kernel_us(op, given)
        step_s: list[float] = []
        if self.first and op in self._steps():
            step_s = self.bench.host_s(self._run(op), _only(given, op), 2 * self._repeats)
        counted = self._transport == "nccl" and op == "dispatch"
        network = _network_rows(self.bench, self._call, given) if counted else (0, 0)
        self._add(op, self._transport, name, kernel_us, step_s, network)

    @property
    def _repeats(self) -> int:
        repeats = self.bench.options.repeats
        return min(repeats, SLOW_REPEATS) if self._slow else repeats

    def _kernel_us(self, name: str, given: Operands) -> list[float]:
        operands = _only(given, name.split()[0]) | {"idx": given["idx"]}
        return self.bench.device_us(self._run(f"{name} chain"), operands, self._repeats)

    def _add(
        self,
        op: str,
        subject: str,
        name: str,
        kernel_us: list[float],
        step_s: Any = (),
        network: tuple[int, int] = (0, 0),
    ) -> None:
        blocks = self.bench.blocks.get((op, self.sms), 0)
        case = (op, subject, self.tokens, name, self._precision, self.sms, blocks)
        self.bench.add(DeviceSample(*case, kernel_us, [*step_s], *network))


def _only(given: Operands, name: str) -> dict[str, Any]:
    """Returns the operands of that op, of CEILING or of the clock."""
    return {key: given[key] for key in device_ops.NEEDS[name]}


def _network_shape(bench: Bench, tokens: int) -> tuple[int, int, int]:
    """Returns [N * N, rows, H]: equal blocks with as many rows crossing as in one dispatch."""
    options, ranks = bench.options, bench.mesh.size
    idx = bench.idx(tokens, options.routing[0])
    remote = routing.traffic(idx, ranks, options.num_experts).remote_rows_per_rank
    return ranks * ranks, max(1, -(-round(remote) // max(ranks - 1, 1))), options.hidden


def _network_rows(bench: Bench, call: Call, given: Operands) -> tuple[int, int]:
    """Returns the rows that one dispatch sends between nodes, and the fewest needed.

    (0, 0) in a job of several processes, because none has the plans of all.
    """
    if bench.options.processes > 1:
        return 0, 0
    sent, least = nodes_plan.network_rows(call, arrays_type(call.group)(*given["plan"]))
    bench.say(f"nccl: a dispatch sends {sent} rows between nodes, {least} would do")
    return sent, least
