"""Programs that compile while a test looks."""

import pytest


@pytest.fixture(autouse=True)
def _compiles(uncached: None) -> None:
    """Tests look at what partitioning does, or serialize executables."""
