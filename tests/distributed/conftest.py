"""The fixtures around a real daemon."""

from daemon_fixtures import (  # noqa: F401 - fixtures are found by name
    _children_import_what_we_import,
    address,
    admin,
    daemon,
    directory,
    run_program,
)
from harness import daemon_process, restarted  # noqa: F401 - the same
