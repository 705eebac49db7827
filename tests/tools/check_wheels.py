"""Checks the wheels that `.ci/wheels` built.

check_wheels.py same WHEEL WHEEL           the same files; equal ones but for libraries
check_wheels.py check WHEEL PLATFORM...    name, tags, version and libraries are a release's
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Everything else is linked statically, or opened by name when needed: libcuda, libnccl.
NEEDED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
LOADER = re.compile(r"ld-linux[\w-]*\.so\.\d")


def version() -> str:
    """Reads the version from the source."""
    text = (ROOT / "ep_runtime/__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def check_same(first: Path, second: Path) -> None:
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        apart = set(one.namelist()) ^ set(other.namelist())
        assert not apart, f"only one of the wheels has {sorted(apart)}"
        for name in one.namelist():
            # RECORD contains the libraries' hashes, and libraries contain paths of their build.
            if not name.endswith((".so", "/RECORD")):
                assert one.read(name) == other.read(name), f"{name} is not the same in both wheels"


def check(path: Path, platforms: list[str]) -> None:
    """The wheel has these libraries and no others."""
    name, number, *build, python, abi, platform = path.stem.split("-")
    assert (name, number, python, abi) == ("ep_runtime", version(), "py3", "none"), path.name
    assert "manylinux_" in platform, f"{path.name} runs on no other machine"
    cuda = [tag for tag in build if re.fullmatch(r"1cuda\d+", tag)]
    assert (len(build), len(cuda)) == ((1, 1) if "cuda" in platforms else (0, 0)), path.name
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        names = wheel.namelist()
        metadata = next(item for item in names if item.endswith(".dist-info/METADATA"))
        assert HeaderParser().parsestr(wheel.read(metadata).decode())["Version"] == version()
        assert any(item.endswith("/LICENSE") for item in names)
        assert "ep_runtime/py.typed" in names
        libraries = [item for item in names if ".so" in Path(item).name]
        wanted = [f"ep_runtime/_native/libep_runtime_{item}.so" for item in platforms]
        assert sorted(libraries) == sorted(wanted), libraries
        for library in libraries:
            check_needed(Path(wheel.extract(library, folder)))


def check_needed(library: Path) -> None:
    done = subprocess.run(
        ["objdump", "-p", str(library)], capture_output=True, text=True, timeout=60, check=True
    )
    needed = set(re.findall(r"NEEDED\s+(\S+)", done.stdout))
    others = {item for item in needed - NEEDED if not LOADER.fullmatch(item)}
    assert not others, f"{library.name} needs {sorted(others)}"


def main(order: str, *words: str) -> None:
    if order == "same":
        check_same(*map(Path, words))
    else:
        check(Path(words[0]), list(words[1:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
