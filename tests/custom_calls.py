"""Counts our custom calls in a program: as JAX traced it, and as XLA compiled it.

The two must agree: a call more is work done twice, a call less is a call merged with another one
or dropped. Calls are told apart by their target: what XLA's partitioner spreads is traced with
other shapes. One in a loop counts once per trip, where the compiler knows the number of trips.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hlo_scan
import jax
from jax.extend import core

from ep_runtime_client.ops.tracing import scopes

Calls = Counter[str]  # target: how often a device runs it

_OURS = "ep_"
_TARGET = re.compile(r'custom_call_target="(ep_\w+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
# These ops repeat the name of the call that they belong to.
_ENDS = ("async-update", "async-done")


def traced(jaxpr: Any, platform: str) -> Calls:
    """Counts the calls of a jaxpr whose program is lowered for `platform`, "cpu" or "cuda".

    What nothing uses has to be left out of it, as `jax.jit` does.
    """
    found: Calls = Counter()
    for times, _, eqn in _calls_in(jaxpr, platform):
        found[eqn.params["target_name"]] += times
    return found


def unheld(jaxpr: Any, platform: str) -> set[str]:
    """Returns targets of calls whose results anything but an optimization barrier reads."""
    found = set()
    for _, around, eqn in _calls_in(jaxpr, platform):
        results = {*eqn.outvars}
        users = [e for e in around.eqns if not results.isdisjoint(_variables(e.invars))]
        free = any(user.primitive.name != "optimization_barrier" for user in users)
        if free or not results.isdisjoint(_variables(around.outvars)):
            found.add(eqn.params["target_name"])
    return found


def compiled(text: str) -> Calls:
    """Counts the calls of a compiled module."""
    return _calls_of(hlo_scan.computations(text), hlo_scan.entry_name(text), {})


def without_scope(text: str) -> list[str]:
    """Returns op names of calls that no profile would show as part of one of our ops."""
    lines = [line for line in text.splitlines() if _TARGET.search(line)]
    names = [found[1] if (found := _OP_NAME.search(line)) else line for line in lines]
    return [name for name in names if scopes.innermost(name) is None]


def differences(before: Calls, after: Calls) -> list[str]:
    """Returns a line for each call that runs more or less often than it was traced."""
    return [
        f"{key}: {before[key]} traced, {after[key]} compiled"
        for key in sorted({*before, *after})
        if before[key] != after[key]
    ]


def _calls_in(jaxpr: Any, platform: str, times: int = 1) -> Iterator[tuple[int, core.Jaxpr, Any]]:
    """Yields (count, enclosing jaxpr, equation) for each of our calls."""
    around = _inside(jaxpr)
    for eqn in around.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "ffi_call" and params["target_name"].startswith(_OURS):
            yield times, around, eqn
        elif name == "cond" and params.get("branches_platforms"):
            yield from _calls_in(_branch_of(params, platform), platform, times)
        elif name == "ep_partitioned":
            # A rule shows whole arrays. A device's blocks are those of its shard_map, as long as
            # weights are sharded over ep only.
            given = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
            mapped = jax.make_jaxpr(params["mapped"])(*given)
            yield from _calls_in(mapped, platform, times)
        else:
            trips = params["length"] if name == "scan" else 1
            if name == "ep_unless_unused":
                params = {"runs": params["ways"][0]}
            for inner in _jaxprs(params):
                yield from _calls_in(inner, platform, times * trips)


def _variables(atoms: Any) -> set[Any]:
    return {atom for atom in atoms if isinstance(atom, core.Var)}


def _calls_of(
    every: dict[str, list[hlo_scan.Instruction]], name: str, known: dict[str, Calls]
) -> Calls:
    if name in known:
        return known[name]
    found: Calls = Counter()
    for item in every[name]:
        target = _TARGET.search(item.line)
        if target:
            found[target[1]] += 1
            continue
        if item.op in _ENDS:
            continue
        trips = _TRIPS.search(item.line) if item.op == "while" else None
        called = _CALLED.findall(item.line)
        for branches in _BRANCHES.findall(item.line):
            called += [each.strip().lstrip("%") for each in branches.split(",")]
        for inner in called:
            for key, count in _calls_of(every, inner, known).items():
                found[key] += count * (int(trips[1]) if trips else 1)
    known[name] = found
    return found


def _branch_of(params: dict[str, Any], platform: str) -> Any:
    """Returns the branch for a platform; None stands for all platforms without a branch."""
    for names, branch in zip(params["branches_platforms"], params["branches"], strict=True):
        if names is None or platform in names:
            return branch
    raise AssertionError(f"no branch for {platform} in {params['branches_platforms']}")


def _inside(jaxpr: Any) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in jax.tree.leaves([*params.values()], is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)
