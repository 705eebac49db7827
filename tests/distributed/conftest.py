"""The fixtures around a real daemon, and a directory of jobs that start one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_fixtures import (  # noqa: F401 - fixtures are found by name
    _children_import_what_we_import,
    address,
    admin,
    daemon,
    directory,
    run_program,
)
from harness import daemon_process, restarted  # noqa: F401 - the same


@pytest.fixture
def place() -> Iterator[Path]:
    """A runtime directory of this test's jobs."""
    with tempfile.TemporaryDirectory(prefix="ept-") as name:
        yield Path(name)
