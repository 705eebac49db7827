"""`run.py` finds nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 3600


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_nothing_is_found(sanitizer: str) -> None:
    script = Path(__file__).with_name("run.py")
    subprocess.run([sys.executable, script, sanitizer], check=True, timeout=LIMIT_S)
