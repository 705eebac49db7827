"""One process of `ep-runtime demo --processes P`: `python -m ep_runtime_client.demo.worker ORDER`.

ORDER is JSON: the demo's config and which of the processes this is. The process ends with its
parent, which holds the other end of its standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from ep_runtime.errors import EpRuntimeError
from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.interrupt import INTERRUPTED
from ep_runtime_client.demo.together import Member


def _end_with_parent() -> None:
    """Standard input ends when the parent does, however it ended."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _keep_output_ours(member: Member) -> None:
    """Gloo's C++ code writes to file descriptor 1; what Python writes stays where it was."""
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    with open(Path(member.directory) / f"{member.index}.native.log", "wb") as log:
        os.dup2(log.fileno(), 1)
    sys.stdout = ours


def main(order: str) -> int:
    """Runs this process's part; returns its exit code."""
    said = json.loads(order)
    config, member = DemoConfig(**said["config"]), Member(**said["member"])
    threading.Thread(target=_end_with_parent, name="demo-parent", daemon=True).start()
    _keep_output_ours(member)
    job = importlib.import_module("ep_runtime_client.demo.job")
    return int(job.run(config, member))


def _leave(code: int) -> NoReturn:
    """Ends without goodbye: jax.distributed would wait for processes that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except EpRuntimeError as error:
        render.err(f"ep-runtime demo: {error}")
        _leave(cli.exit_code(error))
    except Exception:  # noqa: BLE001 - XLA's, for which goodbye would hang as well
        traceback.print_exc()
        _leave(1)
