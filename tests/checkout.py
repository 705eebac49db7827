"""Ends pytest, when imported, if a package would not come from this checkout. Processes that tests
start import the same packages, and modules of this folder.

With this checkout on the path, which pytest's own `pythonpath` puts there, it is what is tested: an
editable install of another one would come before it. Without, it is the wheel that this interpreter
has.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = {
    "ep_runtime": ROOT,
    "ep_runtime_server": ROOT / "server",
    "ep_runtime_client": ROOT / "client",
    "ep_runtime_bench": ROOT / "client",
}


def _check() -> None:
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    on_path = ROOT in {Path(entry).resolve() for entry in sys.path}
    path = []
    for name, folder in _FOLDERS.items():
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve().parents[1] if spec and spec.origin else None
        parts = (spec and spec.submodule_search_locations) or ()
        found = {Path(part).resolve().parent for part in parts}
        wanted = {folder} if on_path else installed
        # An editable install keeps the native library next to the other installed packages.
        if origin not in wanted or not found <= wanted | installed:
            sys.exit(
                f"{name} must come from {_listed(wanted)}, got {_listed(found) or 'none'}.\n"
                "To test this checkout: .venv/bin/pip install -e '.[test]' && "
                ".venv/bin/python -m pytest\n"
                "To test an installed wheel: python -P -m pytest -o pythonpath=tests"
            )
        path.append(str(origin))
    # Other entries of the path stay behind ours, because our dependencies may be installed there.
    path += [str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, path)))


def _listed(folders: set[Path]) -> str:
    return " and ".join(sorted(map(str, folders)))


_check()
