"""Writes docs/reference/names.md: every public name, its signature and its first sentence.

    python tests/tools/generate_names.py
    python tests/tools/generate_names.py --check      exit 1 if the committed page is stale

The other pages of the reference are filled by mkdocs alone; a code host shows this one.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/names.md"
sys.path.insert(0, str(ROOT / "tests"))

from public_names import OF_A_FRAMEWORK, Public, public  # noqa: E402

HEAD = """\
# All names

Every public name of `import ep_runtime as ep`, with its arguments and its first sentence.
`help(ep.moe)` and the other pages of the site's [reference](index.md) have the rest: shapes,
errors, costs, examples. `tests/tools/generate_names.py` writes this page from the docstrings.
"""
TITLES = {"function": "Functions", "class": "Classes", "exception": "Errors"}


def default_text(value: Any) -> str:
    """Formats a name as a user types it, the same with every Python and JAX."""
    if inspect.isclass(value):
        return f"jnp.{value.__name__}"
    if type(value).__module__.startswith("ep_runtime") and value == type(value)():
        return f"ep.{type(value).__name__}()"
    text = repr(value).replace("'", '"')
    return "..." if " object at 0x" in text else text


@dataclasses.dataclass(frozen=True)
class _Shown:
    text: str

    def __repr__(self) -> str:
        return self.text


def arguments(function: Any, hidden: Iterable[str] = ()) -> str:
    """Keeps names and defaults; docstrings have the types."""
    found = inspect.signature(function).parameters.items()
    kept = [value for name, value in found if name not in ("self", "cls", *hidden)]
    empty = inspect.Parameter.empty
    bare = [
        value.replace(
            annotation=empty,
            default=empty if value.default is empty else _Shown(default_text(value.default)),
        )
        for value in kept
    ]
    return str(inspect.Signature(bare))


def signature(item: Public) -> str:
    """Formats `(a, *, b=1)`; "" for names that users do not call."""
    if item.kind in ("function", "method"):
        returned = inspect.signature(item.value).return_annotation
        # Without the modules of our own types: EpRuntimeError, not errors.EpRuntimeError.
        shown = re.sub(r"\b(?!jax\b)\w+\.(?=[A-Z])", "", str(returned))
        return arguments(item.value) + ("" if shown == "None" else f" -> {shown}")
    if item.name == "nnx.MoEBlock":
        return arguments(item.value.__init__)
    if dataclasses.is_dataclass(item.value) or hasattr(item.value, "_fields"):
        return arguments(item.value, OF_A_FRAMEWORK if item.name.startswith("linen.") else ())
    return ""


def entry(item: Public) -> str:
    first = " ".join(item.doc.split("\n\n", 1)[0].split())
    indent = "    " if item.kind in ("method", "property") else ""
    return f"{indent}- `ep.{item.name}{signature(item)}`<br>{first}\n"


def page() -> str:
    items = public()
    modules = {item.name: item for item in items if item.kind == "module"}
    top: dict[str, list[Public]] = {kind: [] for kind in TITLES}
    of_module: dict[str, list[Public]] = {name: [] for name in ("nnx", "linen", "optax", *modules)}
    kind = ""
    for item in items:
        module = item.name.partition(".")[0]
        if item.kind == "module":
            continue
        if module in of_module:
            of_module[module].append(item)
            continue
        kind = kind if item.kind in ("method", "property") else item.kind
        top[kind].append(item)
    parts = [HEAD]
    parts += [section(TITLES[kind], "", found) for kind, found in top.items()]
    for name, found in of_module.items():
        parts.append(section(f"`ep.{name}`", modules[name].doc.split("\n\n", 1)[0], found))
    return "\n".join(parts)


def section(title: str, text: str, items: Iterable[Public]) -> str:
    said = f"{' '.join(text.split())}\n\n" if text else ""
    return f"## {title}\n\n{said}" + "".join(map(entry, items))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == made:
        return 0
    sys.stderr.write(f"stale: {PAGE.relative_to(ROOT)}; run tests/tools/generate_names.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
