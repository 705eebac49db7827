"""Runs the examples of docstrings after the reference's first lines and in its order."""

from __future__ import annotations

import doctest
import sys
from typing import Any

import doc_pages
from public_names import PUBLIC

START = doc_pages.ROOT / "docs/reference/index.md"
# In the order in which users meet them; each comes after examples whose results it needs.
FIRST_MET = ["connect", "Session.create_group", "Group.register_layer", "route", "top_k"]
FIRST_MET += ["dispatch", "grouped_gemm", "grouped_quantize", "combine", "permute", "moe"]
FIRST_MET += ["quantize_params", "straight_through", "optax.quantizing", "init_moe_state"]
FIRST_MET += ["sharding.rules", "nnx.MoEBlock", "linen.MoEBlock"]


def main() -> int:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in doc_pages.blocks(START):
        if block.runs:
            exec(block.code, names)
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    values = {item.name: item.value for item in PUBLIC}
    for name in FIRST_MET:
        (test,) = finder.find(values[name], name, globs=names)
        runner.run(test, clear_globs=False)
        names.update(test.globs)
    names["session"].close()
    return int(runner.summarize(verbose=False).failed > 0)


if __name__ == "__main__":
    sys.exit(main())
