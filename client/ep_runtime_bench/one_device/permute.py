"""permute and unpermute: the plan, rows out of tokens and sums of rows, as share of a copy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import ep_runtime as ep
from ep_runtime_bench.base.options import BenchOptions, BenchReport
from ep_runtime_bench.base.routing import topk_idx
from ep_runtime_bench.one_device import rows as one_device_rows
from ep_runtime_bench.one_device.rows import RowSizes, Subject
from ep_runtime_client.ops.permutation import rows as permutation_rows


def run(options: BenchOptions) -> BenchReport:
    """Measures every routing that the options name."""
    subjects = functools.partial(make_subjects, options)
    return one_device_rows.run("permute", "permute and unpermute", options, subjects)


def make_subjects(options: BenchOptions, sizes: RowSizes) -> Iterator[Subject]:
    """What is measured: T * K rows of the sizes."""
    count, slots = max(1, sizes.rows // options.top_k), options.top_k
    tokens = one_device_rows.draw(0, options.dtype, count, sizes.hidden)
    weights = one_device_rows.draw(1, "float32", count, slots)
    rows = one_device_rows.draw(2, options.dtype, count * slots, sizes.hidden)
    # Each token read once, each row once.
    moved = tokens.nbytes + rows.nbytes

    def plan(choice: Any) -> Any:
        return ep.permute(tokens, choice, num_experts=options.num_experts).plan.arrays

    gradients = permutation_rows.weighed_with_products
    for routing in options.routing:
        choice = jnp.asarray(topk_idx(routing, count, options.num_experts, slots))
        arrays = jax.jit(plan)(choice)
        backward = (rows, tokens, arrays, weights)
        for name, times, program, operands in (
            ("plan", 0, plan, (choice,)),
            ("permute", 1, permutation_rows.placed, (tokens, arrays)),
            ("unpermute", 1, permutation_rows.summed, (rows, arrays)),
            ("unpermute, weighted", 1, permutation_rows.summed, (rows, arrays, weights)),
            ("its gradients", 1, gradients, backward),
        ):
            total = times * moved + (rows.nbytes if program is gradients else 0)
            yield Subject(name, routing, count * slots, total, program, operands)
