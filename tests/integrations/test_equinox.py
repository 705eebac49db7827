"""The code of the page for equinox and haiku runs, and trains as with dense experts.

By command, where the Python that runs this has them; `--log-cli-level=INFO` says how far losses
differ.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
from pathlib import Path

import doc_pages
import numpy as np
import pytest
from child_programs import run_python

_log = logging.getLogger(__name__)
PAGE = doc_pages.ROOT / "docs/integrations/equinox.md"
SCRIPT = Path(__file__).with_name("train_equinox.py")
RUN_TIMEOUT_S = 600.0
STEPS = 10


def test_lines_are_those_that_the_page_says() -> None:
    code = "".join(block.code for block in doc_pages.blocks(PAGE))
    ours = [line for line in code.splitlines() if line.endswith("  # ep")]
    assert f"{len(ours)} lines" in PAGE.read_text(encoding="utf-8")


def losses(library: str, dtype: str, experts: str) -> list[float]:
    """Every step's loss, of a process of its own; no warning may come up in it."""
    words = ("-W", "error", str(SCRIPT), library, dtype, experts)
    done = run_python(*words, limit_s=RUN_TIMEOUT_S, JAX_PLATFORMS="cpu")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == STEPS
    return found


@pytest.mark.integrations
@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-3)])
@pytest.mark.parametrize(("library", "package"), [("equinox", "equinox"), ("haiku", "dm-haiku")])
def test_losses_are_those_of_dense_experts(
    library: str, package: str, dtype: str, tolerance: float
) -> None:
    if importlib.util.find_spec("equinox") is None or importlib.util.find_spec(library) is None:
        pytest.skip(f"{package} is not installed, or equinox")
    assert f"{package} {importlib.metadata.version(package)}" in " ".join(
        PAGE.read_text(encoding="utf-8").split()
    )
    stock, mine = (losses(library, dtype, experts) for experts in ("dense", "ours"))
    assert stock[-1] < stock[0]
    apart = np.abs(np.divide(mine, stock) - 1).max()
    _log.info("%s, %s: losses differ by %.2g of the dense ones at most", library, dtype, apart)
    np.testing.assert_allclose(mine, stock, rtol=tolerance, atol=0)
