"""Writes the messages of `proto/` into OUT/ep_runtime/v1 (OUT defaults to the repository).

    python tests/tools/generate_stubs.py [OUT]
    python tests/tools/generate_stubs.py --check      exit 1 where the committed stubs differ

Made with the oldest supported grpcio-tools, so that newer runtimes load the result. Field numbers
in the types are left out, as nothing uses them. `ep_runtime/services.py` makes the stubs of RPCs.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.metadata
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS_VERSION = "1.80.0"
FIELD_NUMBERS = re.compile(r"^ +\w+_FIELD_NUMBER: _ClassVar\[int\]\n", re.M)


def generate(out: Path) -> list[Path]:
    """Runs protoc; returns the written files relative to `out`."""
    found = importlib.metadata.version("grpcio-tools")
    if found != TOOLS_VERSION:
        raise SystemExit(f"grpcio-tools must be {TOOLS_VERSION}, got {found}")
    import grpc_tools.protoc

    proto_dir = ROOT / "proto"
    sources = sorted(proto_dir.glob("ep_runtime/v1/*.proto"))
    out.mkdir(parents=True, exist_ok=True)
    well_known = Path(grpc_tools.protoc.__file__).parent / "_proto"
    code = grpc_tools.protoc.main(
        [
            "protoc",
            f"-I{proto_dir}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            *map(str, sources),
        ]
    )
    if code != 0:
        raise SystemExit(code)
    for path in (out / "ep_runtime/v1").glob("*_pb2.pyi"):
        path.write_text(FIELD_NUMBERS.sub("", path.read_text()))
    return sorted(path.relative_to(out) for path in (out / "ep_runtime/v1").glob("*_pb2*"))


def check() -> int:
    """Returns 0 if the committed stubs equal freshly made ones."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder))
        committed = {p.relative_to(ROOT) for p in (ROOT / "ep_runtime/v1").glob("*_pb2*")}
        stale = committed.symmetric_difference(fresh)
        stale |= {
            path
            for path in committed.intersection(fresh)
            if not filecmp.cmp(ROOT / path, Path(folder) / path, shallow=False)
        }
    for path in sorted(stale):
        sys.stderr.write(f"stale or missing: {path}\n")
    return 1 if stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        return check()
    generate(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
