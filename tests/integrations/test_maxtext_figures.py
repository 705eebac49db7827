"""MaxText's paths and ours are measured in one run, and a path that fails reports why.

The run itself is by command, as in test_maxtext.py.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from child_programs import run_python
from integrations import maxtext_figures, maxtext_sources

SCRIPT = Path(__file__).with_name("maxtext_figures.py")
RUN_TIMEOUT_S = 1200.0
VARIANTS = {each.name: each for each in maxtext_figures.VARIANTS}
SMALL = "--layers 2 --hidden 64 --inner 64 --experts 16 --top-k 2 --sequence 64 --tokens 128"


def test_rows_tell_median_rate_and_memory() -> None:
    seconds = [9.0] * maxtext_figures.WARM_STEPS + [0.3, 0.1, 0.2]
    held = {"xla_bytes": 3 << 29, "runtime_bytes": None}
    row = maxtext_figures.row_of(
        VARIANTS["dense"], {"seconds": seconds, "loss": 1.0, **held}, tokens=50
    )
    figures = ("ms", "min_ms", "tokens_per_s", "xla_gib", "runtime_gib")
    assert [row[key] for key in figures] == [200.0, 100.0, 250, 1.5, None]


def test_every_row_is_beside_the_fastest_of_theirs() -> None:
    rows = [{"name": "ours", "ms": 50.0}, {"name": "dense", "ms": 200.0}]
    rows += [{"name": "ring", "ms": 100.0}, {"name": "ragged", "says": "out of memory"}]
    found = maxtext_figures.beside_theirs(rows)
    assert [row.get("times_best") for row in found] == [2.0, 0.5, 1.0, None]
    assert maxtext_figures.beside_theirs(rows[:1]) == rows[:1]


def test_a_file_that_is_no_wheel_or_of_another_release_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "maxtext.whl"
    wheel.touch()
    with pytest.raises(ValueError, match=r"maxtext\.whl is no wheel: `pip download"):
        maxtext_sources.patched_copy(wheel, tmp_path / "to")
    with zipfile.ZipFile(wheel, "w") as written:
        written.writestr(maxtext_sources.CONFIG, "megablox: true\n")
    with pytest.raises(ValueError, match=r"patch of maxtext.md does not apply.*error: "):
        maxtext_sources.patched_copy(wheel, tmp_path / "to")


def test_stand_ins_are_imported_called_and_derived_from() -> None:
    uses = """
from integrations import maxtext_stubs
maxtext_stubs.install()
import google.cloud.storage, google.protobuf.message
from tensorflow.io import gfile
import transformers
class Mine(transformers.PreTrainedTokenizer[int]): pass
Mine(1).encode("text")
gfile.exists("nowhere")
assert google.protobuf.message.__file__
"""
    run_python("-c", uses)


@pytest.mark.integrations
@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_a_small_run_has_every_path_in_one_table() -> None:
    given = os.environ.get("TEST_MAXTEXT")
    if not given:
        pytest.skip("TEST_MAXTEXT does not name a wheel of MaxText")
    words = f"{SMALL} --vocab 256 --steps 2 --paths ours,dense,ring,ragged -o json"
    how = {"limit_s": RUN_TIMEOUT_S, "JAX_PLATFORMS": "cpu"}
    done = run_python(SCRIPT, "--maxtext", given, *words.split(), **how)
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert [*rows] == ["ours", "dense", "ring", "ragged"]
    # At this size only rows over 1.25 shares are dropped; one seed, one set of batches.
    for name in ("dense", "ring"):
        assert rows[name]["loss"] == pytest.approx(rows["ours"]["loss"], abs=1e-2)
        assert rows[name]["tokens_per_s"] > 0
    assert rows["ours"]["runtime_gib"] is not None
    assert "ms" not in rows["ragged"]
    assert "ragged-all-to-all" in rows["ragged"]["says"]  # XLA:CPU has none
