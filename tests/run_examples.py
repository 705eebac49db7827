"""Runs the examples of docstrings, as the reference says: after its first lines, in its order."""

from __future__ import annotations

import doctest
import sys
from typing import Any

import doc_pages

import ep_runtime as ep
from ep_runtime_client.block import linen, nnx
from ep_runtime_client.block import optax as ep_optax

START = doc_pages.ROOT / "docs/reference/index.md"
# Whom users meet first, each after those whose results it goes on from.
FIRST_MET = {
    "connect": ep.connect,
    "Session.create_group": ep.Session.create_group,
    "Group.register_layer": ep.Group.register_layer,
    "route": ep.route,
    "top_k": ep.top_k,
    "dispatch": ep.dispatch,
    "grouped_gemm": ep.grouped_gemm,
    "grouped_quantize": ep.grouped_quantize,
    "combine": ep.combine,
    "permute": ep.permute,
    "moe": ep.moe,
    "quantize_params": ep.quantize_params,
    "straight_through": ep.straight_through,
    "optax.quantizing": ep_optax.quantizing,
    "init_moe_state": ep.init_moe_state,
    "sharding.rules": ep.sharding.rules,
    "nnx.MoEBlock": nnx.MoEBlock,
    "linen.MoEBlock": linen.MoEBlock,
}


def main() -> int:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in doc_pages.blocks(START):
        if block.runs:
            exec(block.code, names)
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name, value in FIRST_MET.items():
        (test,) = finder.find(value, name, globs=names)
        runner.run(test, clear_globs=False)
        names.update(test.globs)
    names["session"].close()
    return int(runner.summarize(verbose=False).failed > 0)


if __name__ == "__main__":
    sys.exit(main())
