"""The page of results: which rows its tables take from files of `bench --save`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import doc_pages
import pytest


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, for a folder without rows."""
    monkeypatch.syspath_prepend(str(doc_pages.ROOT / "docs"))
    module = importlib.import_module("results_page")
    monkeypatch.setattr(module, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    return module


def save(page: Any, date: str, **times: float) -> None:
    """A run of `bench train` on two H100s: milliseconds by subject."""
    for subject, ms in times.items():
        row = {"model": "8-layers", "subject": subject.replace("_", " "), "step_ms": ms}
        run: dict[str, Any] = {"date": date, "command": f"bench {date}", "bench": "train"}
        run |= {"devices": 2, "versions": {"jax": "0.11.2"}, "rows": [row]}
        run["machine"] = {"gpus": ["NVIDIA H100 80GB HBM3"] * 8, "driver": "580"}
        (page.DOCS / f"results/{date}-{subject}.json").write_text(json.dumps(run))


def test_a_newer_run_takes_the_place_of_an_older_one(page: Any) -> None:
    save(page, "2026-01-02", nvlink=10.0, torch=15.0)
    save(page, "2026-01-01", nvlink=20.0, torch=60.0, stock_padded=50.0)
    lines = page.page().splitlines()
    assert [line for line in lines if line.startswith("| 2x H100")] == [
        "| 2x H100 | 8-layers | ep-runtime | 10.0 | - | - | - | - | - | - |",
        "| 2x H100 | 8-layers | PyTorch | 15.0 | - | - | - | - | - | 1.50 |",
        "| 2x H100 | 8-layers | plain JAX, padded | 50.0 | - | - | - | - | - | 2.50 |",
    ]
    assert [line for line in lines if line.startswith("## ")] == ["## Beside PyTorch and plain JAX"]


def test_a_run_without_a_peer_takes_no_place_beside_one(page: Any) -> None:
    save(page, "2026-01-01", nvlink=20.0, torch=60.0)
    save(page, "2026-01-02", nvlink=10.0, **{"nvlink fp8 weights once": 8.0})
    text = page.page()
    assert "| ep-runtime | 20.0 |" in text
    assert "| ep-runtime fp8 weights once | 8.0 | - | 0.80 |" in text
