"""Code of the pages for tunix, equinox and haiku trains as it does without ours, or with dense
experts.

By command, where the Python that runs this has them; `--log-cli-level=INFO` says how far losses
differ.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import doc_pages
import numpy as np
import pytest
from child_programs import run_python

_log = logging.getLogger(__name__)
PAGE = doc_pages.ROOT / "docs/integrations/tunix.md"
SCRIPT = Path(__file__).with_name("train_tunix.py")
RUN_TIMEOUT_S = 600.0
STEPS = 10
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
COMMON: dict[str, Any] = {
    "mesh": (4, 2),  # fsdp, tp
    "dtype": "float32",
    "remat": "NONE",
    "lora": False,
    "accumulated": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "fsdp and tp": {},
    "fsdp": {"mesh": (8, 1)},
    "remat": {"remat": "DECODER"},
    "accumulation": {"accumulated": 2},
    "lora": {"lora": True},
    "bf16": {"dtype": "bfloat16"},
}


def test_lines_are_those_that_the_page_says() -> None:
    (block,) = (block for block in doc_pages.blocks(PAGE) if block.language == "python")
    lines = [line for line in block.code.splitlines() if line.strip()]
    assert f"{len(lines)} lines" in PAGE.read_text(encoding="utf-8")


def last_line(**settings: Any) -> Any:
    """Runs the script in a separate process; returns its last JSON line: mostly the losses."""
    how = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": EIGHT_DEVICES}
    done = run_python(SCRIPT, json.dumps({**COMMON, **settings}), limit_s=RUN_TIMEOUT_S, **how)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.integrations
@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_tunix(case: str) -> None:
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("google-tunix is not installed")
    assert f"google-tunix {importlib.metadata.version('google-tunix')}" in PAGE.read_text("utf-8")
    stock, mine = (last_line(**CASES[case], ours=ours) for ours in (False, True))
    assert len(stock) == STEPS
    assert stock[-1] < stock[0]
    tolerance = 1e-6 if CASES[case].get("dtype") is None else 1e-3
    apart = np.abs(np.divide(mine, stock) - 1).max()
    _log.info("%s: losses differ by %.2g of theirs at most", case, apart)
    np.testing.assert_allclose(mine, stock, rtol=tolerance, atol=0)


@pytest.mark.integrations
@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_grpo_replays_the_rollouts_experts_and_grades_todays_router() -> None:
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("google-tunix is not installed")
    found = last_line(replay=True)
    _log.info("GRPO: %s", found)
    assert found["replayed"]
    assert found["share_that_would_move"] > 0.1
    np.testing.assert_allclose(*found["losses"], atol=1e-6)
    assert found["router_gradient"] > 1e-4
    assert found["router_gradients_apart"] < 1e-5 * found["router_gradient"]


EQUINOX = doc_pages.ROOT / "docs/integrations/equinox.md"
EQUINOX_SCRIPT = Path(__file__).with_name("train_equinox.py")


def test_lines_of_equinox_are_those_that_the_page_says() -> None:
    code = "".join(block.code for block in doc_pages.blocks(EQUINOX))
    ours = [line for line in code.splitlines() if line.endswith("  # ep")]
    assert f"{len(ours)} lines" in EQUINOX.read_text(encoding="utf-8")


def losses(library: str, dtype: str, experts: str) -> list[float]:
    """Returns every step's loss of a script in a separate process, which may not warn."""
    words = ("-W", "error", str(EQUINOX_SCRIPT), library, dtype, experts)
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
        EQUINOX.read_text(encoding="utf-8").split()
    )
    stock, mine = (losses(library, dtype, experts) for experts in ("dense", "ours"))
    assert stock[-1] < stock[0]
    apart = np.abs(np.divide(mine, stock) - 1).max()
    _log.info("%s, %s: losses differ by %.2g of the dense ones at most", library, dtype, apart)
    np.testing.assert_allclose(mine, stock, rtol=tolerance, atol=0)
