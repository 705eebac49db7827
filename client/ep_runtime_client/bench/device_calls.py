"""What `bench dispatch combine` times on GPUs, in each process that takes part.

Programs depend on names and sizes alone, so each is compiled once and serves every group of its
precision, whatever its blocks and the routing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import ep_runtime as ep
from ep_runtime import env
from ep_runtime_client.bench import device_ops, device_stock, device_time, routing
from ep_runtime_client.bench.device_bench import (
    AXIS,
    ROWS,
    Bench,
    Operands,
    alone,
    meeting,
    start_gpus,
    token_rows,
)
from ep_runtime_client.bench.options import CEILING, LIKE, STOCK, BenchOptions, DeviceSample
from ep_runtime_client.cli import render
from ep_runtime_client.groups import Group
from ep_runtime_client.layers import EpLayer
from ep_runtime_client.members import Member
from ep_runtime_client.ops.calls import world_rank
from ep_runtime_client.ops.plan import Dispatched
from ep_runtime_client.ops.prepare import make_call

CALLS = 10  # of one program
SLOW_CALLS = 2  # of transports that take tens of milliseconds
SLOW_REPEATS = 3
PAIR_TOKENS = 512  # a pair is timed up to here: what decoding has
OP_TIMEOUT_S = 60.0


def measure(options: BenchOptions, address: str, member: Member) -> list[DeviceSample]:
    """Every transport and case; the same order in every process."""
    mesh = start_gpus(options, member)
    with ep.connect(address) as session:
        together = meeting(mesh) if member.processes > 1 else alone
        return measure_all(Bench(options, session, mesh, device_time.gpu_clock, together))


def measure_all(bench: Bench) -> list[DeviceSample]:
    """The clock alone, then every transport in turn."""
    options = bench.options
    for transport in options.transports:
        if transport == "xla":
            _measure_or_say(transport, bench, lambda: _measure_group(bench, "xla", "fast", 0))
            continue
        for precision in options.precision:
            for sms in options.sms:
                env.set_num_sms(sms)
                _measure_group(bench, transport, precision, sms)
    if options.stock:
        _measure_or_say(STOCK, bench, lambda: device_stock.measure(bench))
    return bench.samples


def _measure_or_say(name: str, bench: Bench, measure: Callable[[], None]) -> None:
    """Figures to compare with; where XLA cannot give them, ours stand alone."""
    try:
        measure()
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        if bench.options.processes > 1:
            raise  # the other processes may be in a collective
        render.err(f"{name} gives no more figures: {error}")


def _measure_group(bench: Bench, transport: str, precision: str, sms: int) -> None:
    """All sizes and routings on one group."""
    options = bench.options
    settings: dict[str, Any] = {
        "num_experts": options.num_experts,
        "hidden_size": options.hidden,
        "max_tokens_per_rank": max(options.tokens),
        "max_top_k": options.top_k,
        "max_token_dtype": options.dtype,
        "combine_precision": precision,
        "transport": transport,
        "op_timeout_s": OP_TIMEOUT_S,
    }
    name = f"bench-{transport}"
    group = bench.session.create_group(name, bench.mesh, ep_axis=AXIS, replace=True, **settings)
    layer = group.register_layer("layer", top_k=options.top_k)
    for tokens in options.tokens:
        size = _Size(bench, group, layer, tokens, sms)
        for routed in options.routing:
            size.measure(routed)
    group.close()


class _Size:
    """One number of tokens on one group."""

    def __init__(self, bench: Bench, group: Group, layer: EpLayer, tokens: int, sms: int) -> None:
        self._bench, self._layer, self._tokens, self._sms = bench, layer, tokens, sms
        self._transport, self._precision = group.spec.transport, group.spec.combine_precision
        self._slow = self._transport == "xla"
        lead = (tokens * bench.mesh.size,)
        self._call = make_call(layer, bench.mesh, lead, (ROWS,), handle=0, capacity=None)
        self._ops = device_ops.our_ops(self._call)
        self._x = token_rows(bench, tokens)
        self._blocks: dict[str, int] = {}

    def measure(self, routed: str) -> None:
        """Every op with that routing."""
        bench = self._bench
        idx = bench.idx(self._tokens, routed)
        operands, plan = self._operands(idx)
        if not bench.samples:
            self._add("clock", "clock", "", self._kernel_us("clock", device_time.nothing, operands))
        if bench.with_ceiling and not self._slow:
            self._ceilings(routed, operands, idx)
        for op in self._wanted():
            kernel_us = self._kernel_us(op, self._ops[op], operands)
            step = self._step(op, operands, plan)
            step_s = [] if step is None else bench.host_s(step, 2 * self._repeats)
            self._add(op, self._transport, routed, kernel_us, step_s)

    def _wanted(self) -> Iterator[str]:
        """Names of the ops to time: what blocks or precision do not change, once."""
        options = self._bench.options
        first_sms = self._slow or self._sms == options.sms[0]
        first_precision = self._slow or self._precision == options.precision[0]
        if first_sms and first_precision:
            yield "prepare"
        if "dispatch" in options.benches and first_precision:
            yield "dispatch"
        if "combine" in options.benches:
            yield "combine"
        if not first_sms:
            return
        if {"dispatch", "combine"} <= {*options.benches} and self._tokens <= PAIR_TOKENS:
            yield "pair"
        yield from (op for op in options.also if op != "combine_bwd" or first_precision)

    @property
    def _repeats(self) -> int:
        repeats = self._bench.options.repeats
        return min(repeats, SLOW_REPEATS) if self._slow else repeats

    def _program(self, what: str, make: Callable[[], Callable[..., Any]]) -> Any:
        key = (what, self._transport, self._precision, self._tokens)
        return self._bench.program(key, make)

    def _token(self) -> jax.Array:
        return world_rank(self._call.group)

    def _kernel_us(self, what: str, op: device_time.DeviceOp, operands: Operands) -> list[float]:
        bench, gate = self._bench, self._ops["prepare"]
        calls = SLOW_CALLS if self._slow else CALLS
        body = device_time.chain(bench.clock, self._token, gate, op, calls)
        program = self._program(what, lambda: bench.mapped(body))
        return bench.device_us(program, operands, self._repeats)

    def _operands(self, idx: routing.Ints) -> tuple[Operands, Any]:
        """What the ops take per device, and the plan as the public functions have it."""
        bench, layer = self._bench, self._layer
        share = np.full(idx.shape, 1.0 / idx.shape[1], np.float32)
        operands = {"idx": bench.put(idx), "weights": bench.put(share), "x": self._x}
        prepare = self._program("ep.prepare", lambda: functools.partial(ep.prepare, layer))
        plan = prepare(operands["idx"])
        send = self._program("ep.dispatch", lambda: functools.partial(_dispatch, layer))
        rows, row_weights = send(self._x, operands["weights"], plan)
        arrays = {"plan": tuple(plan.arrays), "rows": rows, "row_weights": row_weights}
        return operands | arrays, plan

    def _step(self, op: str, operands: Operands, plan: Any) -> Callable[[], object] | None:
        """One call through the public function; None for what is called by gradients alone."""
        layer = self._layer
        steps: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "prepare": (ep.prepare, (operands["idx"],)),
            "dispatch": (_dispatch, (operands["x"], operands["weights"], plan)),
            "combine": (_combine, (operands["rows"], None, plan)),
            "combine_weighted": (_combine, (operands["rows"], operands["row_weights"], plan)),
            "pair": (_pair, (operands["x"], operands["weights"], plan)),
        }
        if op not in steps:
            return None
        function, given = steps[op]
        program = self._program(f"ep.{op}", lambda: functools.partial(function, layer))
        return lambda: program(*given)

    def _ceilings(self, routed: str, operands: Operands, idx: routing.Ints) -> None:
        """What the link gives on as many blocks as each op has."""
        bench = self._bench
        where = routing.destinations(idx, bench.mesh.size, bench.options.num_experts)
        to = {name: bench.put(x) for name, x in zip(("dst_rank", "dst_row"), where, strict=True)}
        for like in ("dispatch", "combine"):
            if like not in bench.options.benches:
                continue
            copy = device_ops.ceiling(self._call, like)
            once = functools.partial(bench.mapped, self._once(copy))
            count = self._program(f"blocks of {like}", once)
            found = count(operands | to).addressable_shards[0].data
            self._blocks[like] = int(np.asarray(found)[0])
            kernel_us = self._kernel_us(f"ceiling of {like}", copy, operands | to)
            self._add(like, CEILING, routed, kernel_us)

    def _once(self, op: device_time.DeviceOp) -> Callable[[Operands], Any]:
        return lambda operands: op(self._token(), operands)

    def _add(
        self, op: str, subject: str, routed: str, kernel_us: list[float], step_s: Any = ()
    ) -> None:
        blocks = self._blocks.get(LIKE.get(op, ""), 0)
        case = (op, subject, self._tokens, routed, self._precision, self._sms, blocks)
        self._bench.add(DeviceSample(*case, kernel_us, [*step_s]))


def _dispatch(layer: EpLayer, x: Any, weights: Any, plan: Any) -> tuple[jax.Array, jax.Array]:
    sent = ep.dispatch(layer, x, None, weights, plan=plan)
    return sent.tokens, sent.weights


def _combine(layer: EpLayer, rows: Any, weights: Any, plan: Any) -> jax.Array:
    # Of what a dispatch returned, combine reads the plan alone.
    sent = Dispatched(rows, rows[..., 0], plan.arrays.group_sizes, plan.arrays.num_recv, plan)
    return ep.combine(layer, sent, rows, weights=weights)


def _pair(layer: EpLayer, x: Any, weights: Any, plan: Any) -> jax.Array:
    sent = ep.dispatch(layer, x, None, weights, plan=plan)
    return ep.combine(layer, sent, sent.tokens)
