"""The fixtures around a real daemon; programs that compile while a test looks."""

import pytest
from daemon_fixtures import (  # noqa: F401 - fixtures are found by name
    _children_import_what_we_import,
    address,
    daemon,
    directory,
    run_program,
)


@pytest.fixture(autouse=True)
def _compiles(uncached: None) -> None:
    """Tests look at what partitioning does, or serialize executables."""
