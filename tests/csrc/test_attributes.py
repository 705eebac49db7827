"""Every attribute that a call of the native library reads by its name is one that it knows."""

from __future__ import annotations

import re
from pathlib import Path

_FFI = Path(__file__).parents[2] / "csrc/ffi"


def test_attributes_that_are_read_are_not_refused() -> None:
    known = re.search(r"kAttributes\[\] = \{(.*?)\}", (_FFI / "read_call.cc").read_text(), re.S)
    assert known is not None
    text = "\n".join(path.read_text() for path in _FFI.rglob("*.cc"))
    read = re.findall(r'(?:attrs\.get<\w+>\(|ReadIfThere\(attrs, )"(\w+)"', text)
    assert "node_size" in read
    assert "rows" in read
    assert sorted(set(read)) == sorted(re.findall(r'"(\w+)"', known.group(1)))
