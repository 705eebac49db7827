"""Makes a directory for jobs that start a daemon."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A runtime directory of this test's jobs."""
    with tempfile.TemporaryDirectory(prefix="ept-") as name:
        yield Path(name)
